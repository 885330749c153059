"""The objects that the gang controller follows, and the cluster as a placement takes it.

All pods and nodes are followed, not those of gangs alone: a placement counts what everybody has. Objects are
read when they change, and each placement pass finds the rest as the pass before left it.

`ClusterFeed` makes the `ClusterState`. It collects changed objects as the watches show them, and each counts
once however often it changed. `state` reads them, in a thread: after the first list there are many, and the
event loop has a lease to renew.

A watch may be behind. `take` and `drop` bring in an object that was read from the API server before a write.
An older state that the watch still shows afterwards counts until it shows the newest. The next write that
depends on the object reads it again.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import structlog

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.informer import CacheSet, Informer, is_not_served_to_us, taint_rule_informers
from rackloom.core.allocate.objects import readable
from rackloom.core.cluster.gang_objects import GangKey, gang_key_of, reserving_plans
from rackloom.core.cluster.kueue_objects import KueueWorkload, read_workload
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    WORKLOAD,
    Object,
    ResourceKind,
    index_by_label,
    index_by_uid,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.core.cluster.pods import KUEUE_WORKLOAD_LABEL, PodObject
from rackloom.core.cluster.reader import ClusterReader
from rackloom.core.cluster.state import ClusterState, Unreadable
from rackloom.core.domains.quota import SpareQuotas, spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.snapshot import (
    WITHOUT_KUEUE,
    BesideKueue,
    ClusterLists,
    GangObjects,
    GangRecord,
    GangSettings,
    read_record,
)
from rackloom.core.gangs.trays import follow_lists
from rackloom.core.kueue.plans import held_plans

log = structlog.get_logger(__name__)
T = TypeVar("T")

# The state of the cluster.


STATE_KINDS = (NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE)
"""The kinds of objects that a `ClusterState` is read from."""


class ClusterFeed:
    """Follows `caches`, which have informers of all `STATE_KINDS`."""

    def __init__(self, caches: CacheSet, labels: SchedulerLabels) -> None:
        self._caches = caches
        self._reader = ClusterReader(labels)
        self._changed: dict[tuple[ResourceKind, str], Object | None] = {}
        """By kind and UID: the object, or None if it is gone."""
        self._reading = asyncio.Lock()
        caches.on_change(self._note)

    def _note(self, kind: ResourceKind, obj: Object) -> None:
        if kind in STATE_KINDS:
            cached = self._caches.at(kind, namespace_of(obj), name_of(obj))
            is_there = cached is not None and uid_of(cached) == uid_of(obj)
            self._changed[kind, uid_of(obj)] = obj if is_there else None

    def take(self, kind: ResourceKind, obj: Object) -> None:
        """Count an object that was read now."""
        self._changed[kind, uid_of(obj)] = obj

    def drop(self, kind: ResourceKind, uid: str) -> None:
        """Count an object no more that was found to be gone."""
        self._changed[kind, uid] = None

    async def state(self) -> ClusterState:
        """The facts of all objects that the informers have shown so far."""
        async with self._reading:
            changed, self._changed = self._changed, {}
            try:
                return await asyncio.to_thread(self._read, changed)
            finally:
                # After a defect in one object, the others are still to be read.
                self._changed = changed | self._changed

    def _read(self, changed: dict[tuple[ResourceKind, str], Object | None]) -> ClusterState:
        for kind, uid in list(changed):
            obj = changed.pop((kind, uid))
            if obj is not None:
                self._reader.take(kind, obj)
            else:
                self._reader.drop(kind, {"metadata": {"uid": uid}})
        return self._reader.state()


# The informers.


_BY_GANG, _BY_HOLDER, _BY_UID, _BY_TRAY, _BY_WORKLOAD = "gang", "holder", "uid", "tray", "workload"
_KEPT_WHOLE = (RESOURCE_CLAIM, RESOURCE_SLICE, DEVICE_CLASS, RESOURCE_CLAIM_TEMPLATE)


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
        # A cluster without Kueue has no workloads. All gangs would wait for a right that is missing.
        if kueue.has_plans or has_quota:
            informers[WORKLOAD] = (Informer(api, WORKLOAD, excuses=is_not_served_to_us, rng=rng),)
        if has_quota:
            informers[COMPUTE_DOMAIN] = (Informer(api, COMPUTE_DOMAIN, rng=rng),)
        super().__init__(informers)
        self.feed = ClusterFeed(self, SchedulerLabels(clique=settings.clique_label))
        self._kueue = kueue
        self._records = _Readings(read_record)
        self._workloads = _Readings(read_workload)
        self._written: dict[GangKey, GangRecord] = {}
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

    def note_record(self, record: GangRecord) -> None:
        """A plan was written: it counts before the watch shows it."""
        self._written[record.key] = record

    def records(self) -> tuple[GangRecord, ...]:
        """All GangPlans, as the cache has them or as they were written since."""
        cached = {record.key: record for record in self._records.read(self.all(GANG_PLAN))}
        self._written = {
            key: record
            for key, record in self._written.items()
            if key in cached
            and cached[key].uid == record.uid
            and int(record.resource_version) > int(cached[key].resource_version)
        }
        return tuple((cached | self._written).values())

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
    """What was read of objects. An object is read again when it has changed."""

    def __init__(self, read: Callable[[Object], T]) -> None:
        self._read = read
        self._known: Mapping[str, tuple[Object, T]] = {}

    def read(self, objects: Iterable[Object]) -> tuple[T, ...]:
        found = {}
        for obj in objects:
            known = self._known.get(uid_of(obj))
            found[uid_of(obj)] = (obj, self._read(obj)) if known is None or known[0] is not obj else known
        self._known = found
        return tuple(value for _, value in found.values())


def _index_gang(pod: Object) -> Iterable[str]:
    key = gang_key_of(pod)
    return () if key is None else (key.full_name,)


def _index_trays(plan: Object) -> Iterable[str]:
    return read_record(plan).reserved
