"""CPU, memory and other resources of nodes beside GPUs: how many members a tray carries by them.

Amounts follow kube-scheduler's NodeResourcesFit (`core.cluster.scheduling`). A node has what it says is
allocatable, less what its pods request.

`with_node_resources` bounds the groups of a gang by that, in this order:

1. A group is left alone if no tray has less of any resource for each of its GPUs than a member asks for each
   of its own. Then GPUs bound it first, however groups are mixed on a tray, and the search stays on its fast
   path.
2. Any other group gets a kind of its own (`GangGroup.devices`). Of that kind a tray serves as many members as
   its resources carry, and no more than its devices: beside what is in use now, and once those are gone who
   hold its GPUs. What others there request stays.

Groups of two such kinds are not put on one tray: how they would share it is not counted. So a gang may be
refused that fits only with unlike members beside each other.
"""

from collections.abc import Container, Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType

from msgspec.structs import replace

from rackloom.core.allocate.quantity import in_binary_units
from rackloom.core.cluster.metadata import name_of
from rackloom.core.cluster.objects import JsonMapping
from rackloom.core.cluster.pods import is_bound_pod, node_of, pod_owner
from rackloom.core.cluster.scheduling import (
    CPU_RESOURCE,
    MEMORY_RESOURCE,
    Thousandths,
    effective_requests,
    node_amounts,
)
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import ClaimCapacity, PlacementSite, PlacementTray
from rackloom.core.place.placement_values import Gang, GangGroup

# How many members a tray carries.


class NodeUse:
    """What the nodes of a site have, and what is requested of each by whom."""

    def __init__(self, state: ClusterState, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
        """`renamed`: owners that holds name differently."""
        self._labels = state.labels
        self._renamed = renamed
        self._nodes = {name_of(node): node for node in state.nodes}
        self._pods: dict[str, list[JsonMapping]] = {}
        for pod in filter(is_bound_pod, state.pods):
            self._pods.setdefault(node_of(pod), []).append(pod)
        self._planned: dict[str, list[tuple[str, Thousandths]]] = {}
        self._left: dict[str, Thousandths] = {}

    def add(self, node: str, owner: str, amounts: Thousandths) -> None:
        """Count what a planned member of an owner requests of a node."""
        self._planned.setdefault(node, []).append((owner, amounts))
        self._left.pop(node, None)

    def add_held(self, holds: Iterable[TrayHold]) -> None:
        """Count what members that are still to come request of the trays that are held for them."""
        for hold in holds:
            if hold.requests:
                self.add(hold.tray, hold.owner, dict(hold.requests))

    def left(self, node: str) -> Thousandths | None:
        """What is left of a node; None: it does not say what it has.

        A kubelet always says it of CPUs; objects of a file may lack it.
        """
        if node not in self._left:
            rest = dict(node_amounts(self._nodes[node]) if node in self._nodes else {})
            if CPU_RESOURCE not in rest:
                return None
            for pod in self._pods.get(node, ()):
                _take(rest, effective_requests(pod))
            for _, amounts in self._planned.get(node, ()):
                _take(rest, amounts)
            self._left[node] = rest
        return self._left[node]

    def left_without(self, node: str, owners: Container[str]) -> Thousandths | None:
        """What is left once these owners are gone; None: the node does not say what it has."""
        left = self.left(node)
        if left is None:
            return None
        rest = dict(left)
        for pod in self._pods.get(node, ()):
            owner = pod_owner(pod, self._labels.gang).text
            if self._renamed.get(owner, owner) in owners:
                _take(rest, effective_requests(pod), -1)
        for owner, amounts in self._planned.get(node, ()):
            if owner in owners:
                _take(rest, amounts, -1)
        return rest


def _take(rest: dict[str, int], amounts: Thousandths, times: int = 1) -> None:
    for name, amount in amounts.items():
        rest[name] = rest.get(name, 0) - times * amount


def with_node_resources(
    site: PlacementSite, gang: Gang, asked: Mapping[str, Thousandths], use: NodeUse
) -> tuple[PlacementSite, Gang]:
    """Site and gang with the groups bounded by what nodes have beside GPUs.

    `asked`: what a member of each group requests, without GPUs. Helpers are not bounded.
    """
    rest = _Rest(site, use)
    bounded = {
        group.name: asked[group.name]
        for group in gang.device_groups
        if asked.get(group.name) and rest.bounds(group, asked[group.name])
    }
    if not bounded:
        return site, gang
    groups = tuple(
        replace(group, devices=_kind_of(group)) if group.name in bounded else group for group in gang.groups
    )
    kinds = {
        _kind_of(group): (group.devices, bounded[group.name])
        for group in gang.groups
        if group.name in bounded
    }

    def with_rooms(tray: PlacementTray) -> PlacementTray:
        rooms, scarce = dict(tray.rooms), {}
        now, empty = rest.of(tray.name)
        for kind, (claimed, amounts) in kinds.items():
            by_devices = tray.rooms.get(claimed) if claimed is not None else _UNBOUNDED
            if by_devices is not None:
                rooms[kind] = ClaimCapacity(
                    now=min(by_devices.now, members_of(now, amounts)),
                    empty=min(by_devices.empty, members_of(empty, amounts)),
                )
            if now is not None and (lacking := scarcity(now, amounts, "a member")):
                scarce[kind] = lacking
        return replace(tray, rooms=rooms, scarce=scarce)

    return site.with_trays(with_rooms), replace(gang, groups=groups)


class _Rest:
    """What is left of each tray now, and once those are gone who hold its GPUs."""

    def __init__(self, site: PlacementSite, use: NodeUse) -> None:
        self._trays = site.trays
        self._use = use
        self._holders: dict[str, set[str]] = {}
        self._gpus = {tray.name: tray.gpus for tray in site.trays}
        for hold in site.holds:
            self._holders.setdefault(hold.tray, set()).add(hold.owner)
            if hold.tray in self._gpus:
                self._gpus[hold.tray] = 0 if hold.is_whole else self._gpus[hold.tray] - hold.gpus

    def of(self, tray: str) -> tuple[Thousandths | None, Thousandths | None]:
        now = self._use.left(tray)
        holders = self._holders.get(tray)
        return now, now if holders is None else self._use.left_without(tray, holders)

    def bounds(self, group: GangGroup, amounts: Thousandths) -> bool:
        """Whether an open tray may run out of a resource before it runs out of GPUs."""
        for tray in self._trays:
            if tray.shut is None:
                now, empty = self.of(tray.name)
                if _is_short(now, group, self._gpus[tray.name], amounts):
                    return True
                if tray.name in self._holders and _is_short(empty, group, tray.gpus, amounts):
                    return True
        return False


def _is_short(left: Thousandths | None, group: GangGroup, gpus: int, amounts: Thousandths) -> bool:
    if left is None or gpus < group.gpus:
        return False
    # Without GPUs, a member may be alone on its tray, and must still fit.
    members, each = (gpus, group.gpus) if group.gpus else (1, 1)
    return any(left.get(name, 0) * each < amount * members for name, amount in amounts.items())


MANY = 1 << 20
"""More members than a tray serves."""
_UNBOUNDED = ClaimCapacity(now=MANY, empty=MANY)


def members_of(left: Thousandths | None, amounts: Thousandths) -> int:
    """How many members what is left of a node carries."""
    if left is None:
        return MANY
    carried = (left.get(name, 0) // amount for name, amount in amounts.items() if amount)
    return max(0, min(carried, default=MANY))


def scarcity(left: Thousandths, amounts: Thousandths, whose: str) -> str:
    """What of these amounts is too little, and `whose` they are; empty where nothing is."""
    there = {name: max(left.get(name, 0), 0) for name in amounts}
    lacking = (
        f"{_amount_text(name, there[name])} of the {_amount_text(name, amount)} {name} of {whose}"
        for name, amount in sorted(amounts.items())
        if there[name] < amount
    )
    return " and ".join(lacking)


def _amount_text(name: str, thousandths: int) -> str:
    if name == MEMORY_RESOURCE:
        return in_binary_units(Fraction(thousandths, 1000))
    return f"{thousandths / 1000:g}"


def _kind_of(group: GangGroup) -> str:
    """The kind of a bounded group: no claims have a name with a space."""
    return f"{group.devices or ''} {group.name}"
