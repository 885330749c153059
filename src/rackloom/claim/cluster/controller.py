"""The ComputeDomain controller: woken by changes, it looks, decides and acts, one ComputeDomain at a time."""

import random
from collections.abc import Callable, Iterable

import msgspec

from rackloom.claim.cluster.caches import Caches
from rackloom.claim.cluster.credentials import CHECK_INTERVAL, Credentials
from rackloom.claim.cluster.isolation import mixed_notice, reconcile_clique
from rackloom.claim.cluster.membership import abandoned, is_doubtful
from rackloom.claim.cluster.notices import Notice, tell
from rackloom.claim.cluster.observe import BY_DOMAIN, Confirmed, clique_view, snapshot, with_secrets
from rackloom.claim.cluster.reconcile import Decision, reconcile
from rackloom.claim.cluster.routing import CliqueKey, Domain, Key, Router, Sweep
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.slots import needs_daemons
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.cluster.sweep import Sweeper
from rackloom.claim.cluster.workbench import Workbench
from rackloom.claim.domain import names
from rackloom.claim.domain.objects import ComputeDomain, status_json
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, DAEMON_SET, NODE, POD, RESOURCE_CLAIM, SECRET
from rackloom.claim.kube.timestamps import whole_time

STUBBORN = 4
"""Failures in a row after which any error is told in the status, not only one that is final."""
GOING_INTERVAL = 1.0
"""Seconds between two looks at Secrets that are being deleted: no watch tells of them."""
WORKERS = 100
"""Mostly waiting for the API server: 300 ComputeDomains at once have their objects in a tenth of a second. As
many as the connections that a client opens."""


class Controller:
    """`wall` gives seconds since the epoch; `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        recorder: Recorder,
        wall: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.caches = Caches(api, settings, rng)
        self._api = api
        self._settings = settings
        self._recorder = recorder
        self._wall = wall
        self._credentials = Credentials(api, wall)
        self._bench: Workbench[Key] = Workbench("compute domains", api, self.caches, rng, self._do)
        self._router = Router(self.caches)
        self._sweeper = Sweeper(api, self.caches)
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep it as it should be, until cancelled."""
        self._bench.queue.add(Sweep())
        await self._bench.run(WORKERS)

    def _changed(self, kind: Kind, obj: Object) -> None:
        if kind == COMPUTE_DOMAIN:
            self._sweeper.seen(obj)
        for key in sorted(self._router.keys(kind, obj), key=repr):
            self._bench.queue.add(key)

    async def _do(self, key: Key) -> float | None:
        match key:
            case Domain(uid=uid):
                return await self._domain(key, uid)
            case CliqueKey(clique_id=clique_id):
                return await self._clique(key, clique_id)
            case Sweep():
                for uid in await self._sweeper.confirm():
                    self._bench.queue.add(Domain(uid))
                return self._sweeper.interval

    async def _domain(self, key: Domain, uid: str) -> float | None:
        seen = await self._look(uid)
        decision = reconcile(seen, self._settings)
        if seen.domain is None:
            return await self._orphans(key, uid, decision)
        try:
            await self._issue(seen, seen.domain)
            await self._bench.act(key, decision.actions)
        except KubeError as error:
            if isinstance(error, Rejected) or self._bench.queue.failures(key) >= STUBBORN:
                failed = msgspec.structs.replace(seen, failures=(error.message,))
                await self._publish(key, reconcile(failed, self._settings))
            raise
        await self._tell(key, decision.done)
        going = any(action.kind == SECRET for action in decision.actions)
        going = going or any(secret.deleting for secret in seen.held_of(SECRET))
        delays = (
            await self._publish(key, decision),
            decision.again,
            GOING_INTERVAL if going else CHECK_INTERVAL,
        )
        return min(delay for delay in delays if delay is not None)

    async def _issue(self, seen: Snapshot, domain: ComputeDomain) -> None:
        settings = self._settings
        wanted = settings.daemon.authentication and needs_daemons(domain, settings)
        # Our finalizer comes first: Secrets of a ComputeDomain that went without a word would stay for ever.
        if wanted and names.FINALIZER in domain.finalizers and not domain.deleting:
            await self._credentials.ensure(domain.uid, seen.home)

    async def _look(self, uid: str) -> Snapshot:
        seen = snapshot(self.caches, uid, self._settings, self._now())
        if is_doubtful(seen, self._settings):
            seen = snapshot(await self._confirmed(seen), uid, self._settings, self._now())
        # A UID without a ComputeDomain may be any text that a user has put into a label or a claim.
        orphaned = bool(seen.held_of(DAEMON_SET)) or self._sweeper.may_have_secrets(uid)
        if orphaned if seen.domain is None else seen.domain.deleting:
            seen = with_secrets(seen, await self._credentials.held(uid, self._settings.namespaces))
        return seen

    async def _confirmed(self, seen: Snapshot) -> Confirmed:
        """The cluster with what makes entries stale, and nodes abandoned, as the API server knows it now.

        Nodes are read before claims: a pod comes to a node that was lost only after it has changed.
        """
        labels = f"{names.COMPUTE_DOMAIN_LABEL}={seen.uid}"
        nodes = {name: await self._node(name) for name in sorted(abandoned(seen, self._settings))}
        lists: dict[Kind, list[Object]] = {POD: []}
        for namespace in self._settings.namespaces:
            lists[POD] += (await self._api.list(POD, namespace, labels=labels)).items
        if nodes and seen.domain is not None:
            space = seen.domain.namespace
            elsewhere = self.caches.by(RESOURCE_CLAIM, BY_DOMAIN, seen.uid)
            lists[RESOURCE_CLAIM] = [obj for obj in elsewhere if obj["metadata"]["namespace"] != space]
            lists[RESOURCE_CLAIM] += (await self._api.list(RESOURCE_CLAIM, space)).items
        return Confirmed(self.caches, lists, nodes)

    async def _node(self, name: str) -> Object | None:
        try:
            return await self._api.get(NODE, name)
        except NotFound:
            return None

    async def _orphans(self, key: Domain, uid: str, decision: Decision) -> float | None:
        if not decision.actions:
            self._bench.forget(uid)
            return None
        if not self._sweeper.is_gone(uid):
            self._bench.queue.add(Sweep())
            return None
        await self._bench.act(key, decision.actions)
        return GOING_INTERVAL if any(action.kind == SECRET for action in decision.actions) else None

    def _now(self) -> str:
        return whole_time(self._wall())

    async def _publish(self, key: Domain, decision: Decision) -> float | None:
        """Write the status if it changed, but not too often; the delay after which to look again."""
        obj = next(iter(self.caches.by(COMPUTE_DOMAIN, BY_DOMAIN, key.uid)), None)
        if decision.status is None or obj is None:
            return None
        early = await self._bench.say(key, COMPUTE_DOMAIN, obj, status_json(decision.status))
        if early is not None:
            return early
        await self._tell(key, decision.notices)
        return None

    async def _tell(self, key: Domain, notices: Iterable[Notice]) -> None:
        obj = next(iter(self.caches.by(COMPUTE_DOMAIN, BY_DOMAIN, key.uid)), None)
        for notice in notices:
            if obj is not None:
                await tell(self._recorder, obj, notice)

    async def _clique(self, key: CliqueKey, clique_id: str) -> float | None:
        view = clique_view(self.caches, clique_id, self._settings, self._now())
        await self._bench.act(key, reconcile_clique(view, self._settings))
        notice = mixed_notice(view)
        node = self.caches.at(NODE, None, view.nodes[0].name) if view.nodes else None
        if notice is not None and node is not None:
            await tell(self._recorder, node, notice)
        return None
