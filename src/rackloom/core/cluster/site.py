"""The trays of a cluster and the holds on them, and the label names of schedulers.

A `PlacementSite` is the trays of a cluster in filling order, and the holds on them. A clique is what
`nvidia.com/gpu.clique` names: GPUs that share memory over NVLink. A tray is one node; a node without a
clique shares memory with no other and counts as a clique by itself (`PlacementTray.sharing`). A
`TrayHold` is what an owner has of a tray: GPUs, its IMEX channel, or all of it.

`SchedulerLabels` is a table of label keys and object names, because vendors rename them; users can change
each.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.errors import Refused


class ClaimCapacity(msgspec.Struct, frozen=True):
    """How many members with certain claims a tray can serve, as `core/allocate` found."""

    now: int
    """Beside what is in use."""
    empty: int
    """When the holders of the tray's GPUs are gone."""


class PlacementTray(msgspec.Struct, frozen=True, kw_only=True):
    """A node with GPUs."""

    name: str
    clique: str | None
    """None: the node has no clique (no NVLink fabric, or GPUs in two partitions)."""
    host: str | None = None
    """Its value of `SchedulerLabels.host`, which node affinity reads, where that is not its name."""
    gpus: int
    """GPUs that it offers when nothing is in use."""
    shut: str | None = None
    """Why no new member may go there: cordoned, not ready, a taint, reserved."""
    is_unfit: bool = False
    """It is shut because it is not what the job asks for: servicing the tray would not help."""
    closed: Mapping[str, str] = {}
    """By `PlacementTerms.where`: why members with it may not go there, where others may."""
    rooms: Mapping[str, ClaimCapacity] = {}
    """By `GangGroup.devices`; a kind that is missing cannot be served."""
    scarce: Mapping[str, str] = {}
    """By `GangGroup.devices`: what is left of CPU, memory and the like, where a member asks for more."""

    @property
    def sharing(self) -> str:
        """The clique; a node without one shares memory with no other, and is a clique by itself."""
        return self.clique or self.name


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


class PlacementSite(msgspec.Struct, frozen=True):
    """The trays of a cluster in the order in which they are to be filled, and what is in use on them."""

    trays: tuple[PlacementTray, ...]
    holds: tuple[TrayHold, ...] = ()

    def with_trays(self, change: Callable[[PlacementTray], PlacementTray]) -> "PlacementSite":
        """The site with every tray as `change` returns it."""
        return PlacementSite(tuple(map(change, self.trays)), self.holds)


def combine_sites(sites: Mapping[str, PlacementSite]) -> PlacementSite:
    """One site for members of several kinds, from the site of each kind, by `PlacementTerms.where`.

    A tray that is closed to some of them only has their reasons in `PlacementTray.closed`.
    """
    trays = []
    for views in zip(*(site.trays for site in sites.values()), strict=True):
        closed = {where: tray.shut for where, tray in zip(sites, views, strict=True) if tray.shut is not None}
        is_closed_to_all = len(closed) == len(sites)
        trays.append(
            views[0] if is_closed_to_all else replace(views[0], shut=None, is_unfit=False, closed=closed)
        )
    return PlacementSite(tuple(trays), next(iter(sites.values())).holds)


# Names in messages, and names that schedulers and drivers use.


def list_names(names: Collection[str], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


POD_GROUP_VERSIONS = tuple(f"scheduling.k8s.io/{version}" for version in ("v1beta1", "v1alpha3", "v1alpha2"))
"""The API versions that have a PodGroup, the newest first.

Kubernetes 1.37 serves the first two, and 1.36 the last. All of them have the fields that are rendered. In
v1alpha1 (1.35) a group is a part of a Workload, and pods name it by another field.
"""


class SchedulerLabels(msgspec.Struct, frozen=True, kw_only=True):
    """Label keys, resource names and object names that the planner reads and renders."""

    clique: str = "nvidia.com/gpu.clique"
    host: str = "kubernetes.io/hostname"
    gpu: str = "nvidia.com/gpu"
    gpu_driver: str = "gpu.nvidia.com"
    gang: str = "rackloom.dev/gang"
    movable: str = "rackloom.dev/movable"
    """On pods: "true" where the job may be restarted elsewhere."""
    topology: str = "nvlink"
    """Name of the Topology object of Kueue and of KAI."""
    queue: str = "default"
    job: str = "rackloom.dev/job"
    """On pods of a rendered job: its affinity selects only them."""
    pod_group_version: str = ""
    """Version of the PodGroup: one of `POD_GROUP_VERSIONS`. Empty: the first that the cluster serves."""

    def changed(self, pairs: list[str]) -> "SchedulerLabels":
        """With `name=value` pairs of a command line. Raises Refused for an unknown name."""
        named: dict[str, str] = {}
        for pair in pairs:
            name, found, value = pair.partition("=")
            if not found or not value or name not in self.__struct_fields__:
                known = ", ".join(self.__struct_fields__)
                raise Refused(f"no such label: {pair!r}", nearest_fix=f"NAME=VALUE with NAME one of {known}")
            named[name] = value
        return replace(self, **named)
