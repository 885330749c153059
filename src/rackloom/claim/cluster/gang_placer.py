"""The placement pass: gangs are placed one after the other, highest priority first, then oldest.

Each pass lists the cluster anew and sees every plan it has recorded before it makes the next one. The
search runs in a thread, because it may take seconds and the event loop has a lease to renew. A gang
that was refused asks again after a pause. A defect in one gang is logged and reported for that gang;
the others are still placed.

Owners of pods (Jobs, MPIJobs) are read only where their answer matters, and at most a few per gang,
since all gangs wait meanwhile. An owner that cannot be read proves nothing.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog
from msgspec.structs import replace

from rackloom.claim.cluster.controller_runtime import execute_write
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected, list_taint_rules
from rackloom.core.cluster.gang_objects import GangKey, GangMember
from rackloom.core.cluster.gang_owners import (
    MPI_JOB,
    FinishedMPIJob,
    OwnerJob,
    read_finished_mpi_job,
    read_owner_job,
)
from rackloom.core.cluster.kueue_objects import KueueWorkload, read_workload
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    GANG_PLAN,
    JOB,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    WORKLOAD,
    Object,
    ObjectWrite,
    OwnerReference,
    ResourceKind,
    controller_of,
    uid_of,
)
from rackloom.core.cluster.reader import ClusterReader
from rackloom.core.cluster.trays import GangPlan
from rackloom.core.domains.quota import spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.placement import answer_placement
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.slots import do_owners_matter, has_fewer_to_come
from rackloom.core.gangs.snapshot import (
    WITHOUT_KUEUE,
    BesideKueue,
    ClusterLists,
    GangObjects,
    GangRecord,
    GangSettings,
    GangSnapshot,
    OwnerCheck,
    objects_by_gang,
    read_record,
    take_snapshot,
)
from rackloom.core.gangs.trays import TrayCountCache, running_site
from rackloom.core.kueue.plans import held_plans
from rackloom.core.place.gang_planner import NodeUse
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

# Reading the owner workloads of a gang's pods.


_MOST_OWNERS = 8
"""Owners of one gang that are read: each read is a request, for which all gangs wait."""


async def with_owners(api: KubeApi, snapshot: GangSnapshot) -> GangSnapshot:
    """The snapshot with the owners of its pods, where they matter. Raises KubeError."""
    members = snapshot.members if do_owners_matter(snapshot) else ()
    return replace(snapshot, owners=await read_owners(api, snapshot.key.namespace, members))


async def read_owners(
    api: KubeApi, namespace: str, members: Iterable[GangMember]
) -> dict[str, OwnerJob | FinishedMPIJob]:
    """The Jobs and MPIJobs that own members, by UID. Raises KubeError.

    Nothing is read for pods of too many owners, since all gangs wait meanwhile.
    """
    owners = {member.owner.uid: member.owner for member in members if member.owner is not None}
    if len(owners) > _MOST_OWNERS:
        return {}
    workloads = {uid: await _read_owner(api, namespace, owner) for uid, owner in owners.items()}
    return {uid: workload for uid, workload in workloads.items() if workload is not None}


async def _read_owner(
    api: KubeApi, namespace: str, owner: OwnerReference
) -> OwnerJob | FinishedMPIJob | None:
    if owner.is_of(MPI_JOB):
        mpi_job = await _read_object(api, namespace, MPI_JOB, owner)
        return None if mpi_job is None else read_finished_mpi_job(mpi_job)
    job = await _read_object(api, namespace, JOB, owner) if owner.is_of(JOB) else None
    if job is None:
        return None
    # The launcher's Job of an MPIJob is over only when the MPIJob is.
    controller = controller_of(job)
    if controller is not None and controller.is_of(MPI_JOB):
        return await _read_owner(api, namespace, controller)
    return read_owner_job(job)


async def _read_object(
    api: KubeApi, namespace: str, kind: ResourceKind, owner: OwnerReference
) -> Object | None:
    """None where it is gone, was replaced by another of its name, or may not be read."""
    try:
        obj = await api.get(kind, owner.name, namespace)
    except NotFound:
        return None
    except Rejected as refusal:
        name = f"{kind.kind} {namespace}/{owner.name}"
        log.warning("gangs.owner_not_read", owner=name, why=refusal.message)
        return None
    return obj if uid_of(obj) == owner.uid else None


# The placement pass.


_LISTED_KINDS = {
    "nodes": NODE,
    "pods": POD,
    "claims": RESOURCE_CLAIM,
    "slices": RESOURCE_SLICE,
    "classes": DEVICE_CLASS,
    "templates": RESOURCE_CLAIM_TEMPLATE,
}


class GangPlacer:
    """Gangs that wait for a placement pass, and their last results.

    `wall` gives seconds since the epoch; `acted` is called with the writes that were executed.
    """

    def __init__(
        self,
        api: KubeApi,
        settings: GangSettings,
        wall: Callable[[], float],
        acted: Callable[[Iterable[ObjectWrite]], None],
        kueue: BesideKueue = WITHOUT_KUEUE,
    ) -> None:
        self._api = api
        self._settings = settings
        self._wall = wall
        self._acted = acted
        self._kueue = kueue
        self._waiting: set[GangKey] = set()
        self._refusals: dict[GangKey, str] = {}
        self._needless: set[GangKey] = set()
        """Gangs that fresh lists showed to need no placement, though the cache had them ask."""
        self._checked: dict[GangKey, GangPlan] = {}
        self._owner_checks: dict[GangKey, OwnerCheck] = {}
        self._counts = TrayCountCache()
        self._reader = ClusterReader(SchedulerLabels(clique=settings.clique_label))

    @property
    def has_waiting(self) -> bool:
        """Whether a gang waits for a pass."""
        return bool(self._waiting)

    def request(self, key: GangKey) -> None:
        """Have a gang placed, checked or repaired in the next pass."""
        self._waiting.add(key)

    def withdraw(self, key: GangKey) -> None:
        """The gang needs no placement now."""
        self._waiting.discard(key)
        self._needless.discard(key)
        self._refusals.pop(key, None)

    def forget(self, key: GangKey) -> None:
        """The gang no longer exists."""
        self.withdraw(key)
        self._checked.pop(key, None)
        self._owner_checks.pop(key, None)

    def note_owner_check(self, snapshot: GangSnapshot) -> None:
        """The owners of its pods were read, and nothing follows from it."""
        previous, use = self._owner_checks.get(snapshot.key), snapshot.tray_use
        since = previous.since if previous is not None and previous.use == use else snapshot.now
        check = OwnerCheck(use, since, snapshot.now, has_fewer_to_come(snapshot))
        self._owner_checks[snapshot.key] = check

    def snapshot(self, objects: GangObjects, key: GangKey) -> GangSnapshot:
        """A gang, with what earlier passes found out about it."""
        snapshot = take_snapshot(objects, key, self._wall())
        if snapshot.record is None or snapshot.record.plan is None:
            self._checked.pop(key, None)
        return replace(
            snapshot,
            refusal=self._refusals.get(key, ""),
            checked=self._checked.get(key),
            owner_check=self._owner_checks.get(key),
        )

    def delay(self, key: GangKey) -> float:
        """Seconds until a gang that asks again may be served.

        A gang that was refused waits, and so does one that asked without need: a stale cache would otherwise
        have it ask in a loop.
        """
        if key in self._refusals:
            return self._settings.again
        return self._settings.settle if key in self._needless else 0.0

    async def run_pass(self) -> tuple[GangKey, ...]:
        """Serve all gangs that wait; returns which. After a KubeError, those not served keep waiting."""
        lists = {name: (await self._api.list(kind)).items for name, kind in _LISTED_KINDS.items()}
        listed = replace(ClusterLists(), taint_rules=await list_taint_rules(self._api.list), **lists)
        cluster = await self._read_cluster(listed)
        plans = (await self._api.list(GANG_PLAN)).items
        # By all that was listed: a member or a tray that cannot be read is not gone.
        objects = objects_by_gang(plans, listed.pods, listed.nodes)
        # Every plan counts as soon as it is written: the next gang of this pass must not take its trays.
        records = {record.key: record for record in map(read_record, plans)}
        # A gang that cannot be read gets a refusal with the reason, and comes again.
        snapshots = []
        for key in sorted(self._waiting):
            try:
                snapshots.append(self.snapshot(objects.get(key, GangObjects()), key))
            except Exception as defect:
                self._failed(key, defect)
                self._waiting.discard(key)
        served = []
        for snapshot in sorted(snapshots, key=_placement_order):
            try:
                await self._serve(snapshot, cluster, records)
            except KubeError:
                raise
            except Exception as defect:
                self._failed(snapshot.key, defect)
            self._waiting.discard(snapshot.key)
            served.append(snapshot.key)
        return tuple(served)

    def _failed(self, key: GangKey, defect: Exception) -> None:
        """A defect that one gang triggers must not keep the others from being placed."""
        log.error("gangs.defect", gang=key.full_name, exc_info=defect)
        self._refusals[key] = f"the planner failed: {defect!r}"

    async def _read_cluster(self, cluster: ClusterLists) -> ClusterLists:
        """The lists without objects that cannot be read, with the facts of the others, and Kueue's plans."""
        # In a thread: reading a large cluster takes long enough to delay the renewal of the lease.
        state = await asyncio.to_thread(
            self._reader.read,
            {
                RESOURCE_SLICE: cluster.slices,
                NODE: cluster.nodes,
                POD: cluster.pods,
                RESOURCE_CLAIM: cluster.claims,
            },
        )
        for unreadable in state.unreadable:
            log.warning("gangs.object_unreadable", object=unreadable.title, why=unreadable.reason)
        known = replace(cluster, nodes=(), pods=(), claims=state.claims, state=state)
        cluster = replace(known, running=running_site(state), use=NodeUse(state))
        quota = self._kueue.quota
        if not self._kueue.has_plans and quota is QuotaMode.NONE:
            return cluster
        # What workloads of Kueue hold is read after the pods, so no room is missed.
        workloads: list[KueueWorkload] = []
        # A cluster without Kueue has none. All gangs would wait for a right that is missing.
        try:
            workloads = list(map(read_workload, (await self._api.list(WORKLOAD)).items))
        except NotFound:
            pass
        except Rejected as refusal:
            log.warning("gangs.workloads_not_read", why=refusal.message)
        planned = held_plans(workloads, state.pods) if self._kueue.has_plans else {}
        domains = () if quota is QuotaMode.NONE else (await self._api.list(COMPUTE_DOMAIN)).items
        return replace(cluster, planned=planned, spare_quotas=spare_quotas(domains, workloads, quota))

    async def _serve(
        self, snapshot: GangSnapshot, cluster: ClusterLists, records: dict[GangKey, GangRecord]
    ) -> None:
        key = snapshot.key
        self._refusals.pop(key, None)
        self._needless.add(key)
        if snapshot.record is None:
            return
        # If an owner cannot be read, nothing is proven: other gangs do not wait for it.
        try:
            owned = await with_owners(self._api, snapshot)
        except KubeError as error:
            log.warning("gangs.owners_not_read", gang=key.full_name, why=str(error))
            owned = replace(snapshot, owners={})
        # The request came from the cache. Fresh lists decide, with and without the owners: a gang that they
        # show to be smaller may need a placement as well.
        if not any(
            reconcile_gang(candidate, self._settings).needs_placement for candidate in (snapshot, owned)
        ):
            return
        self._needless.discard(key)
        request = replace(owned, cluster=replace(cluster, records=tuple(records.values())))
        try:
            # A search may take seconds, and the event loop has a lease to renew meanwhile.
            answer = await asyncio.to_thread(answer_placement, request, self._settings, self._counts)
        except Refused as refused:
            self._refusals[key] = str(refused)
            return
        if answer.checked is not None:
            self._checked[key] = answer.checked
        for action in answer.actions:
            written = await execute_write(self._api, action)
            if written is not None and action.kind == GANG_PLAN:
                records[key] = read_record(written)
        self._acted(answer.actions)


def _placement_order(snapshot: GangSnapshot) -> tuple[int, float, GangKey]:
    """By priority, then by age."""
    priority = max((member.pod.spec.priority or 0 for member in snapshot.living), default=0)
    return -priority, 0.0 if snapshot.record is None else snapshot.record.created, snapshot.key
