"""The gang controller: it takes a snapshot of one gang, decides, and carries the decision out.

Decisions are pure (`core.gangs.reconcile`). A decision that takes something back is made again from
plan and pods read from the API server, and with the status of the pods' owners. Gangs that need a
placement are queued for `gang_placer`. There is one key for placement, so no two gangs are ever placed
at the same time.

A node's taint without a GangPlan is removed only after a fresh list of GangPlans confirmed that the
plan is gone. Events are recorded on the GangPlan and on the controllers of the pods, which is where
people look.

All reasons of the metrics exist with zero from the start, so that the first refusal is a change and not a new
series. Counters outlive a process's terms as leader. The gauge of gangs is counted from the cached GangPlans
when it is read.
"""

import random
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.claim.cluster.controller_runtime import ControllerRuntime
from rackloom.claim.cluster.gang_placer import GangCaches, GangPlacer, read_gang, with_owners
from rackloom.claim.kube.api import EventRecorder, KubeApi, Rejected
from rackloom.core.cluster.gang_objects import (
    WARNING_REASONS,
    GangKey,
    gang_key_of,
    read_tray_node,
    reserving_plans,
)
from rackloom.core.cluster.objects import (
    GANG_PLAN,
    NODE,
    POD,
    DeleteObject,
    EventNotice,
    Object,
    ObjectWrite,
    PatchObject,
    ResourceKind,
    controller_of,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.core.cluster.pods import node_of
from rackloom.core.gangs.reconcile import API_REFUSED, GangDecision, reconcile_gang
from rackloom.core.gangs.slots import is_reduced
from rackloom.core.gangs.snapshot import (
    PLACED,
    WITHOUT_KUEUE,
    BesideKueue,
    GangSettings,
    GangSnapshot,
    read_record,
    release_tray,
)

# Metrics.


PLACED_REASONS = (
    "Placed",
    "Planning",
    "WaitingForMembers",
    "WaitingForClaimTemplates",
    "WaitingForGates",
    "InvalidGang",
    "NotHeld",
    "DoesNotFit",
)
"""Reasons of the condition Placed."""
_UNGATE_BUCKETS = (2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""From a cluster with room, in which settling takes most of the time, to a day of waiting."""


class GangMetrics:
    """Counters of one process. They outlive its terms as leader."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._placements = Counter("rackloom_gang_placements", "Gangs that were placed.", registry=registry)
        self._refusals = Counter(
            "rackloom_gang_refusals",
            "Warnings recorded for gangs, by reason.",
            ["reason"],
            registry=registry,
        )
        self._replaced = Counter(
            "rackloom_gang_members_replaced",
            "Pods of gangs that were deleted, for their owner to make them anew on another tray or the same.",
            registry=registry,
        )
        self._seconds = Histogram(
            "rackloom_gang_ungate_seconds",
            "From the first pod of a gang until its pods were let go.",
            buckets=_UNGATE_BUCKETS,
            registry=registry,
        )
        self._gangs = Gauge(
            "rackloom_gangs", "Gangs, by the reason of their condition Placed.", ["reason"], registry=registry
        )
        for reason in (*WARNING_REASONS, API_REFUSED):
            self._refusals.labels(reason)

    def reported(self, notices: Iterable[EventNotice]) -> None:
        """Events were recorded about a gang."""
        for notice in notices:
            if notice.warning:
                self._refusals.labels(notice.reason).inc()
            elif notice.reason == PLACED:
                self._placements.inc()

    def acted(self, actions: Iterable[ObjectWrite]) -> None:
        """Writes were executed."""
        self._replaced.inc(sum(isinstance(action, DeleteObject) and action.kind == POD for action in actions))

    def ungated(self, seconds: float) -> None:
        """All pods of a gang were ungated, `seconds` after the first was created."""
        self._seconds.observe(max(seconds, 0.0))

    def render(self, plans: Iterable[Object]) -> bytes:
        """The text that Prometheus scrapes. `plans` are the current GangPlans."""
        placed = (read_record(plan).status.condition(PLACED) for plan in plans)
        reasons = Count(condition.reason for condition in placed if condition is not None)
        for reason in PLACED_REASONS:
            self._gangs.labels(reason).set(reasons[reason])
        return generate_latest(self._registry)


# The controller.


GANG_WORKERS = 16
COALESCE_SECONDS = 1.0
"""Between a change of the cluster and the pass for gangs that were refused: changes come in bursts."""


class PlacementKey(msgspec.Struct, frozen=True, order=True):
    """Key of the placement pass. There is one, so no two passes run at the same time."""


class StrayReservationKey(msgspec.Struct, frozen=True, order=True):
    """Key of the release of trays that are reserved for a plan that is gone."""

    uid: str


GangWorkKey = GangKey | PlacementKey | StrayReservationKey


class GangController:
    """`wall` gives seconds since the epoch. `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        recorder: EventRecorder,
        wall: Callable[[], float],
        rng: random.Random,
        settings: GangSettings,
        metrics: GangMetrics | None = None,
        kueue: BesideKueue = WITHOUT_KUEUE,
    ) -> None:
        self.caches = GangCaches(api, rng, settings, kueue)
        self._api = api
        self._recorder = recorder
        self._settings = settings
        self._metrics = metrics or GangMetrics()
        self._placer = GangPlacer(api, self.caches, settings, wall, self._metrics.acted)
        self._runtime: ControllerRuntime[GangWorkKey] = ControllerRuntime(
            "gangs", api, self.caches, rng, self._reconcile
        )
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep gangs whole, until cancelled."""
        await self._runtime.run(GANG_WORKERS)

    def _changed(self, kind: ResourceKind, obj: Object) -> None:
        keys: list[GangWorkKey] = []
        if kind == POD:
            gang = gang_key_of(obj)
            keys += [] if gang is None else [gang]
        elif kind == GANG_PLAN:
            record = read_record(obj)
            keys.append(record.key)
            if self.caches.plan_of(record.uid) is None:
                self._runtime.forget(record.uid)
                self._placer.forget(record.key)
                # Its trays are free now, and another gang may have waited for them.
                keys += [StrayReservationKey(record.uid), PlacementKey()]
        elif kind == NODE:
            for plan in self.caches.plans_on(name_of(obj)):
                keys.append(read_record(plan).key)
            # A taint without a cached plan is a stray reservation, or the plan is not in the cache yet.
            for uid in reserving_plans(obj):
                holder = self.caches.plan_of(uid)
                keys.append(StrayReservationKey(uid) if holder is None else read_record(holder).key)
        for key in keys:
            self._runtime.queue.add(key)
        # A gang that was refused may have waited for this. A pod that is not bound holds nothing.
        if self._placer.has_refused and (kind != POD or node_of(obj)):
            self._runtime.queue.add_after(PlacementKey(), COALESCE_SECONDS)

    async def _reconcile(self, key: GangWorkKey) -> float | None:
        match key:
            case GangKey():
                return await self._reconcile_gang(key)
            case PlacementKey():
                for served in await self._placer.run_pass():
                    self._runtime.queue.add(served)
            case StrayReservationKey(uid=uid):
                await self._release_strays(key, uid)
        return None

    async def _reconcile_gang(self, key: GangKey) -> float | None:
        objects = self.caches.objects(self.caches.plan(key), self.caches.pods(key))
        snapshot = self._placer.snapshot(objects, key)
        decision = reconcile_gang(snapshot, self._settings)
        # The cache alone is no reason to release, delete or withdraw anything.
        if decision.needs_fresh_read:
            snapshot = await self._confirmed_snapshot(key)
            decision = reconcile_gang(snapshot, self._settings)
            if not decision.needs_fresh_read:
                self._placer.note_owner_check(snapshot)
        if decision.needs_placement:
            self._runtime.queue.add_after(PlacementKey(), self._placer.request(snapshot))
        else:
            self._placer.withdraw(key)
        try:
            await self._runtime.execute(key, decision.actions)
        except Rejected as refusal:
            await self._record_events(key, (EventNotice(True, API_REFUSED, refusal.message),))
            raise
        self._metrics.acted(decision.actions)
        # The wait of a gang ends when its first pods are ungated. The last pods of a reduced plan come later.
        record = snapshot.record
        ungates = any(isinstance(action, PatchObject) and action.kind == POD for action in decision.actions)
        if ungates and not snapshot.ungated and record is not None and not is_reduced(record):
            self._metrics.ungated(snapshot.now - (record.created or snapshot.now))
        delays = (decision.recheck_after, await self._publish(key, decision))
        return min((delay for delay in delays if delay is not None), default=None)

    async def _confirmed_snapshot(self, key: GangKey) -> GangSnapshot:
        """The gang from fresh reads. A stale cache could undo the work of another leader."""
        objects = self.caches.objects(*await read_gang(self._api, key))
        return await with_owners(self._api, self._placer.snapshot(objects, key))

    async def _publish(self, key: GangKey, decision: GangDecision) -> float | None:
        """Write the status if it changed, at a limited rate. Returns the delay until it may be written."""
        plan = self.caches.plan(key)
        if decision.status is None or plan is None:
            return None
        early = await self._runtime.update_status(key, GANG_PLAN, plan, msgspec.to_builtins(decision.status))
        if early is not None:
            return early
        await self._record_events(key, decision.notices)
        return None

    async def _record_events(self, key: GangKey, notices: tuple[EventNotice, ...]) -> None:
        """Record events on the plan and on the owners of the pods, which people read."""
        plan = self.caches.plan(key)
        about = [*([] if plan is None else [plan]), *_owner_objects(self.caches.pods(key))]
        self._metrics.reported(notices)
        for notice in notices:
            for obj in about:
                await self._recorder.record(obj, notice)

    async def _release_strays(self, key: GangWorkKey, uid: str) -> None:
        """Release the trays of a plan that is gone. A missing plan in the cache proves nothing."""
        # The cache may lag behind a plan that was just created, so only a fresh list proves that it is gone.
        if self.caches.plan_of(uid) is not None or not self.caches.reserved(uid):
            return
        listed = await self._api.list(GANG_PLAN)
        if any(uid_of(item) == uid for item in listed.items):
            return
        await self._runtime.execute(
            key, [release_tray(read_tray_node(node), uid) for node in self.caches.reserved(uid)]
        )


def _owner_objects(pods: Iterable[Object]) -> Iterator[Object]:
    """The controllers of pods, each once, with the fields that an event needs."""
    owners = {
        owner.uid: (owner, namespace_of(pod)) for pod in pods if (owner := controller_of(pod)) is not None
    }
    for owner, namespace in owners.values():
        meta = {"name": owner.name, "namespace": namespace, "uid": owner.uid}
        yield {"apiVersion": owner.api_version, "kind": owner.kind, "metadata": meta}
