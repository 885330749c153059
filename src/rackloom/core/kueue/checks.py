"""What becomes of workloads that wait for a check: Ready with a plan, Retry for now, or Rejected for good.

`PlacementPass` takes one reading of the cluster and serves the workloads one after the other. A plan counts
as soon as it is made, so no two workloads get the same room: neither two of one pass, nor one of this pass
and one that was admitted before and whose pods are still to come.

A workload is planned as `rackloom place` plans its job: by the pod templates with the labels and tolerations
of its flavors, on the nodes that Kueue's topology assignment leaves where there is one. The pods of a gang
(`rackloom.dev/gang`) get empty trays, with the segments and spares that they declare. Spares that the gang
controller would refuse, by the limit of a namespace or the quota of a ComputeDomain, are a Retry.

Retry means that it does not fit now; Kueue takes the quota back and tries again after a pause, which grows
with the number of attempts. Rejected, which ends a workload for good, needs proof that it can never fit: the
site has all of its trays published, and even with all of them empty, open and free of rules the job is
larger than what they offer. Whatever else is missing (a claim template, a node that publishes nothing, a
clique label) may come, so it is a Retry.

Owners of other namespaces have no names in messages.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceSlice,
    readable,
)
from rackloom.core.allocate.taint_rules import readable_rules, with_taint_rules
from rackloom.core.cluster.domain_objects import readable_compute_domains
from rackloom.core.cluster.jobs import Job, PriorityClasses, channel_templates, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, Object, allocated_devices, list_names
from rackloom.core.cluster.pods import GANG_LABEL
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.state import TrayHold, owners_of_claims
from rackloom.core.cluster.trays import DraDevices, placement_site
from rackloom.core.domains.quota import spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.snapshot import ClusterLists, GangKey, read_record
from rackloom.core.gangs.spec import GangSettings, read_gang_spec
from rackloom.core.gangs.trays import PromisedSpares, claim_templates_of, spare_room
from rackloom.core.kueue.workloads import (
    READY,
    REJECTED,
    RETRY,
    AdmissionCheckState,
    KueueWorkload,
    Verdict,
    as_admitted,
    domains_of_assignment,
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
from rackloom.core.place.placement_values import GangPlan
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
    `quota` says which ComputeDomains need quota.
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
        self._flavors = {obj["metadata"]["name"]: obj.get("spec") or {} for obj in cluster.flavors}
        self._claims = tuple(_claims_to_make(cluster))
        # The API server leaves the kind out of the objects of a list.
        self._domains = [{**obj, "kind": COMPUTE_DOMAIN.kind} for obj in cluster.domains]
        self._channels = channel_templates(self._domains)
        workloads = tuple(workloads)
        names_of_ours = set(checks)
        held = held_plans(workloads, cluster.pods, names_of_ours)
        self._reserved = [hold for holds in held.values() for hold in holds]
        self._promised: dict[str, PromisedSpares] = {}
        """By the UID of the workload."""
        for workload in workloads:
            for state in ready_checks(workload, names_of_ours):
                self._promise(workload, state.pod_set_updates)
        self._gangs = ClusterLists(
            pods=tuple(cluster.pods),
            records=tuple(map(read_record, cluster.gang_plans)),
            spare_quotas=spare_quotas(
                readable_compute_domains(cluster.domains), (workload.obj for workload in workloads), quota
            ),
        )

    def decide(self, workload: KueueWorkload, check: str) -> Verdict:
        """What becomes of one workload that waits for a check; its plan counts for those that follow."""
        try:
            admitted = as_admitted(workload, self._flavors)
            jobs = read_jobs([*self._domains, admitted], self._labels)
            if not any(group.need.takes_devices for job in jobs for group in job.groups):
                return Verdict(state=READY, message="it asks for no GPU, NIC or channel: nothing to plan")
            (job,) = jobs
            return self._planned(workload, admitted, job, check)
        except Refused as refused:
            return self._retry(workload, check, str(refused))

    def _planned(self, workload: KueueWorkload, admitted: Object, job: Job, check: str) -> Verdict:
        gang = _gang_of(job)
        request = _plan_request(job, self._labels)
        cluster = replace(self._cluster, nodes=tuple(self._nodes_for(workload)))
        reserved = (*self._reserved, *self._holds_of_gangs(gang))
        try:
            attempt, planner, report = self._report(cluster, job, request, reserved, workload.namespace)
        except Refused as refused:
            blocked: str | None = str(refused)
        else:
            (answer,) = report.jobs
            blocked = answer.blocked or self._too_many_spares(workload, gang, job, answer.plan)
            if answer.plan is not None and blocked is None:
                (placed,) = planner.placed
                updates = pod_set_updates(
                    workload, admitted, placed.gang, placed.plan, placed.site, attempt.request.labels
                )
                self._reserved += _holds_of(workload, updates)
                self._promise(workload, updates)
                note = f"; {attempt.note}" if attempt.note else ""
                return Verdict(
                    state=READY, message=f"{_plan_text(placed)}{note}", pod_set_updates=tuple(updates)
                )
        why = self._why_never(workload, admitted, request)
        if why is not None:
            return Verdict(state=REJECTED, message=f"it can never fit: {why}")
        return self._retry(workload, check, f"it does not fit now: {blocked}")

    def _retry(self, workload: KueueWorkload, check: str, why: str) -> Verdict:
        attempts = workload.checks[check].retry_count
        seconds = min(self._settings.again * 2.0 ** min(attempts, 16), MOST_RETRY_SECONDS)
        return Verdict(state=RETRY, message=why, requeue_after=max(int(seconds), 1))

    def _nodes_for(self, workload: KueueWorkload) -> Iterator[Object]:
        """All nodes, or those of the domains that Kueue's topology assignment names."""
        assigned = [domains_of_assignment(entry) for entry in workload.assignments.values()]
        domains = [domain for found in assigned if found is not None for domain in found]
        for node in self._cluster.nodes:
            labels = node["metadata"].get("labels") or {}
            if not domains or any(
                all(labels.get(key) == value for key, value in domain.items()) for domain in domains
            ):
                yield node

    def _holds_of_gangs(self, own: GangKey | None) -> Iterator[TrayHold]:
        for record in self._gangs.records:
            if record.key != own:
                yield from (
                    TrayHold(owner=record.key.full_name, tray=tray, gpus=0, is_whole=True)
                    for tray in record.reserved
                )

    def _too_many_spares(
        self, workload: KueueWorkload, gang: GangKey | None, job: Job, plan: GangPlan | None
    ) -> str | None:
        """Why the gang controller would refuse the spares of a plan; its pods would wait with their quota."""
        if gang is None or plan is None or not plan.spares:
            return None
        templates = {name for group in job.groups for name in group.need.templates}
        promised = [spares for uid, spares in self._promised.items() if uid != workload.uid]
        room = spare_room(gang, templates, self._gangs, self._settings.max_spares, promised)
        if len(plan.spares) <= room.trays:
            return None
        return f"it would keep {len(plan.spares)} spare trays, and {room.limit} may keep {room.trays} more"

    def _promise(self, workload: KueueWorkload, updates: Sequence[Object]) -> None:
        """The spares of a plan count for its gang from now on."""
        spares = planned_spares(updates)
        templates = [pod_set.get("template") or {} for pod_set in workload.pod_sets]
        labels = ((template.get("metadata") or {}).get("labels") or {} for template in templates)
        gang = next((found[GANG_LABEL] for found in labels if found.get(GANG_LABEL)), None)
        if gang is not None and spares:
            named = frozenset(name for template in templates for name in claim_templates_of(template))
            key = GangKey(workload.namespace, gang)
            self._promised[workload.uid] = PromisedSpares(key, spares, named)

    def _report(
        self,
        cluster: KueueCluster,
        job: Job,
        request: PlanRequest,
        reserved: Sequence[TrayHold],
        viewer: str,
    ) -> tuple[TopologyAttempt, SitePlanner, PlacementReport]:
        """How a job goes on the nodes of a cluster. Raises Refused."""
        found = _site_objects(cluster, self._labels, reserved, viewer)
        classes = PriorityClasses((), are_all_known=False)

        def plan(attempt: TopologyAttempt) -> tuple[SitePlanner, PlacementReport]:
            nodes = tuple(node for node in found.state.nodes if attempt.takes(node))
            there = {node["metadata"]["name"] for node in nodes}
            kept = tuple(hold for hold in found.reserved if hold.tray in there)
            site = replace(found, state=replace(found.state, nodes=nodes), reserved=kept)
            planner = SitePlanner(site, self._claims, self._channels, classes, attempt.request)
            return planner, planner.report([job])

        # A level is one of the whole cluster, also where Kueue has chosen domains.
        attempts = topology_attempts(job_topology(job), request, self._cluster.nodes)
        return first_that_fits(attempts, plan)

    # What can never fit.

    def _why_never(self, workload: KueueWorkload, admitted: Object, request: PlanRequest) -> str | None:
        """Why a job fits on no state of this site; None where it may fit some day."""
        cluster = self._cluster
        if _is_unsettled(cluster, self._labels):
            return None
        nodes = tuple(map(_at_its_best, cluster.nodes))
        best = replace(cluster, nodes=nodes, pods=(), claims=(), taint_rules=())
        try:
            (job,) = read_jobs([*self._domains, _without_rules(admitted)], self._labels)
            _, _, report = self._report(best, job, request, (), workload.namespace)
        except Refused:
            return None
        (answer,) = report.jobs
        return answer.blocked if answer.plan is None else None


def _site_objects(
    cluster: KueueCluster, labels: SchedulerLabels, reserved: Sequence[TrayHold], viewer: str
) -> SiteObjects:
    """The cluster as the planner takes it."""
    state = read_state(cluster.nodes, cluster.pods, cluster.claims, cluster.slices, labels)
    devices = DraDevices(
        nodes=tuple(readable(map(_with_labels_only, cluster.nodes), Node)),
        classes=tuple(readable(cluster.classes, DeviceClass)),
        slices=with_taint_rules(
            readable(cluster.slices, ResourceSlice), tuple(readable_rules(cluster.taint_rules))
        ),
        claims=tuple(readable((c for c in state.claims if allocated_devices(c)), ResourceClaim)),
        owners=owners_of_claims(state),
    )
    return SiteObjects(state=state, devices=devices, reserved=tuple(reserved), viewer=viewer)


def _holds_of(workload: KueueWorkload, updates: Sequence[Object]) -> Iterator[TrayHold]:
    """What a plan that was just made holds."""
    yield from held_seats(
        workload, AdmissionCheckState(name="", state=READY, pod_set_updates=tuple(updates)), ()
    )


def _plan_text(placed: PlacedJob) -> str:
    plan = placed.plan
    members = sum(group.members for group in placed.gang.device_groups)
    where = f"clique {plan.cliques[0]}" if len(plan.cliques) == 1 else f"cliques {list_names(plan.cliques)}"
    spares = f", {len(plan.spares)} kept spare" if plan.spares else ""
    return (
        f"planned: {members} members on {len(plan.trays)} trays of {where} ({list_names(plan.trays)}){spares}"
    )


# The job of a workload.


def _gang_of(job: Job) -> GangKey | None:
    """The gang that its pods declare."""
    for group in job.groups:
        name = group.identity.labels.get(GANG_LABEL)
        if name:
            return GangKey(group.identity.namespace, name)
    return None


def _plan_request(job: Job, labels: SchedulerLabels) -> PlanRequest:
    """Gangs take empty trays whole, and declare segments and spares. Raises Refused."""
    if _gang_of(job) is None:
        return PlanRequest(labels=labels)
    annotations = {
        key: value
        for pod_set in job.objects[0]["spec"]["podSets"]
        for key, value in ((pod_set["template"].get("metadata") or {}).get("annotations") or {}).items()
    }
    declared = read_gang_spec(annotations)
    return PlanRequest(labels=labels, segment=declared.segment, spares=declared.spares, exclusive=True)


def _claims_to_make(cluster: KueueCluster) -> Iterator[ResourceClaim]:
    """The claims that pods may name, and those that are made of templates, under the names of these."""
    for obj in cluster.templates:
        spec = (obj.get("spec") or {}).get("spec") or {}
        yield from readable([{"metadata": _identity(obj), "spec": spec}], ResourceClaim)
    yield from readable(
        ({"metadata": _identity(obj), "spec": obj.get("spec") or {}} for obj in cluster.claims), ResourceClaim
    )


def _identity(obj: Object) -> Object:
    return {key: obj["metadata"][key] for key in ("name", "namespace") if key in obj["metadata"]}


def _with_labels_only(node: Object) -> Object:
    return {"metadata": {key: node["metadata"].get(key) or {} for key in ("name", "labels")}}


# The site at its best.


_UNRULED = ("nodeSelector", "affinity")


def _without_rules(admitted: Object) -> Object:
    """The job without rules about nodes: labels can be added."""
    pod_sets = []
    for pod_set in admitted["spec"]["podSets"]:
        spec = {key: value for key, value in pod_set["template"]["spec"].items() if key not in _UNRULED}
        pod_sets.append({**pod_set, "template": {**pod_set["template"], "spec": spec}})
    return {**admitted, "spec": {**admitted["spec"], "podSets": pod_sets}}


def _at_its_best(node: Object) -> Object:
    """A node that is open to all."""
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": node["metadata"],
        "spec": {},
        "status": {**(node.get("status") or {}), "conditions": ready},
    }


def _is_unsettled(cluster: KueueCluster, labels: SchedulerLabels) -> bool:
    """Whether the site may have more than it shows: an unreadable node, or one without its clique or GPUs."""
    state = read_state(cluster.nodes, slices=cluster.slices, labels=labels)
    with_gpus = {name for name, gpus in state.gpus.items() if gpus.counted or gpus.claimed}
    in_clique = {tray.name for tray in placement_site(state).trays if tray.clique is not None}
    return bool(state.unreadable) or not with_gpus or with_gpus != in_clique
