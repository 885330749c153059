"""The placement problem as values: a gang, its trays, and its plan. The only constructor of trays.

A `PlacementSite` is the trays of a cluster in filling order, and the holds on them. A clique is what
`nvidia.com/gpu.clique` names: GPUs that share memory over NVLink. A tray is one node. A node without a
clique shares memory with no other and counts as a clique by itself (`PlacementTray.sharing`).

`placement_site` turns the nodes of a `ClusterState` into trays. A tray is closed while it is cordoned, not
ready or tainted. A tray that does not match the node rule is marked as unfit, since servicing it would not
help. `BoundNeighbours` names the nodes that anti-affinity with other jobs' pods rules out for each group.
`DraDevices` holds slices, device classes and allocated claims as the allocator takes them.

A `Gang` runs whole or not at all. Its groups have interchangeable members. Without a segment size, all
groups with the same `share` are in one clique. With one, each group is cut into segments, each in one
clique. A group whose members take no device (an MPI launcher) is a helper: it goes beside the first
member that does. `PlacementTerms` are the demands of a member beside devices: a kind of tray (`where`), the
IMEX channel of its node (each node has one, and it belongs to one ComputeDomain at a time), and groups that
it must not share a tray with. A `GangPlan` assigns every member to a tray, names the spare trays, and states
the price in fragmentation.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.cluster.jobs import Job, owner_of_job
from rackloom.core.cluster.nodes import closed_reasons, node_clique
from rackloom.core.cluster.pods import Toleration, is_bound_pod, pod_owner
from rackloom.core.cluster.scheduling import (
    NodeRule,
    PodIdentity,
    TopologyDomains,
    bound_pod_identity,
    unmet_requirements,
)
from rackloom.core.cluster.state import ClusterState, TrayHold

# The gang and its plan.


Count = Annotated[int, msgspec.Meta(ge=0)]


class PlacementTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a member requires beside devices: of its tray, and of the other members there."""

    where: str = ""
    """A key of `PlacementTray.closed`; "": any tray that is open."""
    channel: bool = False
    """It has the IMEX channel of its tray: a node has one, and belongs to one ComputeDomain at a time."""
    likeness: str = ""
    """Its name in `apart`."""
    apart: tuple[str, ...] = ()
    """Likenesses, perhaps its own, that are on no tray with it; the relation is symmetric."""

    def bar(self, other: "PlacementTerms") -> bool:
        """Whether two members with these terms are never on one tray."""
        return (self.channel and other.channel) or other.likeness in self.apart


class GangGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Interchangeable members of a gang."""

    name: str
    members: Count
    gpus: Count
    """GPUs of one member, whether counted (`nvidia.com/gpu`) or claimed."""
    devices: str | None = None
    """A kind of claims (GPUs, NICs) that each member has: a key of `PlacementTray.rooms`."""
    share: str = ""
    """Groups with the same word here are in one clique (prefill here, decode there); segments come first."""
    terms: PlacementTerms | None = None
    """None: it requires nothing else."""
    follows: bool = False
    """Its ranks go on from those of the group before it, so a segment may have members of both."""

    @property
    def has_channel(self) -> bool:
        """Each member has an IMEX channel."""
        return self.terms is not None and self.terms.channel

    @property
    def is_helper(self) -> bool:
        """It takes no device (an MPI launcher), so it goes beside the first member that does."""
        return self.gpus == 0 and self.devices is None and not self.has_channel


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """A job that runs whole or not at all."""

    name: str
    groups: tuple[GangGroup, ...]
    priority: int = 0
    preempts: bool = True
    """Jobs of lower priority may be ended for it."""
    segment: Count | None = None
    """Members that must share a clique: each group, with those that follow it, is cut into segments of this
    many. None: all groups of the same `share` are in one clique."""
    spares: Count = 0
    """Trays to leave free in each clique that is used, for a member whose tray is lost."""
    exclusive: bool = False
    """Takes only trays that are empty, and each of them whole (they are reserved by a taint)."""

    @property
    def device_groups(self) -> tuple[GangGroup, ...]:
        """All groups but the helpers."""
        return tuple(group for group in self.groups if not group.is_helper)


class MemberAssignment(msgspec.Struct, frozen=True):
    """One member on its tray."""

    group: str
    member: Count
    """From 0 within the group."""
    tray: str


REGION_SIZES = (16, 8, 4, 2, 1)
"""Gang sizes in trays that are watched, largest first: the recommended segments (16 of an NVL72's 18)."""


class FreeRegionCount(msgspec.Struct, frozen=True):
    """How many gangs of a size the empty trays of the site can take, each in one clique."""

    trays: Count
    before: Count
    after: Count


class GangPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tray for every member, and why."""

    gang: str
    seats: tuple[MemberAssignment, ...]
    """Groups in the order of the gang, members from 0."""
    cliques: tuple[str, ...]
    """In the order of the members that use them."""
    spares: tuple[str, ...]
    """Trays left free for this gang, all in `cliques`."""
    price: tuple[FreeRegionCount, ...]
    """The free regions of each size that the plan closes: its cost in fragmentation."""
    reason: str

    @property
    def trays(self) -> tuple[str, ...]:
        """The trays that carry a member, each once."""
        return tuple(dict.fromkeys(member.tray for member in self.seats))


# Trays and sites as values.


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
    """Its value of `SchedulerLabels.host`, which node affinity reads; None if it is the name."""
    gpus: int
    """GPUs that it offers when nothing is in use."""
    shut: str | None = None
    """Why no new member may go there: cordoned, not ready, a taint, reserved."""
    is_unfit: bool = False
    """It is shut because it is not what the job asks for: servicing the tray would not help."""
    closed: Mapping[str, str] = {}
    """By `PlacementTerms.where`: why members with it may not go there, while others may."""
    rooms: Mapping[str, ClaimCapacity] = {}
    """By `GangGroup.devices`; a kind that is missing cannot be served."""
    scarce: Mapping[str, str] = {}
    """By `GangGroup.devices`: what is left of CPU, memory and the like, if a member needs more."""

    @property
    def sharing(self) -> str:
        """The clique; a node without one shares memory with no other, and is a clique by itself."""
        return self.clique or self.name


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


# The site of a state.


ANONYMOUS_OWNER = "another job"


def placement_site(
    state: ClusterState,
    *,
    counted: bool = False,
    claimed: bool = False,
    tolerations: tuple[Toleration, ...] | None = (),
    rule: NodeRule = NodeRule(),  # noqa: B008 (a frozen value)
    avoided: Mapping[str, str] | None = None,
) -> PlacementSite:
    """The site as pods with these tolerations and this rule may use it, with the holds of the state.

    `counted`, `claimed`: how its job asks for GPUs. `tolerations`: None leaves taints out, because each group
    of a gang reads them by its terms. `avoided`: nodes from which something else keeps the pods, and what.
    """
    trays = []
    for node in state.nodes:
        name, labels = node.name, node.labels
        closed, unfit = list(closed_reasons(node, tolerations)), list(unmet_requirements(rule, node))
        if avoided and name in avoided:
            unfit.append(avoided[name])
        # The kubelet reports the host name: a cloud provider may have given the node another name.
        host = labels.get(state.labels.host)
        trays.append(
            PlacementTray(
                name=name,
                clique=node_clique(labels, state.labels.clique),
                host=None if host == name else host,
                gpus=state.gpus[name].usable(counted=counted, claimed=claimed),
                shut="; ".join((*closed, *unfit)) or None,
                is_unfit=bool(unfit),
            )
        )
    return PlacementSite(tuple(trays), state.holds)


def without_foreign_names(holds: Iterable[TrayHold], viewer: str | None) -> tuple[TrayHold, ...]:
    """The holds as a namespace may see them: owners in others have no names, but stay distinct.

    The search reasons about whole jobs that end. None: all keep their names.
    """
    if viewer is None:
        return tuple(holds)
    aliases: dict[str, str] = {}
    named = []
    for hold in holds:
        namespace, slash, _ = hold.owner.partition("/")
        if (namespace if slash else "default") != viewer:
            alias = f"{ANONYMOUS_OWNER} {len(aliases) + 1}" if aliases else ANONYMOUS_OWNER
            hold = replace(hold, owner=aliases.setdefault(hold.owner, alias))
        named.append(hold)
    return tuple(named)


# Terms of groups beside devices.


AvoidedTrays = Mapping[str, Mapping[str, str]]
"""By group: nodes from which pods of other jobs keep it, and which."""


class BoundNeighbours:
    """The bound pods of a state, which may keep pods of other jobs off the nodes around them."""

    def __init__(self, state: ClusterState) -> None:
        self._labels = state.labels
        self._domains = TopologyDomains(state.nodes)
        self._bound = list(filter(is_bound_pod, state.pods))
        self._with_terms = [pod for pod in self._bound if pod.spec.apart]

    def avoided_by(self, job: Job) -> AvoidedTrays:
        """Nodes where those of a group and pods of other jobs are never together, and whose these are."""
        labels, own = self._labels, owner_of_job(job, self._labels.gang)
        by_identity: list[tuple[PodIdentity, dict[str, str]]] = []
        found = {}
        for group in job.groups:
            identity = group.identity
            avoided = next((nodes for known, nodes in by_identity if known == identity), None)
            if avoided is None:
                # Pods without a term keep no group off: they matter only for a group that has one.
                avoided = {
                    node: f"kept apart from {owner.text}"
                    for pod in (self._bound if identity.apart else self._with_terms)
                    if (owner := pod_owner(pod, labels.gang)) != own
                    for node in self._domains.around(
                        pod.node, identity.barred_by(bound_pod_identity(pod, labels.host))
                    )
                }
                by_identity.append((identity, avoided))
            if avoided:
                found[group.name] = avoided
        return found


# Devices that drivers publish and claims hold, as the allocator takes them.


ClaimsByKind = Mapping[str, tuple[ResourceClaim, ...]]
"""The claims of one member by `Group.devices`."""


class DraDevices(msgspec.Struct, frozen=True, kw_only=True):
    """What drivers publish, and the claims that hold some of it."""

    nodes: tuple[Node, ...]
    classes: tuple[DeviceClass, ...]
    slices: tuple[ResourceSlice, ...]
    claims: tuple[ResourceClaim, ...] = ()
    """Those that are allocated."""

    owners: Mapping[str, str] = {}
    """The owner of each claim (`namespace/name`), as holds name it."""


def claims_devices(claim: ResourceClaim) -> bool:
    """Whether it takes any device: requests with admin access do not."""
    requests = claim.spec.devices.requests
    return any(request.exactly is None or not request.exactly.admin_access for request in requests)
