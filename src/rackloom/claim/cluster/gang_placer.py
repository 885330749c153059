"""The placement pass: gangs are placed one after the other, highest priority first, then oldest.

A pass takes the cluster from the watches, and sees every plan it has recorded before it makes the next one.
Before it writes, it reads the objects that the decision names from the API server, and decides again if one
has changed. The search runs in a thread, because it may take seconds and the event loop has a lease to renew.
A gang that was refused waits until the cluster offers more. A defect in one gang is logged and reported for
that gang; the others are still placed.

Owners of pods (Jobs, MPIJobs) are read only where their answer matters, and at most a few per gang,
since all gangs wait meanwhile. An owner that cannot be read proves nothing.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from rackloom.claim.cluster.controller_runtime import execute_write
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.kube.informer import (
    CacheSet,
    ClusterFeed,
    Informer,
    is_not_served,
    is_not_served_to_us,
    taint_rule_informers,
)
from rackloom.core.allocate.objects import readable
from rackloom.core.cluster.gang_objects import GangKey, GangMember, gang_key_of, reserving_plans
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
    DEVICE_TAINT_RULES,
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
    index_by_label,
    index_by_uid,
    name_of,
    namespace_of,
    uid_of,
    version_of,
)
from rackloom.core.cluster.pods import GANG_LABEL, KUEUE_WORKLOAD_LABEL, PodObject
from rackloom.core.cluster.state import Unreadable
from rackloom.core.cluster.trays import GangPlan
from rackloom.core.domains.quota import SpareQuotas, spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.placement import PlacementAnswer, answer_placement
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
    planned_trays,
    read_record,
    take_snapshot,
)
from rackloom.core.gangs.trays import SiteCache, follow_lists, offers_more
from rackloom.core.kueue.plans import held_plans
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

T = TypeVar("T")

# The objects that the gang controller follows. All pods and nodes are followed, not those of gangs alone: a
# placement counts the trays of all jobs.


_BY_GANG, _BY_HOLDER, _BY_UID, _BY_TRAY, _BY_WORKLOAD = "gang", "holder", "uid", "tray", "workload"
_KEPT_WHOLE = (RESOURCE_CLAIM, RESOURCE_SLICE, DEVICE_CLASS, RESOURCE_CLAIM_TEMPLATE)


def _excuses_workloads(error: KubeError) -> bool:
    """A cluster without Kueue has no workloads. All gangs would wait for a right that is missing."""
    if not is_not_served(error):
        log.warning("gangs.workloads_not_read", why=str(error))
    return is_not_served_to_us(error)


class GangCaches(CacheSet):
    """The informers of the gang controller."""

    def __init__(
        self,
        api: KubeApi,
        rng: random.Random,
        settings: GangSettings = GangSettings(),  # noqa: B008 (a frozen value)
        kueue: BesideKueue = WITHOUT_KUEUE,
    ) -> None:
        has_quota = kueue.quota is not QuotaMode.NONE
        by_gang = {_BY_GANG: _index_gang, _BY_WORKLOAD: index_by_label(KUEUE_WORKLOAD_LABEL)}
        by_tray = {_BY_UID: index_by_uid, _BY_TRAY: _index_trays}
        informers = {
            POD: (Informer(api, POD, indexers=by_gang, rng=rng),),
            GANG_PLAN: (Informer(api, GANG_PLAN, indexers=by_tray, rng=rng),),
            NODE: (Informer(api, NODE, indexers={_BY_HOLDER: reserving_plans}, rng=rng),),
            **{kind: (Informer(api, kind, rng=rng),) for kind in _KEPT_WHOLE},
            **taint_rule_informers(api, rng),
        }
        if kueue.has_plans or has_quota:
            informers[WORKLOAD] = (Informer(api, WORKLOAD, excuses=_excuses_workloads, rng=rng),)
        if has_quota:
            informers[COMPUTE_DOMAIN] = (Informer(api, COMPUTE_DOMAIN, rng=rng),)
        super().__init__(informers)
        self.feed = ClusterFeed(self, SchedulerLabels(clique=settings.clique_label))
        self._kueue = kueue
        self._records = _Readings(read_record)
        self._workloads = _Readings(read_workload)
        self._lists = ClusterLists()
        self._unreadable: tuple[Unreadable, ...] = ()

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        return self.at(GANG_PLAN, key.namespace, key.name)

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan with a UID."""
        return next(iter(self.by(GANG_PLAN, _BY_UID, uid)), None)

    def plans_on(self, tray: str) -> Sequence[Object]:
        """The GangPlans that reserve a tray."""
        return self.by(GANG_PLAN, _BY_TRAY, tray)

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        return self.by(POD, _BY_GANG, key.full_name)

    def reserved(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        return self.by(NODE, _BY_HOLDER, uid)

    def objects(self, plan: Object | None, pods: Iterable[Object]) -> GangObjects:
        """The objects of a gang with this plan and these pods; the nodes and other plans are cached ones."""
        if plan is None:
            return GangObjects(pods=tuple(pods))
        record = read_record(plan)
        nodes = {name: node for name in record.reserved if (node := self.at(NODE, None, name)) is not None}
        uids = {record.uid, *(uid for node in nodes.values() for uid in reserving_plans(node))}
        return GangObjects(
            plan=plan,
            pods=tuple(pods),
            nodes=nodes,
            reserved={uid: self.reserved(uid) for uid in uids},
            plans={uid: other for uid in uids if (other := self.plan_of(uid)) is not None},
        )

    def note_written(self, kind: ResourceKind, obj: Object) -> None:
        """A GangPlan or a workload was written: it counts before the watch shows it."""
        (self._records if kind == GANG_PLAN else self._workloads).note(obj)

    def records(self) -> tuple[GangRecord, ...]:
        """All GangPlans, as the cache has them or as they were written since."""
        return self._records.read(self.all(GANG_PLAN))

    def workloads(self) -> tuple[KueueWorkload, ...]:
        """All workloads of Kueue, if they are followed."""
        return self._workloads.read(self.all(WORKLOAD)) if self.follows(WORKLOAD) else ()

    async def lists(self) -> ClusterLists:
        """The cluster now. It is the same value as before if nothing changed."""
        state = await self.feed.state()
        if state.unreadable != self._unreadable:
            self._unreadable = state.unreadable
            for unreadable in state.unreadable:
                log.warning("gangs.object_unreadable", object=unreadable.title, why=unreadable.reason)
        workloads = self.workloads()
        pods = (
            pod for work in workloads for pod in readable(self.by(POD, _BY_WORKLOAD, work.uid), PodObject)
        )
        self._lists = follow_lists(
            self._lists,
            ClusterLists(
                slices=tuple(self.all(RESOURCE_SLICE)),
                classes=tuple(self.all(DEVICE_CLASS)),
                templates=tuple(self.all(RESOURCE_CLAIM_TEMPLATE)),
                # Every version that is served has all rules.
                taint_rules=next(filter(None, (tuple(self.all(kind)) for kind in DEVICE_TAINT_RULES)), ()),
                state=state,
                records=self.records(),
                planned=held_plans(workloads, pods) if self._kueue.has_plans else {},
                spare_quotas=self._spare_quotas(workloads),
            ),
        )
        return self._lists

    def _spare_quotas(self, workloads: Iterable[KueueWorkload]) -> SpareQuotas | None:
        if not self.follows(COMPUTE_DOMAIN):
            return None
        return spare_quotas(self.all(COMPUTE_DOMAIN), workloads, self._kueue.quota)


class _Readings(Generic[T]):
    """What was read of objects. An object is read again when it has changed.

    One that was written counts as written until the cache has this version or a newer one.
    """

    def __init__(self, read: Callable[[Object], T]) -> None:
        self._read = read
        self._known: Mapping[str, tuple[Object, T]] = {}
        self._written: dict[str, Object] = {}

    def note(self, obj: Object) -> None:
        self._written[uid_of(obj)] = obj

    def read(self, objects: Iterable[Object]) -> tuple[T, ...]:
        found, written = {}, self._written
        for obj in objects:
            uid = uid_of(obj)
            if uid in written and int(version_of(written[uid])) > int(version_of(obj)):
                obj = written[uid]
            known = self._known.get(uid)
            found[uid] = (obj, self._read(obj)) if known is None or known[0] is not obj else known
        self._written = {uid: obj for uid, obj in written.items() if uid in found and found[uid][0] is obj}
        self._known = found
        return tuple(value for _, value in found.values())


def _index_gang(pod: Object) -> Iterable[str]:
    key = gang_key_of(pod)
    return () if key is None else (key.full_name,)


def _index_trays(plan: Object) -> Iterable[str]:
    return read_record(plan).reserved


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


_MOST_ATTEMPTS = 3
"""Plans of one gang in a pass, if the objects that they name turn out to have changed."""
_MOST_READS = 8
"""Objects that are read at once before a plan is written."""
_RESTS = 20
"""Multiples of `GangSettings.again`. A gang that was refused is placed again after this time, if no change
helped before. No watch shows the owners of its pods."""


async def read_gang(api: KubeApi, key: GangKey) -> tuple[Object | None, tuple[Object, ...]]:
    """The GangPlan and the pods of a gang. Raises KubeError."""
    plan = await get_or_none(api, GANG_PLAN, key.name, key.namespace)
    pods = (await api.list(POD, key.namespace, labels=f"{GANG_LABEL}={key.name}")).items
    return plan, tuple(pod for pod in pods if gang_key_of(pod) == key)


async def read_trays(
    api: KubeApi, trays: Iterable[str], *, with_pods: bool
) -> list[tuple[Object | None, tuple[Object, ...]]]:
    """The node of each tray, and the pods on it if they are asked for. Raises KubeError."""
    turns = asyncio.Semaphore(_MOST_READS)

    async def read(tray: str) -> tuple[Object | None, tuple[Object, ...]]:
        async with turns:
            node = await get_or_none(api, NODE, tray, None)
            on_it = await api.list(POD, fields=f"spec.nodeName={tray}") if with_pods else None
            return node, () if on_it is None else on_it.items

    return await asyncio.gather(*map(read, trays))


async def get_or_none(api: KubeApi, kind: ResourceKind, name: str, namespace: str | None) -> Object | None:
    """The object, or None where there is none of this name. Raises KubeError."""
    try:
        return await api.get(kind, name, namespace)
    except NotFound:
        return None


class _Refusal(msgspec.Struct, frozen=True):
    """A refusal that stands until the cluster offers more, or the pods of the gang change."""

    pods: frozenset[tuple[str, str]]
    """UID and version."""
    since: float


class GangPlacer:
    """Gangs that wait for a placement pass, and their last results.

    `wall` gives seconds since the epoch; `acted` is called with the writes that were executed.
    """

    def __init__(
        self,
        api: KubeApi,
        caches: GangCaches,
        settings: GangSettings,
        wall: Callable[[], float],
        acted: Callable[[Iterable[ObjectWrite]], None],
    ) -> None:
        self._api = api
        self._caches = caches
        self._settings = settings
        self._wall = wall
        self._acted = acted
        self._waiting: set[GangKey] = set()
        self._refusals: dict[GangKey, str] = {}
        self._refused: dict[GangKey, _Refusal] = {}
        self._needless: set[GangKey] = set()
        """Gangs that need no placement by fresh reads, although they do by the cache."""
        self._checked: dict[GangKey, GangPlan] = {}
        self._owner_checks: dict[GangKey, OwnerCheck] = {}
        self._site = SiteCache()
        self._cluster = ClusterLists()
        """Of the last pass."""

    @property
    def has_refused(self) -> bool:
        """Whether a gang waits until the cluster offers more."""
        return bool(self._refused)

    def request(self, snapshot: GangSnapshot) -> float:
        """Have a gang placed, checked or repaired in a later pass. Returns the seconds until that pass.

        A gang without need waits: by a stale cache it would be placed in a loop. So does one whose repair was
        refused, since time alone may make its pods late or its trays lost.
        """
        key, refused = snapshot.key, self._refused.get(snapshot.key)
        if refused is not None and refused.pods == _pod_versions(snapshot):
            return max(refused.since + _RESTS * self._settings.again - snapshot.now, 0.0)
        self._waiting.add(key)
        # Pods that changed may fit at once.
        if self._refused.pop(key, None) is None and key in self._refusals:
            return self._settings.again
        return self._settings.settle if key in self._needless else 0.0

    def withdraw(self, key: GangKey) -> None:
        """The gang needs no placement now."""
        self._waiting.discard(key)
        self._needless.discard(key)
        self._refusals.pop(key, None)
        self._refused.pop(key, None)

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

    async def run_pass(self) -> tuple[GangKey, ...]:
        """Serve all gangs that wait; returns which. After a KubeError, those not served keep waiting."""
        before, self._cluster = self._cluster, await self._caches.lists()
        is_more, due = offers_more(before, self._cluster), self._wall() - _RESTS * self._settings.again
        for key in [key for key, refused in self._refused.items() if is_more or refused.since <= due]:
            del self._refused[key]
            self._waiting.add(key)
        # A gang that cannot be read gets a refusal with the reason, and comes again.
        snapshots = []
        for key in sorted(self._waiting):
            try:
                objects = self._caches.objects(self._caches.plan(key), self._caches.pods(key))
                snapshots.append(self.snapshot(objects, key))
            except Exception as defect:
                self._failed(key, defect)
                self._waiting.discard(key)
        served = []
        for snapshot in sorted(snapshots, key=_placement_order):
            try:
                await self._serve(snapshot)
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

    async def _serve(self, snapshot: GangSnapshot) -> None:
        key, versions = snapshot.key, _ReadVersions(self._caches, snapshot)
        self._refusals.pop(key, None)
        self._needless.add(key)
        for _ in range(_MOST_ATTEMPTS):
            answer = await self._answer(snapshot)
            if answer is None:
                return
            fresh = await self._read_again(snapshot, answer, versions)
            if fresh is None:
                self._needless.discard(key)
                await self._execute(snapshot, answer)
                return
            # The objects that the answer names have changed: it is made again from their present state.
            snapshot, self._cluster = self.snapshot(fresh, key), await self._caches.lists()

    async def _answer(self, snapshot: GangSnapshot) -> PlacementAnswer | None:
        """None if the gang needs nothing, or was refused."""
        key = snapshot.key
        if snapshot.record is None:
            return None
        # If an owner cannot be read, nothing is proven: other gangs do not wait for it.
        try:
            owned = await with_owners(self._api, snapshot)
        except KubeError as error:
            log.warning("gangs.owners_not_read", gang=key.full_name, why=str(error))
            owned = replace(snapshot, owners={})
        # A gang that its owners show to be smaller may need a placement as well.
        if not any(
            reconcile_gang(candidate, self._settings).needs_placement for candidate in (snapshot, owned)
        ):
            return None
        request = replace(owned, cluster=self._cluster)
        try:
            # A search may take seconds, and the event loop has a lease to renew meanwhile.
            return await asyncio.to_thread(answer_placement, request, self._settings, self._site)
        except Refused as refused:
            self._needless.discard(key)
            self._refusals[key] = str(refused)
            if snapshot.plan is None:
                self._refused[key] = _Refusal(_pod_versions(snapshot), snapshot.now)
            return None

    async def _read_again(
        self, snapshot: GangSnapshot, answer: PlacementAnswer, versions: "_ReadVersions"
    ) -> GangObjects | None:
        """The gang, if objects that the answer names are others by now. They then count in the cluster.

        If a plan is checked, no foreign pod may be on its trays, so the pods there are read as well.
        """
        key, record, is_check = snapshot.key, snapshot.record, answer.checked is not None
        trays = record.reserved if is_check and record else planned_trays(answer.actions)
        (plan, pods), found = await asyncio.gather(
            read_gang(self._api, key), read_trays(self._api, trays, with_pods=is_check)
        )
        news = versions.update(GANG_PLAN, key.namespace, [(key.name, plan)])
        news += versions.update(
            NODE, None, [(tray, node) for tray, (node, _) in zip(trays, found, strict=True)]
        )
        there = {(namespace_of(pod), name_of(pod)): pod for _, on_it in found for pod in on_it}
        own = {member.name: None for member in snapshot.members} | {name_of(pod): pod for pod in pods}
        for pod in there.values():
            news += versions.update(POD, namespace_of(pod), [(name_of(pod), pod)])
        news += versions.update(POD, key.namespace, own.items())
        # The taint of a plan that the cache does not show yet: its gang has the tray.
        plans = {record.uid for record in self._cluster.records}
        is_foreign = any(
            uid not in plans for node, _ in found if node is not None for uid in reserving_plans(node)
        )
        return self._caches.objects(plan, pods) if news or is_foreign else None

    async def _execute(self, snapshot: GangSnapshot, answer: PlacementAnswer) -> None:
        if answer.checked is not None:
            self._checked[snapshot.key] = answer.checked
        for action in answer.actions:
            written = await execute_write(self._api, action)
            if written is not None and action.kind == GANG_PLAN:
                # The next gang of this pass must not take its trays.
                self._caches.note_written(GANG_PLAN, written)
                self._cluster = replace(self._cluster, records=self._caches.records())
        self._acted(answer.actions)


class _ReadVersions:
    """The versions of objects that the decisions about one gang rest on: cached ones, or those read since."""

    def __init__(self, caches: GangCaches, snapshot: GangSnapshot) -> None:
        self._caches = caches
        self._known: dict[tuple[ResourceKind, str | None, str], _Version | None] = {
            (POD, member.namespace, member.name): _version_of_member(member) for member in snapshot.members
        }

    def update(
        self, kind: ResourceKind, namespace: str | None, read: Iterable[tuple[str, Object | None]]
    ) -> int:
        """Take in objects that were read now, by name. Returns the number of those that have changed."""
        changed = 0
        for name, obj in read:
            key = kind, namespace, name
            known = self._known[key] if key in self._known else _version(self._caches.at(*key))
            if known != _version(obj):
                changed += 1
                self._known[key] = _version(obj)
                if kind != GANG_PLAN and obj is not None:
                    self._caches.feed.take(kind, obj)
                elif kind != GANG_PLAN and known is not None:
                    self._caches.feed.drop(kind, known[0])
        return changed


_Version = tuple[str, str]
"""UID and resourceVersion."""


def _version(obj: Object | None) -> _Version | None:
    return None if obj is None else (uid_of(obj), version_of(obj))


def _version_of_member(member: GangMember) -> _Version:
    return member.uid, member.pod.metadata.resource_version or ""


def _pod_versions(snapshot: GangSnapshot) -> frozenset[_Version]:
    return frozenset(map(_version_of_member, snapshot.members))


def _placement_order(snapshot: GangSnapshot) -> tuple[int, float, GangKey]:
    """By priority, then by age."""
    priority = max((member.pod.spec.priority or 0 for member in snapshot.living), default=0)
    return -priority, 0.0 if snapshot.record is None else snapshot.record.created, snapshot.key
