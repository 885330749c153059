"""The gang controller: woken by changes, it looks, decides and acts, one gang at a time."""

import random
from collections.abc import Callable, Iterable, Iterator

import msgspec

from rackloom.claim.cluster.actions import Patch
from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang.caches import GangCaches
from rackloom.claim.cluster.gang.conditions import API_REFUSED
from rackloom.claim.cluster.gang.decision import Decision
from rackloom.claim.cluster.gang.desk import PlacementDesk
from rackloom.claim.cluster.gang.ended import is_rest
from rackloom.claim.cluster.gang.meter import GangMeter
from rackloom.claim.cluster.gang.observe import Confirmed, gang_of, holders_of
from rackloom.claim.cluster.gang.owners import with_makers
from rackloom.claim.cluster.gang.placing import Planner
from rackloom.claim.cluster.gang.reconcile import reconcile
from rackloom.claim.cluster.gang.record import GangKey, record_of, status_json
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.trays import free, node_view
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.notices import Notice, tell
from rackloom.claim.cluster.workbench import Workbench
from rackloom.claim.kube.api import Kind, KubeApi, NotFound, Object, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import GANG_PLAN, POD
from rackloom.claim.kube.timestamps import seconds_of

WORKERS = 16


class Planning(msgspec.Struct, frozen=True, order=True):
    """Key of the one place where gangs are placed: never two at once."""


class Stray(msgspec.Struct, frozen=True, order=True):
    """Key of the search for trays that are reserved for a plan that is gone."""

    uid: str


Key = GangKey | Planning | Stray


class GangController:
    """`wall` gives seconds since the epoch; `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        planner: Planner,
        recorder: Recorder,
        wall: Callable[[], float],
        rng: random.Random,
        settings: GangSettings,
        meter: GangMeter | None = None,
    ) -> None:
        self.caches = GangCaches(api, rng)
        self._api = api
        self._recorder = recorder
        self._settings = settings
        self._meter = meter or GangMeter()
        self._desk = PlacementDesk(api, planner, settings, wall, self._meter)
        self._bench: Workbench[Key] = Workbench("gangs", api, self.caches, rng, self._do)
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep gangs whole, until cancelled."""
        await self._bench.run(WORKERS)

    def _changed(self, kind: Kind, obj: Object) -> None:
        for key in self._concerned(kind, obj):
            self._bench.queue.add(key)

    def _concerned(self, kind: Kind, obj: Object) -> Iterator[Key]:
        if kind == POD:
            key = gang_of(obj)
            yield from () if key is None else (key,)
        elif kind == GANG_PLAN:
            yield from self._of_plan(obj)
        else:
            for plan in self.caches.plans_on(obj["metadata"]["name"]):
                yield record_of(plan).key
            for uid in holders_of(obj):
                holder = self.caches.plan_of(uid)
                yield Stray(uid) if holder is None else record_of(holder).key

    def _of_plan(self, plan: Object) -> Iterator[Key]:
        record = record_of(plan)
        yield record.key
        if self.caches.plan_of(record.uid) is None:
            self._bench.forget(record.uid)
            self._desk.ended(record.key)
            yield Stray(record.uid)
            # Its trays are free now: somebody may have waited for them.
            yield Planning()

    async def _do(self, key: Key) -> float | None:
        match key:
            case GangKey():
                return await self._gang(key)
            case Planning():
                await self._plan()
            case Stray(uid=uid):
                await self._sweep(key, uid)
        return None

    async def _plan(self) -> None:
        if self._desk.is_asked:
            for key in await self._desk.work():
                self._bench.queue.add(key)

    async def _gang(self, key: GangKey) -> float | None:
        view = self._desk.view(self.caches, key)
        decision = reconcile(view, self._settings)
        if decision.takes_back:
            view = await self._confirmed(key)
            decision = reconcile(view, self._settings)
            if not decision.takes_back:
                self._desk.looked_at(view)
        self._ask(key, decision)
        try:
            await self._bench.act(key, decision.actions)
        except Rejected as refusal:
            await self._tell(key, (Notice(True, API_REFUSED, refusal.message),))
            raise
        self._count(view, decision)
        delays = (decision.again, await self._publish(key, decision))
        return min((one for one in delays if one is not None), default=None)

    async def _confirmed(self, key: GangKey) -> View:
        """The gang as it is now: a cache that is behind would take back what another leader has let go."""
        try:
            plan = await self._api.get(GANG_PLAN, key.name, key.namespace)
        except NotFound:
            plan = None
        pods = (await self._api.list(POD, key.namespace, labels=f"{GANG_LABEL}={key.name}")).items
        view = self._desk.view(Confirmed(self.caches, plan, pods), key)
        return await with_makers(self._api, view)

    def _count(self, view: View, decision: Decision) -> None:
        self._meter.acted(decision.actions)
        opened = any(isinstance(one, Patch) and one.kind == POD for one in decision.actions)
        if opened and not view.let_go and view.record is not None and not is_rest(view.record):
            self._meter.let_go(view.now - (seconds_of(view.record.created) or view.now))

    def _ask(self, key: GangKey, decision: Decision) -> None:
        if not decision.asks_planner:
            self._desk.forget(key)
            return
        self._desk.ask(key)
        # One that was refused asks again only after a while, or when a gang has ended.
        self._bench.queue.add_after(Planning(), self._desk.pause(key))

    async def _publish(self, key: GangKey, decision: Decision) -> float | None:
        """Write the status if it changed, but not too often; the delay after which to look again."""
        plan = self.caches.plan(key)
        if decision.conditions is None or plan is None:
            return None
        early = await self._bench.say(key, GANG_PLAN, plan, status_json(decision.conditions))
        if early is not None:
            return early
        await self._tell(key, decision.notices)
        return None

    async def _tell(self, key: GangKey, notices: tuple[Notice, ...]) -> None:
        """Tell the plan, and whoever made the pods: that is what people look at."""
        plan = self.caches.plan(key)
        about = [*([] if plan is None else [plan]), *_owners(self.caches.pods(key))]
        self._meter.told(notices)
        for notice in notices:
            for one in about:
                await tell(self._recorder, one, notice)

    async def _sweep(self, key: Key, uid: str) -> None:
        """Free the trays of a plan that is gone: that the cache does not have it proves nothing."""
        if self.caches.plan_of(uid) is not None or not self.caches.held(uid):
            return
        listed = await self._api.list(GANG_PLAN)
        if any(one["metadata"]["uid"] == uid for one in listed.items):
            return
        await self._bench.act(key, [free(node_view(node), uid) for node in self.caches.held(uid)])


def _owners(pods: Iterable[Object]) -> Iterator[Object]:
    """The controllers of pods, each once, as far as an event needs them."""
    found = {}
    for pod in pods:
        for owner in pod["metadata"].get("ownerReferences") or ():
            if owner.get("controller"):
                found[owner["uid"]] = owner | {"namespace": pod["metadata"]["namespace"]}
    for owner in found.values():
        meta = {name: owner[name] for name in ("name", "namespace", "uid")}
        yield {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "metadata": meta}
