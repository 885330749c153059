"""Planner of a site: what moves first, where each job goes, or what blocks it and what would help.

`SitePlanner.report` decides in this order:

1. Rearrange: trays are left out, drained or defragmented. The moves come first in the report.
2. Place. Jobs that may use the same trays and share them are planned together, by priority
   (`batch.plan_batch`); otherwise one after another, the most urgent first. Each plan reserves its trays and
   keeps jobs with anti-affinity off them. With exclusive topology (LeaderWorkerSet) each share of a job takes
   a clique that no other job of its kind uses, planned or running.
3. Explain. A job that does not fit is explained on the site without what was planned at a lower priority.
   Its nearest fixes were each planned before they are named.

The planner reads nothing: nodes, pods, devices, claims and priority classes are values. What few jobs need
(CEL, explanations, renderings) is imported where it is used, because `rackloom place` starts in less time
than that takes to load.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.cluster.jobs import Job, JobGroup, PriorityClasses, TemplateName, owner_of_job
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.pods import Toleration, object_namespace
from rackloom.core.cluster.scheduling import NodeRule, Thousandths
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import (
    AvoidedTrays,
    BoundNeighbours,
    ClaimsByKind,
    DraDevices,
    Gang,
    GangPlan,
    PlacementSite,
    PlacementTray,
    combine_sites,
    placement_site,
)
from rackloom.core.place.batch import plan_batch
from rackloom.core.place.gang_planner import (
    NodeUse,
    exclusive_cliques,
    is_bounded,
    try_gang,
    with_cliques_closed,
    with_node_resources,
    with_plan_reserved,
)
from rackloom.core.place.gang_requests import (
    are_anti_affine,
    avoiding_job,
    claims_by_kind,
    gang_of_job,
    groups_by_trays,
)
from rackloom.core.place.job_moves import (
    JobMove,
    check_tray_exists,
    plan_defragmentation,
    plan_drain,
    with_trays_closed,
)
from rackloom.core.place.mobility import restrict_moves, tolerations_of_movable
from rackloom.core.place.plan_notes import plan_notes, usable_share
from rackloom.core.place.search.gang_needs import colocation_groups, rank_sequences
from rackloom.core.place.search.site_view import (
    MAX_REMEMBERED,
    CliqueTrays,
    SiteView,
    capacity_for,
)
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.core.progress import EachInTurn, in_turn
from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.core.place.rendering import RenderedJob

# What is asked for, and what comes out.


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How jobs are placed, and changes of the site to plan with."""

    labels: SchedulerLabels = SchedulerLabels()
    segment: int | None = None
    """Members that must share a clique; None: all of a group."""
    spares: int = 0
    """Trays to keep free in each clique that is used."""
    apart: bool = False
    """Each group of a job has a clique of its own."""
    exclusive: bool = False
    """Only empty trays, and those whole."""
    exclusive_topology: bool = False
    """Each share of a job has a clique that no other uses: LeaderWorkerSet's exclusive topology."""
    without_trays: tuple[str, ...] = ()
    """Trays that count as gone."""
    drain: tuple[str, ...] = ()
    """Trays that are emptied first."""
    defrag: bool = False
    """Movable jobs are moved first, so that larger free regions open."""
    down: float | None = None
    """Share (0 to 1) of trays that are down, for the price of segment sizes; None: no prices."""


MAX_FIXES = 4
"""Fixes that an answer names, nearest first."""
DEFAULT_DOWN = 0.01
"""Share of trays that are down where the request names none."""


class SiteObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The site: the state of its cluster, and what the allocator takes."""

    state: ClusterState
    devices: DraDevices
    reserved: tuple[TrayHold, ...] = ()
    """What others are to get, beside what pods and claims have."""
    viewer: str | None = None
    """The namespace for which the report is: holders in others have no names in it, and it has neither fixes
    nor notes. None: all have names."""


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one job, or what blocks it."""

    job: str
    plan: GangPlan | None
    blocked: str | None = None
    fixes: tuple[str, ...] = ()
    """Nearest first; each was planned."""
    notes: tuple[str, ...] = ()


class PlacedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its plan, and the site on which it was planned."""

    job: Job
    gang: Gang
    plan: GangPlan
    site: PlacementSite


class SegmentPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What segments of one size use of a clique."""

    trays: int
    outside: int
    """Trays of a clique that is whole which no segment takes."""
    usable: float
    """Share (0 to 1) of all trays that whole segments use, with some of them down."""


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a site."""

    moves: tuple[JobMove, ...]
    """What has to move first."""
    jobs: tuple[JobAnswer, ...]
    segments: tuple[SegmentPrice, ...] = ()
    """Only where a share of trays that are down is given."""


# The planner.


_Trays = tuple[PlacementTray, ...]


class SharedSite:
    """The trays of one state as jobs may use them, and all holds: several planners share them.

    `take` counts the plan of a planner for those that follow. Views of the site are changed by the holds that
    were added. For one thread at a time.
    """

    def __init__(self, state: ClusterState, before: "SharedSite | None" = None) -> None:
        """`before`: of an earlier state. Trays that have not changed since are taken from it."""
        self.state = state
        self._last = ClusterState() if before is None else before.state
        self._last_trays: Mapping[Hashable, _Trays] = {} if before is None else before._known
        self.observed = restrict_moves(state)
        """The holds of pods and claims."""
        self.holds = self.observed
        """These, and those that were taken."""
        self.use: NodeUse = NodeUse(state, before=None if before is None else before.use)
        self._known: dict[Hashable, _Trays] = {}
        self._views: dict[int, tuple[SiteView, int]] = {}
        """By identity of the trays: the view, and the number of holds that it has."""
        self._bounded: dict[CliqueTrays, dict[Hashable, bool]] = {}

    @cached_property
    def neighbours(self) -> BoundNeighbours:
        """The pods that may keep others off."""
        return BoundNeighbours(self.state)

    def take(self, holds: Iterable[TrayHold]) -> None:
        """Count holds from now on."""
        taken = tuple(holds)
        self.holds = (*self.holds, *taken)
        self.use.add_held(taken)

    def trays(self, key: Hashable, compute: Callable[[], _Trays], of: _Trays = ()) -> _Trays:
        """The trays of a key, which has everything beside the state and other trays that decides them."""
        known = (key, id(of))
        if of and not self._keeps(of):
            return compute()
        if known not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                # Others may get the identity of trays that are gone.
                self._known, self._views, self._bounded = {}, {}, {}
                return self.trays(key, compute, of)
            self._known[known] = compute()
        return self._known[known]

    def open_trays(self, state: ClusterState, **terms: Any) -> _Trays:
        """The trays of `placement_site`. `state` may name another label for the clique than ours."""
        key = state.labels.clique, msgspec.json.encode(terms)

        def compute() -> _Trays:
            trays = {tray.name: tray for tray in self._last_trays.get((key, id(())), ())}
            gpus, last = self._last.gpus, {node.name: node for node in self._last.nodes if node.name in trays}
            changed = tuple(
                node
                for node in state.nodes
                if last.get(node.name) is not node or gpus[node.name] != state.gpus[node.name]
            )
            found = placement_site(replace(state, nodes=changed), **terms).trays
            # Files may repeat a name.
            if not trays:
                return found
            trays |= {tray.name: tray for tray in found}
            return tuple(trays[node.name] for node in state.nodes)

        return self.trays(key, compute)

    def _keeps(self, trays: _Trays) -> bool:
        return any(trays is known for known in self._known.values())

    def view(self, site: PlacementSite) -> SiteView:
        """The view of a site. It is kept if its trays are, and if it has all holds and no others."""
        if site.holds is not self.holds or not self._keeps(site.trays):
            return SiteView.of(site)
        view, count = self._views.get(id(site.trays)) or (SiteView.of(site), len(site.holds))
        if count < len(site.holds):
            view = view.changed(taken=site.holds[count:])
        self._views[id(site.trays)] = view, len(site.holds)
        return view

    def are_bounded(self, view: SiteView, gang: Gang, asked: Mapping[str, Thousandths]) -> bool:
        """Whether CPU, memory and the like may bind a group of a gang before its GPUs do."""
        for group in gang.device_groups:
            amounts = asked.get(group.name, {})
            key = group.gpus, tuple(amounts.items())
            for inside in view.cliques.values() if amounts else ():
                # A clique on which something is taken is another object.
                known = self._bounded.setdefault(inside, {})
                if key not in known:
                    known[key] = is_bounded(inside, group, amounts, self.use)
                if known[key]:
                    return True
        return False


class SitePlanner:
    """Places jobs beside each other on one site. `report` plans; `rendered` renders what it has placed."""

    def __init__(
        self,
        found: SiteObjects,
        claims: Iterable[ResourceClaim],
        channels: Collection[TemplateName],
        classes: PriorityClasses,
        request: PlanRequest,
        shared: SharedSite | None = None,
    ) -> None:
        """`claims` and `channels`: the claims, and the templates of channels, that jobs may name.

        `shared` is of the state of `found`, and takes a plan from the caller.
        """
        self._request = request
        self._is_shared = shared is not None
        # An attempt may take another level of the topology for the clique.
        self._found = found = replace(found, state=replace(found.state, labels=request.labels))
        self._channels = channels
        self._claims = {
            (claim.metadata.namespace or "default", claim.metadata.name): claim for claim in claims
        }
        self._classes = classes
        self._shared = shared or SharedSite(found.state)
        self._observed = self._shared.observed
        self._holds = (*self._shared.holds, *found.reserved) if found.reserved else self._shared.holds
        self._use = self._shared.use
        self._jobs: dict[str, Job] = {}
        self._claimed: dict[str, dict[str, int]] = {}
        self._avoided: dict[str, AvoidedTrays] = {}
        self._gangs: dict[str, Gang] = {}
        self.placed: list[PlacedJob] = []
        """The jobs that `report` has placed."""

    def report(self, jobs: Sequence[Job], each: EachInTurn = in_turn) -> PlacementReport:
        """The moves that come first, then each job, the most urgent first.

        `each` is given the jobs, first to plan, then to explain, and may tell how far they are.
        """
        # Jobs are distinguished by their names, here and on the trays that they hold.
        for name, count in Counter(job.name for job in jobs).items():
            if count > 1:
                raise Refused(
                    f"{count} jobs are called {name}", nearest_fix="rename them, or place them one by one"
                )
        self._jobs = {job.name: job for job in jobs}
        # What runs of a job already is its own, whatever kind its owner has.
        own = {owner_of_job(job, self._request.labels.gang).text: job.name for job in jobs}

        def as_named(holds: Iterable[TrayHold]) -> tuple[TrayHold, ...]:
            return tuple(replace(hold, owner=own.get(hold.owner, hold.owner)) for hold in holds)

        if not self._is_shared or any(hold.owner in own for hold in self._holds):
            self._observed, self._holds = as_named(self._observed), as_named(self._holds)
            devices = self._found.devices
            owners = {claim: own.get(owner, owner) for claim, owner in devices.owners.items()}
            self._found = replace(self._found, devices=replace(devices, owners=owners))
            self._use = NodeUse(self._found.state, own)
            self._use.add_held(self._holds)
        for job in jobs:
            self._classes.check(job)
            self._avoided[job.name] = self._shared.neighbours.avoided_by(job)
        moves = self._rearrange(jobs)
        gangs = [self._gang(job) for job in jobs]
        ranked = sorted(zip(jobs, gangs, strict=True), key=lambda pair: -pair[1].priority)
        plans = self._plans(ranked, each)
        answers = tuple(
            self._answer(job, self._gang(job), plans) for job, _ in each(ranked, "jobs explained")
        )
        down, segments = self._request.down, list[SegmentPrice]()
        if self._request.segment is None and down is not None:
            # Every size up to the largest clique of the site, in cliques of that size.
            trays = max(Counter(tray.sharing for tray in self._site(None, "").trays).values(), default=0)
            for size in range(1, trays + 1):
                usable = usable_share(trays, size, down)
                segments.append(SegmentPrice(trays=size, outside=trays % size, usable=usable))
        return PlacementReport(moves=moves, jobs=answers, segments=tuple(segments))

    def rendered(self, target: str) -> "list[RenderedJob]":
        """The jobs that were placed, for a scheduler."""
        from rackloom.core.place.rendering import render_job

        labels = self._request.labels
        return [
            render_job(target, placed.job, placed.gang, placed.plan, placed.site, labels)
            for placed in self.placed
        ]

    def _rearrange(self, jobs: Sequence[Job]) -> tuple[JobMove, ...]:
        request = self._request
        if not (request.without_trays or request.drain or request.defrag):
            return ()
        # Taints do not bar a tray here that the jobs, or those that may move, tolerate.
        wanted = [toleration for job in jobs for group in job.groups for toleration in group.need.tolerations]
        site = self._site(None, "", (*wanted, *tolerations_of_movable(self._found.state)))
        for tray in request.without_trays:
            check_tray_exists(site, tray)
        moves: list[JobMove] = []
        for tray in request.drain:
            step = plan_drain(site, tray)
            site, moves = step.site, [*moves, *step.moves]
        if request.defrag:
            step = plan_defragmentation(site)
            site, moves = step.site, [*moves, *step.moves]
        self._holds = site.holds
        return tuple(moves)

    def _plans(self, ranked: Sequence[tuple[Job, Gang]], each: EachInTurn) -> dict[str, GangPlan]:
        """Of the jobs that fit: together where all may use the same trays and share them, else one by one."""
        if self._request.exclusive_topology:
            return self._plans_one_by_one(ranked, each)
        trays = [self._site_of_job(job).trays for job, _ in ranked]
        are_counted = any(self._bounded(job, gang)[1] != gang for job, gang in ranked)
        # Jobs that are planned together share GPUs; what they leave of CPU and memory is counted after each.
        if (
            are_counted
            or any(tray != trays[0] for tray in trays)
            or are_anti_affine([job for job, _ in ranked])
        ):
            return self._plans_one_by_one(ranked, each)
        site = PlacementSite(())
        if trays:
            kinds = {kind: claims for job, _ in ranked for kind, claims in self._claims_of(job).items()}
            site = self._with_claim_capacity(PlacementSite(trays[0], self._holds), kinds)
        found = plan_batch(self._shared.view(site), [gang for _, gang in ranked], each)
        for plan in found:
            self._reserve(plan, next(pair for pair in ranked if pair[1].name == plan.gang))
        return {plan.gang: plan for plan in found}

    def _plans_one_by_one(self, ranked: Sequence[tuple[Job, Gang]], each: EachInTurn) -> dict[str, GangPlan]:
        """Of the jobs that fit. Each plan takes trays from the jobs after it."""
        plans: dict[str, GangPlan] = {}
        is_exclusive = self._request.exclusive_topology
        for number, (job, _) in enumerate(each(ranked, "jobs planned")):
            # A plan before this one may have changed what the job avoids, and so its gang.
            gang = self._gang(job)
            site = self._site_with_free_cliques(job, plans) if is_exclusive else None
            fitting = try_gang(*self._bounded(job, gang, site), SearchBudget(), apart=is_exclusive)
            if fitting is None:
                continue
            plans[gang.name] = fitting
            self._reserve(fitting, (job, gang))
            # Jobs that are never beside this one avoid its trays. Exclusive topology needs no such care.
            for later, _ in () if is_exclusive else ranked[number + 1 :]:
                before = self._avoided[later.name]
                self._avoided[later.name] = avoiding_job(later, job, fitting, before)
                if self._avoided[later.name] != before:
                    self._gangs.pop(later.name, None)
        return plans

    def _bounded(self, job: Job, gang: Gang, site: PlacementSite | None = None) -> tuple[PlacementSite, Gang]:
        """Site and gang with the groups bounded by CPU and memory, where these bind."""
        asked = {group.name: group.need.requests for group in job.groups}
        site = site or self._capacity_for(job)
        if self._use is self._shared.use and not self._shared.are_bounded(
            self._shared.view(site), gang, asked
        ):
            return site, gang
        return with_node_resources(site, gang, asked, self._use)

    def _site_with_free_cliques(self, job: Job, plans: Mapping[str, GangPlan]) -> PlacementSite:
        """Cliques that no other job of its kind has, planned or running."""
        site = self._capacity_for(job)
        taken = {clique for plan in plans.values() for clique in plan.cliques}
        return _without_other_sets(with_cliques_closed(site, taken), self._found, job)

    def _reserve(self, plan: GangPlan, of: tuple[Job, Gang]) -> None:
        site = self._site_of_job(of[0])
        self.placed.append(PlacedJob(job=of[0], gang=of[1], plan=plan, site=site))
        if self._is_shared:
            return
        asked = {group.name: group.need.requests for group in of[0].groups}
        for seat in plan.seats:
            self._use.add(seat.tray, plan.gang, asked[seat.group])
        self._holds = with_plan_reserved(site, of[1], plan).holds

    def _answer(self, job: Job, gang: Gang, plans: Mapping[str, GangPlan]) -> JobAnswer:
        request, plan, viewer = self._request, plans.get(gang.name), self._found.viewer
        if plan is not None and viewer is not None:
            return JobAnswer(job=job.name, plan=plan)
        site = self._capacity_for(job)
        if plan is None and request.exclusive_topology:
            site = self._site_with_free_cliques(job, plans)
            if (refused := _exclusive_refusal(job, gang, site)) is not None:
                return refused
        if plan is None:
            site, bounded = self._bounded(job, gang, site)
            if viewer is None:
                return _refused_answer(job, bounded, site, plans, request.labels)
            from rackloom.core.place.gang_fixes import describe_shortage

            ground = capacity_for(self._shared.view(site), bounded)
            blocked = describe_shortage(ground, bounded, request.labels.clique, viewer)
            return JobAnswer(job=job.name, plan=None, blocked=blocked)
        down = DEFAULT_DOWN if request.down is None else request.down
        notes = list(plan_notes(job, gang, plan, site, request.labels, down))
        # The pod template of a launcher may lack the tolerations of the workers that it is beside.
        for group in (share for share in job.groups if not share.need.takes_devices):
            shut = {tray.name: tray.shut for tray in self._site(group, job.name).trays}
            tray = next(seat.tray for seat in plan.seats if seat.group == group.name)
            if shut[tray]:
                notes.append(f"{group.name} may not run beside the first member on {tray} ({shut[tray]})")
        # A job that takes more cliques than it would need otherwise.
        if request.exclusive_topology and len(colocation_groups(gang)) > 1:
            words = _share_words(gang)
            notes.append(f"{words} have a clique each: exclusive topology starts no two of them in one")
        return JobAnswer(job=job.name, plan=plan, notes=(*notes, *self._classes.notes(job)))

    def _capacity_for(self, job: Job) -> PlacementSite:
        """The site as the members of a job may use it, with what its claims can get there."""
        return self._with_claim_capacity(self._site_of_job(job), self._claims_of(job))

    def _with_claim_capacity(self, site: PlacementSite, kinds: ClaimsByKind) -> PlacementSite:
        if not kinds:
            return site
        # The CEL library takes longer to load than a plan without claims takes to make.
        from rackloom.core.place.claim_capacity import with_claim_capacity

        # The holds before the moves show whose devices the moves free.
        before = PlacementSite(site.trays, self._observed)
        trays = self._shared.trays(
            ("rooms", msgspec.json.encode(kinds)),
            lambda: with_claim_capacity(before, self._found.devices, kinds).trays,
            site.trays,
        )
        return PlacementSite(trays, site.holds)

    def _site_of_job(self, job: Job) -> PlacementSite:
        """The site as the members with devices may use it."""
        kinds = groups_by_trays(job, self._avoided[job.name])
        sites = {where: self._site(group, job.name) for where, group in kinds.items()}
        seen = sites[""] if "" in sites else combine_sites(sites) if sites else self._site(None, job.name)
        return with_trays_closed(seen, self._request.drain, "drained")

    def _gang(self, job: Job) -> Gang:
        """The gang of a job, with the trays that the job avoids now."""
        request = self._request
        if job.name not in self._gangs:
            gang = gang_of_job(
                job,
                self._gpus_by_kind(job),
                priorities=self._classes.values,
                never=self._classes.never,
                segment=request.segment,
                spares=request.spares,
                exclusive=request.exclusive,
                apart=request.apart,
                avoided=self._avoided[job.name],
            )
            if request.segment is not None:
                _check_segment(gang, self._site(None, ""))
            self._gangs[job.name] = gang
        return self._gangs[job.name]

    def _claims_of(self, job: Job) -> dict[str, tuple[ResourceClaim, ...]]:
        return claims_by_kind(job, self._claims, self._channels)

    def _gpus_by_kind(self, job: Job) -> dict[str, int]:
        """GPUs that a member claims, by kind of claims."""
        if job.name not in self._claimed:
            found = {}
            for kind, claims in self._claims_of(job).items():
                # Few jobs have claims, and the allocator takes long to load.
                from rackloom.core.place.claim_capacity import gpus_per_member

                found[kind] = gpus_per_member(self._found.devices, claims, self._found.state)
            self._claimed[job.name] = found
        return self._claimed[job.name]

    def _site(
        self, group: JobGroup | None, job: str, tolerations: tuple[Toleration, ...] = ()
    ) -> PlacementSite:
        """The site as pods of a group may use it, without the trays that are left out."""
        known, state = self._jobs.get(job), self._found.state
        counted = known is not None and any(share.need.gpus for share in known.groups)
        claimed = known is not None and any(self._gpus_by_kind(known).values())
        tolerations = group.need.tolerations if group else tolerations
        rule = group.need.rule if group else NodeRule()
        avoided = self._avoided.get(job, {}).get(group.name) if group else None
        trays = self._shared.open_trays(
            state, counted=counted, claimed=claimed, tolerations=tolerations, rule=rule, avoided=avoided
        )
        return with_trays_closed(PlacementSite(trays, self._holds), self._request.without_trays, "left out")


def _refused_answer(
    job: Job, gang: Gang, site: PlacementSite, plans: Mapping[str, GangPlan], labels: SchedulerLabels
) -> JobAnswer:
    """What blocks the job, `plans` of other jobs included, and what helps."""
    # What explains takes as long to load as what plans.
    from rackloom.core.place.gang_fixes import describe_shortage, find_fixes, partition_advice

    effort = SearchBudget()
    # Explain without the plans of lower priority. If the gang fits then, it is them that block it.
    holds = tuple(hold for hold in site.holds if hold.owner not in plans or hold.priority >= gang.priority)
    rest = PlacementSite(site.trays, holds)
    ground = capacity_for(site if try_gang(rest, gang, effort) is not None else rest, gang)
    partition = partition_advice(ground.view, gang, labels.clique)
    label = f"{partition}; where they carry another label, name it with --label clique=KEY"
    ask = "change its nodeSelector or affinity: no node is what it asks for"
    first = [ask] * all(tray.is_unfit for tray in site.trays) + [label] * (partition is not None)
    found = (*first, *(fix.text for fix in islice(find_fixes(ground, gang, effort), MAX_FIXES)))
    return JobAnswer(
        job=job.name, plan=None, blocked=describe_shortage(ground, gang, labels.clique), fixes=found
    )


# Jobs whose shares each need a clique to themselves.


_LWS_GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
"""On all pods of a LeaderWorkerSet; exclusive topology keeps others that have it, of one namespace, out."""


def _without_other_sets(site: PlacementSite, found: SiteObjects, job: Job) -> PlacementSite:
    """The site without cliques where another LeaderWorkerSet of the job's namespace runs."""
    namespace = object_namespace(job.objects[0])
    trays = {
        pod.node for pod in found.state.pods if _LWS_GROUP_KEY in pod.labels and pod.namespace == namespace
    }
    return with_cliques_closed(site, {tray.sharing for tray in site.trays if tray.name in trays})


def _exclusive_refusal(job: Job, gang: Gang, site: PlacementSite) -> JobAnswer | None:
    """The refusal of a job for which some cliques are free, but too few; else None."""
    blocks, cliques = len(colocation_groups(gang)), exclusive_cliques(site, gang, SearchBudget())
    if not cliques or len(cliques) == blocks:
        return None
    # Each fix is planned before it is named, but for fewer replicas: these are the cliques that were found.
    fixes = []
    together = try_gang(site, gang, SearchBudget())
    if together is not None and len(together.cliques) == 1:
        fixes.append(f"use --render affinity: they share clique {together.cliques[0]} then")
    if gang.segment is None:
        fixes.append(f"ask for {len(cliques)} replicas instead of {blocks}")
    elif try_gang(site, replace(gang, segment=None), SearchBudget(), apart=True) is not None:
        fixes.append("leave --segment out")
    blocked = (
        f"{gang.name}: by exclusive topology each of its {blocks} {_share_words(gang)}"
        f" has a clique to itself, and only {', '.join(cliques)} can be had"
    )
    return JobAnswer(job=job.name, plan=None, blocked=blocked, fixes=tuple(fixes))


def _share_words(gang: Gang) -> str:
    return "replicas" if gang.segment is None else f"segments of {gang.segment}"


# Segment sizes.


def _check_segment(gang: Gang, site: PlacementSite) -> None:
    """Refuse a segment that no group fills, or that is larger than any clique when it is empty."""
    sequences = rank_sequences(gang)
    if gang.segment is None or not sequences:
        return
    # A segment is filled from groups whose ranks follow each other, so their members count together.
    longest = max(sequences, key=lambda groups: sum(group.members for group in groups))
    members, largest = sum(group.members for group in longest), max(longest, key=lambda group: group.members)
    if gang.segment > members:
        names = " and ".join(group.name for group in longest)
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} members, and {names}"
            f" {'have' if len(longest) > 1 else 'has'} {members}",
            nearest_fix="leave --segment out: all of them share a clique then",
        )
    room = Counter[str]()
    for tray in site.trays:
        room[tray.sharing] += tray.gpus // largest.gpus if largest.gpus else gang.segment
    most = max(room.values(), default=0)
    if gang.segment > most:
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} {largest.name}, and the largest clique takes {most}"
            " when it is empty",
            nearest_fix=f"use --segment {most} or less" if most else "name a site with GPUs",
        )
