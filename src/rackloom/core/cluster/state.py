"""The facts of a cluster as values: `ClusterState`, what is held on each tray, and unreadable objects.

`core.cluster.reader` makes a state. Placement, gangs, Kueue's check and the command line take it, so that no
two of them can read one cluster differently.

A pod holds the GPUs that it requests in effect from its node, from when it is bound until it has ended. If
the scheduler's own claim serves them (KEP-5004), the claim holds them instead. `core.cluster.claims` has the
rules for claims.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import NodeGpus, PublishedDevices
from rackloom.core.cluster.objects import JsonMapping, has_pod_ended, is_resource_claimed
from rackloom.core.cluster.pods import object_namespace, pod_owner
from rackloom.core.cluster.scheduling import requested_devices

HIGHEST_PRIORITY = 2**31 - 1
"""No priority (an int32) is above it, so nothing may preempt a hold that has it."""


class TrayHold(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner has of a tray: running pods, or a reservation."""

    owner: str
    """The job: holds of one owner move together."""
    tray: str
    gpus: int
    priority: int = 0
    movable: bool = False
    """It may be restarted elsewhere; what is pinned or unknown may not."""
    is_whole: bool = False
    """Nothing else goes on the tray, whatever its GPUs (a tray may have none, only NICs)."""
    channel: bool = False
    """It has the IMEX channel of the tray, of which there is one."""
    requests: tuple[tuple[str, int], ...] = ()
    """What members that are still to come request of the node beside devices: by resource, in thousandths of
    its unit. Pods that are there show it themselves."""
    kept_off: frozenset[str] = frozenset()
    """Trays that it may not use when it moves: labels of nodes, taints, and pods that it is never beside."""
    apart: frozenset[str] = frozenset()
    """Owners, perhaps its own, with which it is on no tray wherever they move."""


class Unreadable(msgspec.Struct, frozen=True):
    """An object that was left out, and why."""

    title: str
    """`Kind namespace/name`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.title} is left out: {self.reason}"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one reading. Objects that could not be read are in `unreadable` alone."""

    labels: SchedulerLabels = SchedulerLabels()
    nodes: tuple[JsonMapping, ...] = ()
    pods: tuple[JsonMapping, ...] = ()
    claims: tuple[JsonMapping, ...] = ()
    gpus: Mapping[str, NodeGpus] = {}
    """By node."""
    published: PublishedDevices = {}
    pod_holds: tuple[TrayHold, ...] = ()
    claim_holds: tuple[TrayHold, ...] = ()
    holders: tuple[TrayHold, ...] = ()
    """The holder of each claim in `claims`, as a hold on no tray."""
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def holds(self) -> tuple[TrayHold, ...]:
        """All holds: of pods, then of claims."""
        return self.pod_holds + self.claim_holds

    @property
    def bound_pods(self) -> Iterator[JsonMapping]:
        """Pods that are on a node and have not ended."""
        return (pod for pod in self.pods if is_bound_pod(pod))


# Holds of pods.


def is_bound_pod(pod: JsonMapping) -> bool:
    """Whether it is on a node and has not ended."""
    return bool((pod.get("spec") or {}).get("nodeName")) and not has_pod_ended(pod)


def counted_gpus(pod: JsonMapping, labels: SchedulerLabels) -> int:
    """The GPUs that a pod has by counting them. Raises ValueError for an unreadable amount."""
    gpus = requested_devices(pod.get("spec") or {}, labels.gpu)
    return 0 if gpus and is_resource_claimed(pod, labels.gpu) else gpus


def pod_hold(pod: JsonMapping, labels: SchedulerLabels, gpus: int) -> TrayHold:
    """A hold of the job of a pod on the pod's node."""
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    marks = (metadata.get("annotations") or {}, metadata.get("labels") or {})
    return TrayHold(
        owner=pod_owner(pod, labels.gang).text,
        tray=spec.get("nodeName") or "",
        gpus=gpus,
        priority=spec.get("priority") or 0,
        movable=next((m[labels.movable] for m in marks if labels.movable in m), "") == "true",
    )


def owners_of_claims(state: ClusterState) -> dict[str, str]:
    """The owner of each claim, by `namespace/name`."""
    return {
        f"{object_namespace(claim['metadata'])}/{claim['metadata'].get('name')}": holder.owner
        for claim, holder in zip(state.claims, state.holders, strict=True)
    }
