"""The ComputeDomain controller: it takes a snapshot, decides, and carries the decision out.

Decisions are pure (`core.domains.reconcile`). Three things are read outside the caches: certificate
Secrets, which are read by name; pods, claims and nodes, again, before a stale entry or an abandoned
node is removed, or an evicted ComputeDomain withdrawn; and a fresh list of ComputeDomains, before leftovers
are deleted. A rejected write, or
one that failed several times in a row, is reported in the status.
"""

import random
from collections.abc import Callable, Iterable

import msgspec

from rackloom.claim.cluster.certificates import CHECK_INTERVAL_SECONDS, DaemonCertificates
from rackloom.claim.cluster.controller_runtime import ControllerRuntime
from rackloom.claim.cluster.domain_caches import (
    SWEEP_INTERVAL_SECONDS,
    ChangeRouter,
    CliqueKey,
    DomainCaches,
    DomainKey,
    DomainWorkKey,
    OrphanSweeper,
    SweepKey,
)
from rackloom.claim.kube.api import EventRecorder, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain, compute_domain_status_json
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    SECRET,
    EventNotice,
    Object,
    ResourceKind,
    metav1_time,
    namespace_of,
)
from rackloom.core.domains.channel_mode import mixed_isolation_event, reconcile_clique
from rackloom.core.domains.membership import abandoned_nodes, needs_confirmation
from rackloom.core.domains.observe import (
    BY_DOMAIN,
    ConfirmedCluster,
    take_clique_snapshot,
    take_domain_snapshot,
    with_secrets,
)
from rackloom.core.domains.owned import is_withdrawn, may_have_certificates, needs_daemons
from rackloom.core.domains.reconcile import DomainDecision, reconcile_domain
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import DomainSnapshot

FAILURES_BEFORE_REPORT = 4
"""Failures in a row after which the status reports any error, and not only a final one."""
DELETION_POLL_SECONDS = 1.0
"""Seconds between two reads of Secrets that are being deleted, since no watch covers them."""
DOMAIN_WORKERS = 100
"""As many as the connections that a client opens. Workers mostly wait for the API server: the objects of 300
ComputeDomains that come at once take a tenth of a second."""


class DomainController:
    """`wall` gives seconds since the epoch. `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        settings: ControllerSettings,
        recorder: EventRecorder,
        wall: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.caches = DomainCaches(api, settings, rng)
        self._api = api
        self._settings = settings
        self._recorder = recorder
        self._wall = wall
        self._credentials = DaemonCertificates(api, wall)
        self._runtime: ControllerRuntime[DomainWorkKey] = ControllerRuntime(
            "compute domains", api, self.caches, rng, self._reconcile
        )
        self._router = ChangeRouter(self.caches)
        self._sweeper = OrphanSweeper(api, self.caches)
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and keep it as it should be, until cancelled."""
        self._runtime.queue.add(SweepKey())
        await self._runtime.run(DOMAIN_WORKERS)

    def _changed(self, kind: ResourceKind, obj: Object) -> None:
        if kind == COMPUTE_DOMAIN:
            self._sweeper.domain_changed(obj)
        for key in sorted(self._router.keys(kind, obj), key=repr):
            self._runtime.queue.add(key)

    async def _reconcile(self, key: DomainWorkKey) -> float | None:
        match key:
            case DomainKey(uid=uid):
                return await self._domain(key, uid)
            case CliqueKey(clique_id=clique_id):
                return await self._clique(key, clique_id)
            case SweepKey():
                for uid in await self._sweeper.gone_uids():
                    self._runtime.queue.add(DomainKey(uid))
                return SWEEP_INTERVAL_SECONDS

    async def _domain(self, key: DomainKey, uid: str) -> float | None:
        snapshot = await self._snapshot(uid)
        decision = reconcile_domain(snapshot)
        if snapshot.domain is None:
            return await self._orphans(key, uid, decision)
        try:
            await self._issue(snapshot, snapshot.domain)
            await self._runtime.execute(key, decision.actions)
        except KubeError as error:
            if isinstance(error, Rejected) or self._runtime.queue.failures(key) >= FAILURES_BEFORE_REPORT:
                failed = msgspec.structs.replace(snapshot, failures=(error.message,))
                await self._publish(key, reconcile_domain(failed))
            raise
        await self._record_events(key, decision.done)
        deletes_secrets = any(action.kind == SECRET for action in decision.actions)
        deletes_secrets = deletes_secrets or any(secret.deleting for secret in snapshot.held_of(SECRET))
        delays = (
            await self._publish(key, decision),
            decision.recheck_after,
            DELETION_POLL_SECONDS if deletes_secrets else CHECK_INTERVAL_SECONDS,
        )
        return min(delay for delay in delays if delay is not None)

    async def _issue(self, snapshot: DomainSnapshot, domain: ComputeDomain) -> None:
        settings = self._settings
        wanted = settings.daemon.authentication and needs_daemons(domain, settings)
        # The finalizer must exist first: without it, a ComputeDomain may vanish and leave its Secrets behind.
        may_have = names.FINALIZER in domain.finalizers and not domain.deleting
        if wanted and may_have and may_have_certificates(snapshot):
            await self._credentials.ensure(domain.uid, snapshot.home)

    async def _snapshot(self, uid: str) -> DomainSnapshot:
        snapshot = take_domain_snapshot(self.caches, uid, self._settings, self._now())
        if needs_confirmation(snapshot) or is_withdrawn(snapshot):
            snapshot = take_domain_snapshot(await self._confirmed(snapshot), uid, self._settings, self._now())
        # A UID without a ComputeDomain may be any text that a user wrote into a label or a claim.
        orphaned = bool(snapshot.held_of(DAEMON_SET)) or self._sweeper.may_have_secrets(uid)
        if orphaned if snapshot.domain is None else snapshot.domain.deleting:
            snapshot = with_secrets(snapshot, await self._credentials.held(uid, self._settings.namespaces))
        return snapshot

    async def _confirmed(self, snapshot: DomainSnapshot) -> ConfirmedCluster:
        """The caches, with fresh reads of everything that makes entries stale and nodes abandoned.

        Nodes are read before claims: a pod can come to a node that was lost only after the node has changed.
        """
        labels = f"{names.COMPUTE_DOMAIN_LABEL}={snapshot.uid}"
        nodes = {name: await self._node(name) for name in sorted(abandoned_nodes(snapshot))}
        lists: dict[ResourceKind, list[Object]] = {POD: []}
        for namespace in self._settings.namespaces:
            lists[POD] += (await self._api.list(POD, namespace, labels=labels)).items
        if snapshot.domain is not None and (nodes or is_withdrawn(snapshot)):
            space = snapshot.domain.namespace
            elsewhere = self.caches.by(RESOURCE_CLAIM, BY_DOMAIN, snapshot.uid)
            lists[RESOURCE_CLAIM] = [obj for obj in elsewhere if namespace_of(obj) != space]
            lists[RESOURCE_CLAIM] += (await self._api.list(RESOURCE_CLAIM, space)).items
        return ConfirmedCluster(self.caches, lists, nodes)

    async def _node(self, name: str) -> Object | None:
        try:
            return await self._api.get(NODE, name)
        except NotFound:
            return None

    async def _orphans(self, key: DomainKey, uid: str, decision: DomainDecision) -> float | None:
        if not decision.actions:
            self._runtime.forget(uid)
            return None
        if not self._sweeper.is_gone(uid):
            self._runtime.queue.add(SweepKey())
            return None
        await self._runtime.execute(key, decision.actions)
        return DELETION_POLL_SECONDS if any(action.kind == SECRET for action in decision.actions) else None

    def _now(self) -> str:
        return metav1_time(self._wall())

    async def _publish(self, key: DomainKey, decision: DomainDecision) -> float | None:
        """Write the status if it changed, at a limited rate. Returns the delay until it may be written."""
        obj = next(iter(self.caches.by(COMPUTE_DOMAIN, BY_DOMAIN, key.uid)), None)
        if decision.status is None or obj is None:
            return None
        early = await self._runtime.update_status(
            key, COMPUTE_DOMAIN, obj, compute_domain_status_json(decision.status)
        )
        if early is not None:
            return early
        await self._record_events(key, decision.notices)
        return None

    async def _record_events(self, key: DomainKey, notices: Iterable[EventNotice]) -> None:
        obj = next(iter(self.caches.by(COMPUTE_DOMAIN, BY_DOMAIN, key.uid)), None)
        for notice in notices:
            if obj is not None:
                await self._recorder.record(obj, notice)

    async def _clique(self, key: CliqueKey, clique_id: str) -> float | None:
        snapshot = take_clique_snapshot(self.caches, clique_id, self._settings, self._now())
        await self._runtime.execute(key, reconcile_clique(snapshot, self._settings))
        notice = mixed_isolation_event(snapshot)
        node = self.caches.at(NODE, None, snapshot.nodes[0].name) if snapshot.nodes else None
        if notice is not None and node is not None:
            await self._recorder.record(node, notice)
        return None
