"""The facts of a cluster as values: `ClusterState`, the holds on each tray, and unreadable objects.

`core.cluster.reader` makes a state. Placement, gangs, Kueue's check and the command line take it, so that no
two of them can read one cluster differently. Its nodes and pods are typed values with the fields that
decisions read: a site has many.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import NodeGpus, NodeObject, PublishedDevices
from rackloom.core.cluster.objects import JsonMapping, name_of
from rackloom.core.cluster.pods import PodObject, object_namespace

HIGHEST_PRIORITY = 2**31 - 1
"""No priority (an int32) is above it, so nothing may preempt a hold that has it."""


class TrayHold(msgspec.Struct, frozen=True, kw_only=True):
    """An owner's share of a tray: running pods, or a reservation."""

    owner: str
    """The job: holds of one owner move together."""
    tray: str
    gpus: int
    priority: int = 0
    movable: bool = False
    """It may be restarted elsewhere. Pinned or unknown pods may not."""
    is_whole: bool = False
    """Nothing else goes on the tray, regardless of its GPUs (a tray may have none, only NICs)."""
    channel: bool = False
    """It has the IMEX channel of the tray, of which there is one."""
    requests: tuple[tuple[str, int], ...] = ()
    """Requests beside devices of members that are still to come, by resource, in thousandths of its unit.
    Pods that are there show it themselves."""
    kept_off: frozenset[str] = frozenset()
    """Trays that it may not use when it moves: labels of nodes, taints, and pods that it is never beside."""
    apart: frozenset[str] = frozenset()
    """Owners, perhaps its own, that it never shares a tray with, wherever they move."""


class Unreadable(msgspec.Struct, frozen=True):
    """An object that was left out, and why."""

    title: str
    """`Kind namespace/name`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.title} is left out: {self.reason}"


BoundPods = Mapping[str, Mapping[Any, PodObject]]
"""Bound pods that have not ended, by node and by a key of the pod."""


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one reading. Objects that could not be read are in `unreadable` alone."""

    labels: SchedulerLabels = SchedulerLabels()
    nodes: tuple[NodeObject, ...] = ()
    pods: tuple[PodObject, ...] = ()
    claims: tuple[JsonMapping, ...] = ()
    bound: BoundPods = {}
    gpus: Mapping[str, NodeGpus] = {}
    """By node."""
    published: PublishedDevices = {}
    holds: tuple[TrayHold, ...] = ()
    """Of pods, then of claims."""
    holders: tuple[TrayHold, ...] = ()
    """The holder of each claim in `claims`, as a hold on no tray."""
    unreadable: tuple[Unreadable, ...] = ()


def owners_of_claims(state: ClusterState) -> dict[str, str]:
    """The owner of each claim, by `namespace/name`."""
    return {
        f"{object_namespace(claim)}/{name_of(claim)}": holder.owner
        for claim, holder in zip(state.claims, state.holders, strict=True)
    }
