"""The gang controller: it takes a snapshot of one gang, decides, and carries the decision out.

Decisions are pure (`core.gangs.reconcile`). A decision that takes something back is made again from
plan and pods read from the API server, and with what the owners of the pods say. Gangs that need a
placement are queued for `gang_placer`; there is one key for placement, so no two gangs are ever placed
at the same time.

A node's taint without a GangPlan is removed only after a fresh list of GangPlans confirmed that the
plan is gone. Events are recorded on the GangPlan and on the controllers of the pods, which is what
people look at.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from rackloom.claim.cluster.controller_runtime import ControllerRuntime, record_event
from rackloom.claim.cluster.gang_metrics import GangMetrics
from rackloom.claim.cluster.gang_placer import GangPlacer, with_owners
from rackloom.claim.kube.api import KubeApi, NotFound, Rejected
from rackloom.claim.kube.events import EventRecorder
from rackloom.claim.kube.informer import Informer
from rackloom.core.gangs.completion import is_reduced
from rackloom.core.gangs.conditions import API_REFUSED, GangDecision
from rackloom.core.gangs.placement import GangPlanner
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.record import GangKey, gang_status_json, read_record, read_tray_node, release_tray
from rackloom.core.gangs.snapshot import ConfirmedGangObjects, GangSnapshot, gang_key_of, reserving_plans
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.kubernetes.objects import (
    GANG_PLAN,
    NODE,
    POD,
    EventNotice,
    Object,
    PatchObject,
    ResourceKind,
    epoch_seconds,
    index_by_uid,
)
from rackloom.core.kubernetes.pods import GANG_LABEL

# Informers for GangPlans, pods of gangs and nodes.


_BY_GANG, _BY_HOLDER, _BY_UID, _BY_TRAY = "gang", "holder", "uid", "tray"


class GangCaches:
    """A `Seen` that follows the API server. What it hands out must not be changed."""

    def __init__(self, api: KubeApi, rng: random.Random) -> None:
        pods = Informer(api, POD, labels=GANG_LABEL, indexers={_BY_GANG: _index_gang}, rng=rng)
        plans = Informer(api, GANG_PLAN, indexers={_BY_UID: index_by_uid, _BY_TRAY: _index_trays}, rng=rng)
        nodes = Informer(api, NODE, indexers={_BY_HOLDER: reserving_plans}, rng=rng)
        self._informers = {POD: pods, GANG_PLAN: plans, NODE: nodes}

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All of them, to be run."""
        return tuple(self._informers.values())

    def on_change(self, handler: Callable[[ResourceKind, Object], None]) -> None:
        """Call `handler(kind, object)` for every change of an object."""
        for kind, informer in self._informers.items():
            informer.on_change(partial(handler, kind))

    async def synced(self) -> None:
        """Wait until all have taken in a first list."""
        for informer in self.informers:
            await informer.synced()

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        return self._informers[kind].cache.get(name, namespace)

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        return self.at(GANG_PLAN, key.namespace, key.name)

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        return next(iter(self._informers[GANG_PLAN].cache.find(_BY_UID, uid)), None)

    def plans(self) -> Iterator[Object]:
        """All GangPlans: for counts, never for one gang."""
        yield from self._informers[GANG_PLAN].cache

    def plans_on(self, tray: str) -> Sequence[Object]:
        """The GangPlans that have a tray."""
        return self._informers[GANG_PLAN].cache.find(_BY_TRAY, tray)

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        return self._informers[POD].cache.find(_BY_GANG, key.called)

    def node(self, name: str) -> Object | None:
        """A node."""
        return self.at(NODE, None, name)

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        return self._informers[NODE].cache.find(_BY_HOLDER, uid)


def _index_gang(pod: Object) -> Iterable[str]:
    key = gang_key_of(pod)
    return () if key is None else (key.called,)


def _index_trays(plan: Object) -> Iterable[str]:
    return read_record(plan).reserved


# The controller.


GANG_WORKERS = 16


class PlacementKey(msgspec.Struct, frozen=True, order=True):
    """Key of the one place where gangs are placed: never two at once."""


class StrayReservationKey(msgspec.Struct, frozen=True, order=True):
    """Key of the search for trays that are reserved for a plan that is gone."""

    uid: str


GangWorkKey = GangKey | PlacementKey | StrayReservationKey


class GangController:
    """`wall` gives seconds since the epoch; `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        planner: GangPlanner,
        recorder: EventRecorder,
        wall: Callable[[], float],
        rng: random.Random,
        settings: GangSettings,
        meter: GangMetrics | None = None,
    ) -> None:
        self.caches = GangCaches(api, rng)
        self._api = api
        self._recorder = recorder
        self._settings = settings
        self._meter = meter or GangMetrics()
        self._desk = GangPlacer(api, planner, settings, wall, self._meter)
        self._bench: ControllerRuntime[GangWorkKey] = ControllerRuntime(
            "gangs", api, self.caches, rng, self._do
        )
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep gangs whole, until cancelled."""
        await self._bench.run(GANG_WORKERS)

    def _changed(self, kind: ResourceKind, obj: Object) -> None:
        for key in self._concerned(kind, obj):
            self._bench.queue.add(key)

    def _concerned(self, kind: ResourceKind, obj: Object) -> Iterator[GangWorkKey]:
        if kind == POD:
            key = gang_key_of(obj)
            yield from () if key is None else (key,)
        elif kind == GANG_PLAN:
            yield from self._of_plan(obj)
        else:
            for plan in self.caches.plans_on(obj["metadata"]["name"]):
                yield read_record(plan).key
            for uid in reserving_plans(obj):
                holder = self.caches.plan_of(uid)
                yield StrayReservationKey(uid) if holder is None else read_record(holder).key

    def _of_plan(self, plan: Object) -> Iterator[GangWorkKey]:
        record = read_record(plan)
        yield record.key
        if self.caches.plan_of(record.uid) is None:
            self._bench.forget(record.uid)
            self._desk.ended(record.key)
            yield StrayReservationKey(record.uid)
            # Its trays are free now: somebody may have waited for them.
            yield PlacementKey()

    async def _do(self, key: GangWorkKey) -> float | None:
        match key:
            case GangKey():
                return await self._gang(key)
            case PlacementKey():
                await self._plan()
            case StrayReservationKey(uid=uid):
                await self._sweep(key, uid)
        return None

    async def _plan(self) -> None:
        if self._desk.is_asked:
            for key in await self._desk.work():
                self._bench.queue.add(key)

    async def _gang(self, key: GangKey) -> float | None:
        view = self._desk.view(self.caches, key)
        decision = reconcile_gang(view, self._settings)
        if decision.takes_back:
            view = await self._confirmed(key)
            decision = reconcile_gang(view, self._settings)
            if not decision.takes_back:
                self._desk.looked_at(view)
        self._ask(key, decision)
        try:
            await self._bench.act(key, decision.actions)
        except Rejected as refusal:
            await self._tell(key, (EventNotice(True, API_REFUSED, refusal.message),))
            raise
        self._count(view, decision)
        delays = (decision.again, await self._publish(key, decision))
        return min((delay for delay in delays if delay is not None), default=None)

    async def _confirmed(self, key: GangKey) -> GangSnapshot:
        """The gang as it is now: a cache that is behind would take back what another leader has let go."""
        try:
            plan = await self._api.get(GANG_PLAN, key.name, key.namespace)
        except NotFound:
            plan = None
        pods = (await self._api.list(POD, key.namespace, labels=f"{GANG_LABEL}={key.name}")).items
        view = self._desk.view(ConfirmedGangObjects(self.caches, plan, pods), key)
        return await with_owners(self._api, view)

    def _count(self, view: GangSnapshot, decision: GangDecision) -> None:
        self._meter.acted(decision.actions)
        opened = any(isinstance(action, PatchObject) and action.kind == POD for action in decision.actions)
        if opened and not view.let_go and view.record is not None and not is_reduced(view.record):
            self._meter.let_go(view.now - (epoch_seconds(view.record.created) or view.now))

    def _ask(self, key: GangKey, decision: GangDecision) -> None:
        if not decision.asks_planner:
            self._desk.forget(key)
            return
        self._desk.ask(key)
        # One that was refused asks again only after a while, or when a gang has ended.
        self._bench.queue.add_after(PlacementKey(), self._desk.pause(key))

    async def _publish(self, key: GangKey, decision: GangDecision) -> float | None:
        """Write the status if it changed, but not too often; the delay after which to look again."""
        plan = self.caches.plan(key)
        if decision.conditions is None or plan is None:
            return None
        early = await self._bench.say(key, GANG_PLAN, plan, gang_status_json(decision.conditions))
        if early is not None:
            return early
        await self._tell(key, decision.notices)
        return None

    async def _tell(self, key: GangKey, notices: tuple[EventNotice, ...]) -> None:
        """Tell the plan, and whoever made the pods: that is what people look at."""
        plan = self.caches.plan(key)
        about = [*([] if plan is None else [plan]), *_owner_objects(self.caches.pods(key))]
        self._meter.told(notices)
        for notice in notices:
            for one in about:
                await record_event(self._recorder, one, notice)

    async def _sweep(self, key: GangWorkKey, uid: str) -> None:
        """Free the trays of a plan that is gone: that the cache does not have it proves nothing."""
        if self.caches.plan_of(uid) is not None or not self.caches.held(uid):
            return
        listed = await self._api.list(GANG_PLAN)
        if any(item["metadata"]["uid"] == uid for item in listed.items):
            return
        await self._bench.act(
            key, [release_tray(read_tray_node(node), uid) for node in self.caches.held(uid)]
        )


def _owner_objects(pods: Iterable[Object]) -> Iterator[Object]:
    """The controllers of pods, each once, as far as an event needs them."""
    found = {}
    for pod in pods:
        for owner in pod["metadata"].get("ownerReferences") or ():
            if owner.get("controller"):
                found[owner["uid"]] = owner | {"namespace": pod["metadata"]["namespace"]}
    for owner in found.values():
        meta = {name: owner[name] for name in ("name", "namespace", "uid")}
        yield {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "metadata": meta}
