"""The gang controller: woken by changes, it looks, decides and acts, one gang at a time."""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from rackloom.claim.cluster.echoes import Echoes
from rackloom.claim.cluster.executor import carry_out, write_status
from rackloom.claim.cluster.gang.caches import GangCaches
from rackloom.claim.cluster.gang.decision import Decision
from rackloom.claim.cluster.gang.desk import PlacementDesk
from rackloom.claim.cluster.gang.observe import gang_of, holders_of
from rackloom.claim.cluster.gang.placing import Planner
from rackloom.claim.cluster.gang.reconcile import reconcile
from rackloom.claim.cluster.gang.record import GangKey, record_of, status_json
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.trays import free, node_view
from rackloom.claim.cluster.notices import Notice
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, Object, Rejected
from rackloom.claim.kube.events import Recorder, Severity
from rackloom.claim.kube.kinds import GANG_PLAN, POD
from rackloom.claim.kube.queue import WorkQueue
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

STATUS_INTERVAL = 1.0
"""Seconds between two writes of one status: 18 pods that come within it are one write."""
DEFECT_PAUSE = 60.0
"""Seconds until work that failed in a way nobody expected is tried again."""
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
    ) -> None:
        self.caches = GangCaches(api, rng)
        self._api = api
        self._recorder = recorder
        self._settings = settings
        self._desk = PlacementDesk(api, planner, settings, wall)
        self._queue: WorkQueue[Key] = WorkQueue(rng)
        self._echoes = Echoes(self.caches, lambda: asyncio.get_running_loop().time())
        self._said: dict[str, float] = {}
        """Loop time of the last status write, by UID."""
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep gangs whole, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self.caches.informers:
                tasks.create_task(informer.run())
            await self.caches.synced()
            log.info("gangs.synced")
            await self._queue.work(self._work, workers=WORKERS)

    def _changed(self, kind: Kind, obj: Object) -> None:
        for key in self._concerned(kind, obj):
            self._queue.add(key)

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
            self._said.pop(record.uid, None)
            self._desk.ended(record.key)
            yield Stray(record.uid)
            # Its trays are free now: somebody may have waited for them.
            yield Planning()

    async def _work(self, key: Key) -> float | None:
        try:
            return await self._do(key)
        except (KubeError, Retry):
            raise
        except Exception as defect:
            # What is wrong with one gang must not stop the work for the others.
            log.exception("gangs.defect", key=repr(key))
            raise Retry(repr(defect), after=DEFECT_PAUSE) from defect

    async def _do(self, key: Key) -> float | None:
        waits = self._echoes.outstanding(key)
        if waits is not None:
            return waits
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
                self._queue.add(key)

    async def _gang(self, key: GangKey) -> float | None:
        view = self._desk.view(self.caches, key)
        decision = reconcile(view, self._settings)
        self._ask(key, decision)
        try:
            await self._act(key, decision)
        except Rejected as refusal:
            await self._tell(key, (Notice(True, "ApiRefused", refusal.message),))
            raise
        delays = (decision.again, await self._publish(key, decision))
        return min((one for one in delays if one is not None), default=None)

    def _ask(self, key: GangKey, decision: Decision) -> None:
        if not decision.asks_planner:
            self._desk.forget(key)
            return
        self._desk.ask(key)
        # One that was refused asks again only after a while, or when a gang has ended.
        self._queue.add_after(Planning(), self._settings.again if self._desk.was_refused(key) else 0.0)

    async def _act(self, key: Key, decision: Decision) -> None:
        for action in decision.actions:
            written = await carry_out(self._api, action)
            if written is not None:
                self._echoes.expect(key, action.kind, written)

    async def _publish(self, key: GangKey, decision: Decision) -> float | None:
        """Write the status if it changed, but not too often; the delay after which to look again."""
        plan = self.caches.plan(key)
        if decision.conditions is None or plan is None:
            return None
        loop, uid = asyncio.get_running_loop(), plan["metadata"]["uid"]
        early = self._said.get(uid, float("-inf")) + STATUS_INTERVAL - loop.time()
        if early > 0:
            return early
        self._said[uid] = loop.time()
        written = await write_status(self._api, GANG_PLAN, plan, status_json(decision.conditions))
        self._echoes.expect(key, GANG_PLAN, written)
        await self._tell(key, decision.notices)
        return None

    async def _tell(self, key: GangKey, notices: tuple[Notice, ...]) -> None:
        """Tell the plan, and whoever made the pods: that is what people look at."""
        plan = self.caches.plan(key)
        about = [*([] if plan is None else [plan]), *_owners(self.caches.pods(key))]
        for notice in notices:
            for one in about:
                severity: Severity = "Warning" if notice.warning else "Normal"
                await self._recorder.record(one, severity, notice.reason, notice.message)

    async def _sweep(self, key: Key, uid: str) -> None:
        """Free the trays of a plan that is gone: that the cache does not have it proves nothing."""
        if self.caches.plan_of(uid) is not None or not self.caches.held(uid):
            return
        listed = await self._api.list(GANG_PLAN)
        if any(one["metadata"]["uid"] == uid for one in listed.items):
            return
        freed = tuple(free(node_view(node), uid) for node in self.caches.held(uid))
        await self._act(key, Decision(actions=freed))


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
