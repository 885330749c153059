"""Plan one gang on a site.

`try_gang` runs the search and builds the plan: members in the order of the gang, helpers beside the first
member of their share, spare trays, the price in free regions, and the reason. It returns None if the gang
does not fit. `plan_or_refuse` refuses such a gang, as `gang_fixes` explains it. `gang_fits` only shows
whether a plan exists. `plan_in_cliques` builds the plan for given cliques.

`with_plan_reserved` is the site once a plan holds its trays. Trays with claimed devices are held whole,
because the allocator was not asked what is left on them.

CPU, memory and other resources of nodes bound a gang, too. Amounts follow kube-scheduler's NodeResourcesFit
(`core.cluster.scheduling`). A node has its allocatable amounts, less the requests of its pods. Before the
search, `with_node_resources` bounds the groups of a gang by that, in this order:

1. A group is left alone if no tray has less of any resource for each of its GPUs than a member requests for
   each of its own. Then GPUs bound it first, however groups are mixed on a tray, and the search stays on its
   fast path.
2. Any other group gets its own kind (`GangGroup.devices`). Of that kind a tray serves as many members as
   its resources carry, and no more than its devices: beside the present use, and once the holders of its GPUs
   are gone. The requests of others on the tray stay.

Groups of two such kinds are not put on one tray: how they would share it is not counted. So a gang may be
refused that fits only with unlike members beside each other.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

from msgspec.structs import replace

from rackloom.core.allocate.quantity import in_binary_units
from rackloom.core.cluster.pods import pod_owner
from rackloom.core.cluster.scheduling import (
    CPU_RESOURCE,
    MEMORY_RESOURCE,
    Thousandths,
    effective_requests,
    node_amounts,
)
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import (
    ClaimCapacity,
    Gang,
    GangGroup,
    GangPlan,
    MemberAssignment,
    PlacementSite,
    PlacementTray,
)
from rackloom.core.place.search.clique_search import (
    CliqueChoice,
    CliqueRequest,
    choose_cliques,
    fragmentation_price,
    regions_closed,
)
from rackloom.core.place.search.gang_needs import colocation_groups
from rackloom.core.place.search.site_view import (
    CliqueTrays,
    SiteCapacity,
    SiteView,
    TrayPosition,
    capacity_for,
)
from rackloom.core.place.search.tray_assignment import (
    SearchBudget,
    TrialPlacement,
    assign_best_fit,
    spare_trays,
)
from rackloom.errors import Refused


def try_gang(
    site: PlacementSite | SiteView | SiteCapacity, gang: Gang, budget: SearchBudget, *, apart: bool = False
) -> GangPlan | None:
    """The plan, or None where the gang does not fit. Raises Refused for a gang that contradicts itself.

    All plans that are tried for one gang share a `budget`, and perhaps the capacity for it. `apart`: no two
    colocation groups share a clique, as exclusive topology of LeaderWorkerSet needs.
    """
    trial = TrialPlacement(capacity_for(site, gang))
    request = CliqueRequest(colocation_groups(gang), gang.spares, apart)
    chosen = choose_cliques(trial, request, budget)
    return None if chosen is None else _gang_plan(gang, trial, chosen)


def plan_or_refuse(
    site: PlacementSite | SiteView, gang: Gang, refusal: Callable[[SiteCapacity, Gang, SearchBudget], Refused]
) -> GangPlan:
    """The plan. Raises what `refusal` makes of a gang that does not fit, and of the budget that is left."""
    capacity, budget = capacity_for(site, gang), SearchBudget()
    plan = try_gang(capacity, gang, budget)
    if plan is None:
        raise refusal(capacity, gang, budget)
    return plan


def gang_fits(capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> bool:
    """Whether there is a plan; the search stops at the first one."""
    request = CliqueRequest(colocation_groups(gang), gang.spares, fewest=False)
    return choose_cliques(TrialPlacement(capacity), request, budget) is not None


def plan_in_cliques(site: PlacementSite | SiteView, gang: Gang, cliques: Sequence[str]) -> GangPlan:
    """The plan with a given clique for each subgroup. Raises Refused where one does not fit."""
    trial = TrialPlacement(capacity_for(site, gang))
    chosen = []
    for subgroup, clique in zip(colocation_groups(gang), cliques, strict=True):
        assignments = assign_best_fit(trial, clique, subgroup)
        if assignments is None:
            raise Refused(
                f"{gang.name} does not fit in clique {clique}", nearest_fix="let its clique be chosen"
            )
        chosen.append(CliqueChoice(subgroup, clique, assignments))
    return _gang_plan(gang, trial, chosen)


def _gang_plan(gang: Gang, trial: TrialPlacement, chosen: Sequence[CliqueChoice]) -> GangPlan:
    capacity = trial.capacity
    # The cliques in the order of the members that use them, not of the search, which takes the largest first.
    first_members = {
        (choice.subgroup[0].first, choice.subgroup[0].group.name): choice.clique for choice in chosen
    }
    cliques = tuple(dict.fromkeys(clique for _, clique in sorted(first_members.items())))
    spares: list[TrayPosition] = []
    for clique in cliques if gang.spares else ():
        used = [choice.assignments for choice in chosen if choice.clique == clique]
        spares += spare_trays(trial, clique, used)[: gang.spares]
    # A spare is not empty for later gangs, so it counts in the price.
    kept = Counter(at.clique for at in spares if trial.is_empty(at))
    after = list(capacity.states.regions)
    for clique in cliques:
        empty = capacity.shape(clique).empty
        taken = empty - trial.empty(clique) + kept[clique]
        after = [now - closed for now, closed in zip(after, regions_closed(empty, taken), strict=True)]
    # The reason names the order of the aims, so that a reader sees why no other clique was taken.
    trays = {assignment.at for choice in chosen for assignment in choice.assignments}
    left = ", ".join(f"{clique} ({trial.empty(clique)} empty trays left)" for clique in cliques)
    what = f"{len(chosen)} segments on " if len(chosen) > 1 else ""
    where = f"clique {left}" if len(cliques) == 1 else f"the {len(cliques)} cliques {left}"
    aims = "fewest cliques, then fewest holes closed, then tightest fit"
    return GangPlan(
        gang=gang.name,
        seats=_member_assignments(gang, trial, chosen),
        cliques=cliques,
        spares=tuple(capacity.tray(at).name for at in spares),
        price=fragmentation_price(capacity.states.regions, after),
        reason=f"{what}{len(trays)} trays of {where}: {aims}",
    )


def _member_assignments(
    gang: Gang, trial: TrialPlacement, chosen: Sequence[CliqueChoice]
) -> tuple[MemberAssignment, ...]:
    """All members in the order of the gang; helpers are beside the first member of their share."""
    by_group: dict[str, list[MemberAssignment]] = {group.name: [] for group in gang.groups}
    for choice in chosen:
        for at, part, first, members in choice.assignments:
            tray, group = trial.capacity.tray(at).name, part.group.name
            by_group[group] += (
                MemberAssignment(group, member, tray) for member in range(first, first + members)
            )
    # The search takes the largest subgroup first, so the segments of a group may come in any order.
    for assignments in by_group.values():
        assignments.sort(key=lambda assignment: assignment.member)
    # A launcher talks to its workers, so it goes where the first of them is. Without a share of its own it
    # goes to the first group with devices.
    for helper in (group for group in gang.groups if group.is_helper):
        beside = next(
            (group for group in gang.device_groups if group.share == helper.share), gang.device_groups[0]
        )
        tray = by_group[beside.name][0].tray
        by_group[helper.name] = [
            MemberAssignment(helper.name, member, tray) for member in range(helper.members)
        ]
    return tuple(assignment for assignments in by_group.values() for assignment in assignments)


# The site once a plan holds its trays.


def with_plan_reserved(site: PlacementSite, gang: Gang, plan: GangPlan) -> PlacementSite:
    """The site with holds for the members and the spare trays."""
    used = {*plan.trays, *plan.spares}
    trays = (tray for tray in site.trays if tray.name in used)
    return PlacementSite(site.trays, (*site.holds, *_holds_of_plan(trays, gang, plan)))


def view_with_plan_reserved(view: SiteView, gang: Gang, plan: GangPlan) -> SiteView:
    """`with_plan_reserved` for a view."""
    trays = view.trays_named((*plan.trays, *plan.spares))
    return view.changed(taken=_holds_of_plan(trays, gang, plan))


def _holds_of_plan(trays: Iterable[PlacementTray], gang: Gang, plan: GangPlan) -> tuple[TrayHold, ...]:
    """Holds for the members and the spare trays; `trays`: those of the plan.

    Trays with claimed devices are held whole, those without GPUs too: the allocator was not asked what is
    left of their NICs.
    """
    whole: Mapping[str, int] = {tray.name: tray.gpus for tray in trays}
    groups = {group.name: group for group in gang.groups}
    gpus = dict.fromkeys((*plan.trays, *plan.spares), 0)
    taken, with_channel = set(plan.spares), set[str]()
    for assignment in plan.seats:
        tray, group = assignment.tray, groups[assignment.group]
        # Members without claims share a tray's GPUs. All others have the tray to themselves.
        exclusive = gang.exclusive or group.devices is not None
        gpus[tray] = whole[tray] if exclusive else min(gpus[tray] + group.gpus, whole[tray])
        taken |= {tray} if group.devices is not None else set()
        with_channel |= {tray} if group.has_channel else set()
    gpus |= {spare: whole[spare] for spare in plan.spares}
    return tuple(
        TrayHold(
            owner=gang.name,
            tray=tray,
            gpus=count,
            priority=gang.priority,
            is_whole=tray in taken,
            channel=tray in with_channel,
        )
        for tray, count in gpus.items()
        if count or tray in taken or tray in with_channel
    )


# A clique for each group of the gang.


def exclusive_cliques(site: PlacementSite, gang: Gang, budget: SearchBudget) -> tuple[str, ...]:
    """Cliques for as many of the first subgroups as fit if no two share one."""
    capacity, subgroups = capacity_for(site, gang), colocation_groups(gang)
    # Subgroups are sorted, the largest first, so what is left out in the end is the smallest.
    for count in range(len(subgroups), 0, -1):
        request = CliqueRequest(subgroups[:count], gang.spares, apart=True)
        if chosen := choose_cliques(TrialPlacement(capacity), request, budget):
            return tuple(choice.clique for choice in chosen)
    return ()


def shares_clique(gang: Gang, plan: GangPlan) -> bool:
    """Whether two subgroups of the gang are in one clique."""
    return len(plan.cliques) < len(colocation_groups(gang))


def with_cliques_closed(site: PlacementSite, cliques: Collection[str]) -> PlacementSite:
    """The site with nothing new in some of its cliques."""
    why = "in a clique that another group has to itself"
    return site.with_trays(
        lambda tray: replace(tray, shut=tray.shut or why, is_unfit=True) if tray.sharing in cliques else tray
    )


# CPU, memory and the like.


# How many members a tray carries.


class NodeUse:
    """What the nodes of a site have, and what is requested of each by whom."""

    def __init__(
        self,
        state: ClusterState,
        renamed: Mapping[str, str] = MappingProxyType({}),
        before: "NodeUse | None" = None,
    ) -> None:
        """`renamed`: owners that holds name differently. `before`: of an earlier state."""
        self._labels = state.labels
        self._renamed = renamed
        self._nodes = {node.name: node for node in state.nodes}
        self._pods = state.bound
        self._planned: dict[str, list[tuple[str, Thousandths]]] = {}
        self._left: dict[str, Thousandths] = {}
        self._owners: dict[str, list[str]] = {}
        """Of the pods on a node."""
        if before is not None:
            kept = {name for name in self._nodes if self._pods.get(name) is before._pods.get(name)}
            self._owners = {name: before._owners[name] for name in kept & before._owners.keys()}
            kept &= before._left.keys() - before._planned.keys()
            kept = {name for name in kept if self._nodes[name] is before._nodes[name]}
            self._left = {name: before._left[name] for name in kept}

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
        """The amounts that are left of a node, or None if the node does not report amounts.

        A kubelet always reports CPUs. Objects of a file may lack them.
        """
        if node not in self._left:
            rest = dict(node_amounts(self._nodes[node]) if node in self._nodes else {})
            if CPU_RESOURCE not in rest:
                return None
            for pod in self._pods.get(node, {}).values():
                _take(rest, effective_requests(pod.spec))
            for _, amounts in self._planned.get(node, ()):
                _take(rest, amounts)
            self._left[node] = rest
        return self._left[node]

    def left_without(self, node: str, owners: Container[str]) -> Thousandths | None:
        """The amounts once these owners are gone, or None if the node does not report amounts."""
        left = self.left(node)
        if left is None:
            return None
        rest = dict(left)
        if node not in self._owners:
            pods = self._pods.get(node, {}).values()
            texts = [pod_owner(pod, self._labels.gang).text for pod in pods]
            self._owners[node] = [self._renamed.get(owner, owner) for owner in texts]
        for owner, pod in zip(self._owners[node], self._pods.get(node, {}).values(), strict=True):
            if owner in owners:
                _take(rest, effective_requests(pod.spec), -1)
        for owner, amounts in self._planned.get(node, ()):
            if owner in owners:
                _take(rest, amounts, -1)
        return rest


def _take(rest: dict[str, int], amounts: Thousandths, times: int = 1) -> None:
    for name, amount in amounts.items():
        rest[name] = rest.get(name, 0) - times * amount


def is_bounded(inside: CliqueTrays, group: GangGroup, amounts: Thousandths, use: NodeUse) -> bool:
    """Whether an open tray of a clique may run out of what a member requests before it runs out of GPUs."""
    return _Rest(PlacementSite(inside.trays, inside.holds), use).bounds(group, amounts)


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
    """The amounts that are too little, with `whose` they are. Empty if all are enough."""
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
