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

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    DeviceClass,
    ResourceSlice,
)
from rackloom.core.allocate.taint_rules import readable_rules, with_taint_rules
from rackloom.core.cluster.claims import allocated_devices, allocator_claim, claims_to_allocate
from rackloom.core.cluster.devices import allocator_values
from rackloom.core.cluster.gang_objects import GangKey, read_gang_spec
from rackloom.core.cluster.jobs import Job, PriorityClasses, channel_templates, read_jobs
from rackloom.core.cluster.kueue_objects import READY, REJECTED, RETRY, KueueWorkload, as_admitted
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import opened_node
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    Object,
    annotations_of,
    labels_of,
    list_names,
    name_of,
)
from rackloom.core.cluster.pods import GANG_LABEL, claim_templates
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.scheduling import NodeRule, allocator_node
from rackloom.core.cluster.state import TrayHold, owners_of_claims
from rackloom.core.cluster.trays import DraDevices, placement_site
from rackloom.core.domains.quota import spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.placement import PromisedSpares, spare_room
from rackloom.core.gangs.snapshot import ClusterLists, GangSettings, read_record
from rackloom.core.kueue.plans import (
    Verdict,
    held_plans,
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
from rackloom.core.place.site_planner import PlacedJob, PlacementReport, PlanRequest, SiteObjects, SitePlanner
from rackloom.errors import Refused

MOST_RETRY_SECONDS = 300
"""The longest pause between two attempts."""


class KueueCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a pass reads, as lists that were made for it."""

    nodes: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    claims: Sequence[Object] = ()
    slices: Sequence[Object] = ()
    classes: Sequence[Object] = ()
    templates: Sequence[Object] = ()
    domains: Sequence[Object] = ()
    """ComputeDomains."""
    gang_plans: Sequence[Object] = ()
    flavors: Sequence[Object] = ()
    taint_rules: Sequence[Object] = ()
    """DeviceTaintRules."""


class PlacementPass:
    """Decides for workloads on one reading of the cluster.

    `checks` are the names of the checks that we decide, `workloads` all workloads of the cluster.
    `quota` selects the ComputeDomains that need quota.
    """

    def __init__(
        self,
        cluster: KueueCluster,
        workloads: Iterable[KueueWorkload],
        checks: Iterable[str],
        settings: GangSettings,
        quota: QuotaMode = QuotaMode.NONE,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._labels = SchedulerLabels(clique=settings.clique_label)
        self._flavors = {name_of(flavor): flavor for flavor in cluster.flavors}
        self._claims = tuple(claims_to_allocate(cluster.claims, cluster.templates))
        # The API server leaves the kind out of the objects of a list.
        self._domains = [{**obj, "kind": COMPUTE_DOMAIN.kind} for obj in cluster.domains]
        self._channels = channel_templates(self._domains)
        workloads = tuple(workloads)
        names_of_ours = set(checks)
        self._state = read_state(cluster.nodes, cluster.pods, labels=self._labels)
        held = held_plans(workloads, self._state.pods, names_of_ours)
        self._reserved = [hold for holds in held.values() for hold in holds]
        self._promised: dict[str, PromisedSpares] = {}
        """By the UID of the workload."""
        for workload in workloads:
            for state in ready_checks(workload, names_of_ours):
                self._promise(workload, state.pod_set_updates)
        self._site = _site_objects(cluster, self._labels)
        self._gangs = ClusterLists(
            state=self._state,
            records=tuple(map(read_record, cluster.gang_plans)),
            spare_quotas=spare_quotas(cluster.domains, workloads, quota),
        )

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
        found, nodes = self._site, self._site.state.nodes
        if domains:
            nodes = tuple(node for node in nodes if any(domain <= node.labels.items() for domain in domains))
            found = replace(found, state=replace(found.state, nodes=nodes))
        holds_of_gangs = (
            TrayHold(owner=record.key.full_name, tray=tray, gpus=0, is_whole=True)
            for record in self._gangs.records
            if record.key != gang
            for tray in record.reserved
        )
        reserved = (*self._reserved, *holds_of_gangs)
        found = replace(found, reserved=reserved, viewer=workload.namespace)
        try:
            attempt, planner, report = self._report(found, job, request)
        except Refused as refused:
            blocked: str | None = str(refused)
        else:
            (answer,) = report.jobs
            spares = () if answer.plan is None else answer.plan.spares
            blocked = answer.blocked or self._too_many_spares(workload, gang, job, len(spares))
            if answer.plan is not None and blocked is None:
                (placed,) = planner.placed
                updates = pod_set_updates(workload.uid, placed, attempt.request.labels.clique)
                self._reserved += held_seats(workload.full_name, updates, ())
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
        room = spare_room(gang, templates, self._gangs, self._settings.max_spares, promised)
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
        self, found: SiteObjects, job: Job, request: PlanRequest
    ) -> tuple[TopologyAttempt, SitePlanner, PlacementReport]:
        """How a job goes on the nodes of a site. Raises Refused."""
        classes = PriorityClasses((), are_all_known=False)

        def plan(attempt: TopologyAttempt) -> tuple[SitePlanner, PlacementReport]:
            nodes = tuple(node for node in found.state.nodes if attempt.takes(node))
            there = {node.name for node in nodes}
            kept = tuple(hold for hold in found.reserved if hold.tray in there)
            site = replace(found, state=replace(found.state, nodes=nodes), reserved=kept)
            planner = SitePlanner(site, self._claims, self._channels, classes, attempt.request)
            return planner, planner.report([job])

        # A level is one of the whole cluster, also where Kueue has chosen domains.
        attempts = topology_attempts(job_topology(job), request, self._state.nodes)
        return first_that_fits(attempts, plan)

    @cached_property
    def _best(self) -> SiteObjects | None:
        """The site empty and open. None if it may have more than it shows."""
        cluster = self._cluster
        if _is_unsettled(cluster, self._labels):
            return None
        opened = tuple(map(opened_node, cluster.nodes))
        best = replace(cluster, nodes=opened, pods=(), claims=(), taint_rules=())
        return _site_objects(best, self._labels)

    def _why_never(self, workload: KueueWorkload, job: Job, request: PlanRequest) -> str | None:
        """Why a job fits on no state of this site, or None if it may fit some day."""
        if self._best is None:
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
            best = replace(self._best, viewer=workload.namespace)
            _, _, report = self._report(best, replace(job, groups=tuple(groups)), request)
        except Refused:
            return None
        (answer,) = report.jobs
        return answer.blocked if answer.plan is None else None


def _site_objects(cluster: KueueCluster, labels: SchedulerLabels) -> SiteObjects:
    """The cluster as the planner takes it."""
    state = read_state(cluster.nodes, cluster.pods, cluster.claims, cluster.slices, labels)
    devices = DraDevices(
        nodes=tuple(map(allocator_node, state.nodes)),
        classes=tuple(allocator_values(cluster.classes, DeviceClass)),
        slices=with_taint_rules(
            allocator_values(cluster.slices, ResourceSlice), tuple(readable_rules(cluster.taint_rules))
        ),
        claims=tuple(
            allocator_claim(held, claim) for claim in state.claims if (held := allocated_devices(claim))
        ),
        owners=owners_of_claims(state),
    )
    return SiteObjects(state=state, devices=devices)


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


def _is_unsettled(cluster: KueueCluster, labels: SchedulerLabels) -> bool:
    """Whether the site may have more than it shows: an unreadable node, or one without its clique or GPUs."""
    state = read_state(cluster.nodes, slices=cluster.slices, labels=labels)
    with_gpus = {name for name, gpus in state.gpus.items() if gpus.counted or gpus.claimed}
    in_clique = {tray.name for tray in placement_site(state).trays if tray.clique is not None}
    return bool(state.unreadable) or not with_gpus or with_gpus != in_clique
