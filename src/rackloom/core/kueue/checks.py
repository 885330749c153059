"""Verdicts on workloads that wait for a check: Ready with a plan, Retry for now, or Rejected for good.

`PlacementPass` takes one reading of the cluster and serves the workloads one after the other. A plan counts
as soon as it is made, so no two workloads get the same room: neither two of one pass, nor one of this pass
and one that was admitted before and whose pods are still to come.

A workload is planned as `rackloom place` plans its job: by the pod templates with the labels and tolerations
of its flavors, on the nodes that Kueue's topology assignment leaves, if there is one. The pods of a gang
(`rackloom.dev/gang`) get empty trays, with the segments and spares that they declare. Spares that the gang
controller would refuse, by the limit of a namespace or the quota of a ComputeDomain, are a Retry.

Retry means that it does not fit now. Kueue takes the quota back and tries again after a pause, which grows
with the number of attempts. Rejected, which ends a workload for good, needs proof that it can never fit: the
site has published all of its trays, and the job is too large for them even if all are empty, open and free of
rules. Anything else that is missing (a claim template, a node that publishes nothing, a clique label) may
come, so it is a Retry.

Owners of other namespaces have no names in messages.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain

from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    DeviceClass,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.taint_rules import readable_rules, with_taint_rules
from rackloom.core.cluster.claims import allocated_devices, allocator_claim, claims_to_allocate
from rackloom.core.cluster.devices import allocator_values
from rackloom.core.cluster.gang_objects import GangKey, read_gang_spec
from rackloom.core.cluster.jobs import Job, PriorityClasses, channel_templates, read_jobs
from rackloom.core.cluster.kueue_objects import READY, REJECTED, RETRY, KueueWorkload, as_admitted
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import node_clique, opened_node
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    Object,
    annotations_of,
    labels_of,
    list_names,
    name_of,
)
from rackloom.core.cluster.pods import GANG_LABEL, claim_templates, object_namespace
from rackloom.core.cluster.scheduling import NodeRule, allocator_node
from rackloom.core.cluster.state import ClusterState, TrayHold, owners_of_claims
from rackloom.core.cluster.trays import DraDevices
from rackloom.core.gangs.placement import PromisedSpares, spare_room
from rackloom.core.gangs.snapshot import ClusterLists, GangSettings
from rackloom.core.kueue.plans import (
    Verdict,
    held_seats,
    planned_spares,
    pod_set_updates,
    ready_checks,
)
from rackloom.core.place.kueue_topology import (
    TopologyAttempt,
    first_that_fits,
    job_topology,
    topology_attempts,
)
from rackloom.core.place.site_planner import (
    PlacedJob,
    PlacementReport,
    PlanRequest,
    SharedSite,
    SiteObjects,
    SitePlanner,
)
from rackloom.errors import Refused

MOST_RETRY_SECONDS = 300
"""The longest pause between two attempts."""


class PlacementPass:
    """Decides for workloads on one reading of the cluster.

    `workloads` are all workloads of the cluster, and `lists` has their plans. `domains` are ComputeDomains.
    `checks` are the names of the checks that we decide. `before` is the last pass. Trays that have
    not changed since are taken from it.
    """

    def __init__(
        self,
        lists: ClusterLists,
        domains: Iterable[Object],
        flavors: Iterable[Object],
        workloads: Iterable[KueueWorkload],
        checks: Iterable[str],
        settings: GangSettings,
        before: "PlacementPass | None" = None,
    ) -> None:
        self._settings = settings
        self._labels = SchedulerLabels(clique=settings.clique_label)
        self._flavors = {name_of(flavor): flavor for flavor in flavors}
        # The API server leaves the kind out of the objects of a list.
        self._domains = [{**obj, "kind": COMPUTE_DOMAIN.kind} for obj in domains]
        self._channels = channel_templates(self._domains)
        self._promised: dict[str, PromisedSpares] = {}
        """By the UID of the workload."""
        names_of_ours = set(checks)
        for workload in workloads:
            for state in ready_checks(workload, names_of_ours):
                self._promise(workload, state.pod_set_updates)
        self.lists, self._state = lists, lists.state
        self._planned_holds = [hold for holds in lists.planned.values() for hold in holds]
        self._of_gangs = {
            record.key: [
                TrayHold(owner=record.key.full_name, tray=tray, gpus=0, is_whole=True)
                for tray in record.reserved
            ]
            for record in lists.records
        }
        self._site: SharedSite = SharedSite(self._state, None if before is None else before._site)
        if before is not None and before._published == self._published:
            self.__dict__ |= {key: before.__dict__[key] for key in _OF_PUBLISHED & before.__dict__.keys()}
        self._site.take((*chain.from_iterable(self._of_gangs.values()), *self._planned_holds))

    @property
    def _published(self) -> object:
        """Everything that decides `_OF_PUBLISHED`, but for objects that cannot be read."""
        return self._state.nodes, self._state.gpus, self.lists.slices, self.lists.classes

    def decide(self, workload: KueueWorkload, check: str) -> Verdict:
        """The verdict on one workload that waits for a check. Its plan counts for those that follow."""
        try:
            jobs = read_jobs([*self._domains, as_admitted(workload, self._flavors)], self._labels)
            if not any(group.need.takes_devices for job in jobs for group in job.groups):
                return Verdict(state=READY, message="it asks for no GPU, NIC or channel: nothing to plan")
            (job,) = jobs
            return self._planned(workload, job, check)
        except Refused as refused:
            return self._retry(workload, check, str(refused))

    def _planned(self, workload: KueueWorkload, job: Job, check: str) -> Verdict:
        gang = _gang_of(workload)
        request = _plan_request(workload, self._labels)
        # If Kueue's topology assignment names domains, only their nodes are planned on.
        domains = [domain.items() for pod_set in workload.pod_sets for domain in pod_set.domains]
        state = self._state
        if domains:
            nodes = (node for node in state.nodes if any(domain <= node.labels.items() for domain in domains))
            state = replace(state, nodes=tuple(nodes))
        others = (hold for key, holds in self._of_gangs.items() if key != gang for hold in holds)
        found = SiteObjects(
            state=state,
            devices=self._devices if _claims_any(job) else _NO_DEVICES,
            reserved=(*others, *self._planned_holds),
            viewer=workload.namespace,
        )
        # A gang that has a plan may plan on its own trays again.
        shared = None if domains or gang in self._of_gangs else self._site
        try:
            attempt, planner, report = self._report(found, job, request, shared)
        except Refused as refused:
            blocked: str | None = str(refused)
        else:
            (answer,) = report.jobs
            spares = () if answer.plan is None else answer.plan.spares
            blocked = answer.blocked or self._too_many_spares(workload, gang, job, len(spares))
            if answer.plan is not None and blocked is None:
                (placed,) = planner.placed
                updates = pod_set_updates(workload.uid, placed, attempt.request.labels.clique)
                held = tuple(held_seats(workload.full_name, updates, ()))
                self._planned_holds += held
                self._site.take(held)
                self._promise(workload, updates)
                note = f"; {attempt.note}" if attempt.note else ""
                return Verdict(
                    state=READY, message=f"{_plan_text(placed)}{note}", pod_set_updates=tuple(updates)
                )
        why = self._why_never(workload, job, request)
        if why is not None:
            return Verdict(state=REJECTED, message=f"it can never fit: {why}")
        return self._retry(workload, check, f"it does not fit now: {blocked}")

    def _retry(self, workload: KueueWorkload, check: str, why: str) -> Verdict:
        attempts = workload.checks[check].retry_count
        seconds = min(self._settings.again * 2.0 ** min(attempts, 16), MOST_RETRY_SECONDS)
        return Verdict(state=RETRY, message=why, requeue_after=max(int(seconds), 1))

    def _too_many_spares(
        self, workload: KueueWorkload, gang: GangKey | None, job: Job, spares: int
    ) -> str | None:
        """Why the gang controller would refuse the spares of a plan. Its pods would wait with their quota."""
        if gang is None or not spares:
            return None
        templates = {name for group in job.groups for name in group.need.templates}
        promised = [promise for uid, promise in self._promised.items() if uid != workload.uid]
        room = spare_room(gang, templates, self.lists, self._settings.max_spares, promised)
        if spares <= room.trays:
            return None
        return f"it would keep {spares} spare trays, and {room.limit} may keep {room.trays} more"

    def _promise(self, workload: KueueWorkload, updates: Sequence[Object]) -> None:
        """The spares of a plan count for its gang from now on."""
        gang, spares = _gang_of(workload), planned_spares(updates)
        if gang is not None and spares:
            templates = (pod_set.template for pod_set in workload.pod_sets)
            named = frozenset(name for template in templates for name in claim_templates(template).values())
            self._promised[workload.uid] = PromisedSpares(gang, spares, named)

    def _report(
        self, found: SiteObjects, job: Job, request: PlanRequest, shared: SharedSite | None
    ) -> tuple[TopologyAttempt, SitePlanner, PlacementReport]:
        """How a job goes on the nodes of a site. `shared` has all of them, and its holds. Raises Refused."""
        classes = PriorityClasses((), are_all_known=False)
        claims = self._claims_of(job)

        def plan(attempt: TopologyAttempt) -> tuple[SitePlanner, PlacementReport]:
            if shared is not None and attempt.domain is None:
                site, within = replace(found, reserved=()), shared
            else:
                nodes = tuple(filter(attempt.takes, found.state.nodes))
                site, within = replace(found, state=replace(found.state, nodes=nodes)), None
            planner = SitePlanner(site, claims, self._channels, classes, attempt.request, within)
            return planner, planner.report([job])

        # A level is one of the whole cluster, also where Kueue has chosen domains.
        attempts = topology_attempts(job_topology(job), request, self._state.nodes)
        return first_that_fits(attempts, plan)

    def _claims_of(self, job: Job) -> tuple[ResourceClaim, ...]:
        """The claims and templates that its pods name, as far as they are known."""
        needs, namespace = [group.need for group in job.groups], object_namespace(job.objects[0])
        named = {(namespace, name) for need in needs for name in (*need.templates, *need.claims)}
        found = (
            [obj for obj in objects if named and (object_namespace(obj), name_of(obj)) in named]
            for objects in (self._state.claims, self.lists.templates)
        )
        return tuple(claims_to_allocate(*found))

    @cached_property
    def _devices(self) -> DraDevices:
        """Published devices, and the claims that hold some."""
        claims = self._state.claims
        return replace(
            self._best_devices,
            slices=with_taint_rules(self._best_devices.slices, tuple(readable_rules(self.lists.taint_rules))),
            claims=tuple(
                allocator_claim(held, claim) for claim in claims if (held := allocated_devices(claim))
            ),
            owners=owners_of_claims(self._state),
        )

    @cached_property
    def _best_devices(self) -> DraDevices:
        """Without rules that taint them, and without claims."""
        return DraDevices(
            nodes=tuple(map(allocator_node, self._state.nodes)),
            classes=tuple(allocator_values(self.lists.classes, DeviceClass)),
            slices=tuple(allocator_values(self.lists.slices, ResourceSlice)),
        )

    @cached_property
    def _best(self) -> SharedSite | None:
        """The site empty and open. None if it may have more than it shows."""
        state = self._state
        if _is_unsettled(state):
            return None
        opened = tuple(map(opened_node, state.nodes))
        return SharedSite(
            replace(state, nodes=opened, pods=(), bound={}, claims=(), holders=(), holds=(), unreadable=())
        )

    def _why_never(self, workload: KueueWorkload, job: Job, request: PlanRequest) -> str | None:
        """Why a job fits on no state of this site, or None if it may fit some day."""
        best = self._best
        if best is None or _is_unreadable(self._state):
            return None
        # Labels can be added to nodes, so no rule about them counts.
        groups = (
            replace(
                group,
                need=replace(group.need, rule=NodeRule(), apart=()),
                identity=replace(group.identity, apart=()),
            )
            for group in job.groups
        )
        try:
            devices = self._best_devices if _claims_any(job) else _NO_DEVICES
            found = SiteObjects(state=best.state, devices=devices, viewer=workload.namespace)
            _, _, report = self._report(found, replace(job, groups=tuple(groups)), request, best)
        except Refused:
            return None
        (answer,) = report.jobs
        return answer.blocked if answer.plan is None else None


_OF_PUBLISHED = {"_best", "_best_devices"}
"""Kept from the last pass while nodes and devices are the same."""
_NO_DEVICES = DraDevices(nodes=(), classes=(), slices=())


def _claims_any(job: Job) -> bool:
    return any(group.need.templates or group.need.claims for group in job.groups)


def _plan_text(placed: PlacedJob) -> str:
    plan = placed.plan
    members = sum(group.members for group in placed.gang.device_groups)
    where = f"clique {plan.cliques[0]}" if len(plan.cliques) == 1 else f"cliques {list_names(plan.cliques)}"
    spares = f", {len(plan.spares)} kept spare" if plan.spares else ""
    return (
        f"planned: {members} members on {len(plan.trays)} trays of {where} ({list_names(plan.trays)}){spares}"
    )


def _gang_of(workload: KueueWorkload) -> GangKey | None:
    """The gang that its pods declare."""
    names = (labels_of(pod_set.template).get(GANG_LABEL) for pod_set in workload.pod_sets if pod_set.count)
    name = next(filter(None, names), None)
    return GangKey(workload.namespace, name) if name else None


def _plan_request(workload: KueueWorkload, labels: SchedulerLabels) -> PlanRequest:
    """Gangs take empty trays whole, and declare segments and spares. Raises Refused."""
    if _gang_of(workload) is None:
        return PlanRequest(labels=labels)
    annotations: dict[str, str] = {}
    for pod_set in workload.pod_sets:
        annotations |= annotations_of(pod_set.template)
    declared = read_gang_spec(annotations)
    return PlanRequest(labels=labels, segment=declared.segment, spares=declared.spares, exclusive=True)


def _is_unsettled(state: ClusterState) -> bool:
    """Whether the site may have more than it shows: a node is without its clique or GPUs."""
    with_gpus = {name for name, gpus in state.gpus.items() if gpus.counted or gpus.claimed}
    in_clique = {node.name for node in state.nodes if node_clique(node.labels, state.labels.clique)}
    return not with_gpus or with_gpus != in_clique


def _is_unreadable(state: ClusterState) -> bool:
    return any(found.title.startswith(("Node ", "ResourceSlice ")) for found in state.unreadable)
