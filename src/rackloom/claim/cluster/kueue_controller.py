"""The admission checks of Kueue: which workloads have room as a whole (`core.kueue.checks`).

An AdmissionCheck with the controller `rackloom.dev/placement` gets the condition Active. Workloads that have
quota and wait for it are decided in one pass at a time, the most urgent first: there is one key for all of
them, so no two passes see the same room. A pass takes the cluster from the watches of the gang controller, so
the two share one view, plans that were just written included. While a cache may be stale, nothing is decided.

A verdict is written by server-side apply with the UID and the resourceVersion that it was made from, and
owns the entry of its check alone. A workload that has changed since is decided again by the next pass, which
the change wakes. Before a plan is written, its trays are read from the API server. If they have changed, the
workload is decided again. Before a workload is refused for good, nodes and devices are listed. A pass ends at
the first error of the API server. The other workloads stay Pending and are tried again.

Room that appears wakes nothing: a workload that was told to wait has no quota until Kueue tries it again.

A cluster that does not serve Kueue's types has nothing to follow: the informers try again now and then, and
nothing else is read.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence

import msgspec
import structlog

from rackloom.claim.cluster.controller_runtime import DEFECT_RETRY_SECONDS, ControllerRuntime
from rackloom.claim.cluster.gang_placer import GangCaches, get_or_none, read_trays
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound
from rackloom.claim.kube.informer import CacheSet, Informer, is_not_served
from rackloom.core.allocate.objects import readable
from rackloom.core.cluster.kueue_objects import (
    PENDING,
    REJECTED,
    KueueWorkload,
    controller_of_check,
    read_workload,
)
from rackloom.core.cluster.nodes import NodeObject
from rackloom.core.cluster.objects import (
    ADMISSION_CHECK,
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_FLAVOR,
    RESOURCE_SLICE,
    WORKLOAD,
    Object,
    ResourceKind,
    identity_of,
    metav1_time,
    name_of,
    namespace_of,
    pod_claim_names,
    uid_of,
)
from rackloom.core.cluster.pods import PodObject, is_bound_pod
from rackloom.core.cluster.projection import content_hash
from rackloom.core.gangs.snapshot import ClusterLists, GangSettings
from rackloom.core.kueue.checks import PlacementPass
from rackloom.core.kueue.plans import (
    CONTROLLER_NAME,
    Verdict,
    active_condition,
    check_state_json,
    recorded_plans,
)
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

FIELD_MANAGER = "rackloom-kueue"
"""The manager of the fields that are applied."""
_MOST_ATTEMPTS = 3
"""Decisions about one workload in a pass, if the trays of its plans turn out to have changed."""


class CheckKey(msgspec.Struct, frozen=True, order=True):
    """Key of the condition of an AdmissionCheck."""

    name: str


class PassKey(msgspec.Struct, frozen=True, order=True):
    """Key of the decision about all workloads that wait. There is one, so no two passes run at once."""


KueueWorkKey = CheckKey | PassKey


class KueueController:
    """`wall` gives seconds since the epoch. `rng` draws the jitter of retries."""

    def __init__(
        self,
        api: KubeApi,
        wall: Callable[[], float],
        rng: random.Random,
        settings: GangSettings,
        cluster: GangCaches,
    ) -> None:
        """`cluster` follows workloads and their plans. The caller runs its informers."""
        self.caches = CacheSet(
            {
                ADMISSION_CHECK: (Informer(api, ADMISSION_CHECK, excuses=is_not_served, rng=rng),),
                RESOURCE_FLAVOR: (Informer(api, RESOURCE_FLAVOR, excuses=is_not_served, rng=rng),),
                COMPUTE_DOMAIN: (Informer(api, COMPUTE_DOMAIN, rng=rng),),
            }
        )
        self._cluster = cluster
        self._api = api
        self._wall = wall
        self._settings = settings
        self._last: PlacementPass | None = None
        self._has_all_devices = False
        """Whether a list has shown no other nodes and devices than the caches had before this pass."""
        self._runtime: ControllerRuntime[KueueWorkKey] = ControllerRuntime(
            "kueue", api, self.caches, rng, self._reconcile
        )
        self.caches.on_change(self._changed)
        cluster.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and decide about workloads, until cancelled."""
        await self._cluster.synced()
        await self._runtime.run(workers=2)

    def _changed(self, kind: ResourceKind, obj: Object) -> None:
        if kind == ADMISSION_CHECK:
            self._runtime.queue.add(CheckKey(name_of(obj)))
            self._runtime.queue.add(PassKey())
        elif kind == WORKLOAD and any(_waiting([read_workload(obj)], self._checks())):
            self._runtime.queue.add(PassKey())

    def _checks(self) -> list[str]:
        """The names of the checks that are ours."""
        return [
            name_of(check)
            for check in self.caches.all(ADMISSION_CHECK)
            if controller_of_check(check) == CONTROLLER_NAME
        ]

    async def _reconcile(self, key: KueueWorkKey) -> float | None:
        match key:
            case CheckKey(name=name):
                await self._activate(key, name)
            case PassKey():
                await self._run_pass()
        return None

    async def _activate(self, key: CheckKey, name: str) -> None:
        check = self.caches.at(ADMISSION_CHECK, None, name)
        if check is None or name not in self._checks():
            return
        condition = active_condition(check, metav1_time(self._wall()))
        if condition is not None:
            meta = identity_of(check, "name", "uid")
            written = await self._apply(ADMISSION_CHECK, meta, {"conditions": [condition]})
            self._runtime.expect(key, ADMISSION_CHECK, written)

    async def _run_pass(self) -> None:
        checks = self._checks()
        waiting = sorted(_waiting(self._cluster.workloads(), checks), key=lambda pair: pair[0].order)
        if not waiting:
            return
        if self.caches.unknown_since() is not None or self._cluster.unknown_since() is not None:
            raise Retry("the cluster cannot be followed", after=self._settings.settle)
        self._has_all_devices = False
        placement = await self._placement(checks)
        for workload, check in waiting:
            try:
                for _ in range(_MOST_ATTEMPTS):
                    # A search may take seconds, and the event loop has a lease to renew.
                    verdict = await asyncio.to_thread(placement.decide, workload, check)
                    if await self._is_current(placement, verdict):
                        await self._write(workload, check, verdict)
                        break
                    placement = await self._placement(checks)
                else:
                    self._runtime.queue.add_after(PassKey(), self._settings.settle)
            except KubeError:
                raise
            except Exception:
                # A defect that one workload triggers must not keep the others waiting.
                log.exception("kueue.defect", workload=workload.full_name)
                self._runtime.queue.add_after(PassKey(), DEFECT_RETRY_SECONDS)

    async def _placement(self, checks: Sequence[str]) -> PlacementPass:
        """The cluster as the watches and the newest reads show it."""
        lists, workloads = await self._cluster.lists(), self._cluster.workloads()
        domains, flavors = tuple(self.caches.all(COMPUTE_DOMAIN)), tuple(self.caches.all(RESOURCE_FLAVOR))
        self._last = await asyncio.to_thread(
            PlacementPass, lists, domains, flavors, workloads, checks, self._settings, self._last
        )
        return self._last

    async def _is_current(self, placement: PlacementPass, verdict: Verdict) -> bool:
        """Whether the API server shows the facts of a verdict. News count from now on. Raises KubeError."""
        plans = [planned for _, planned in recorded_plans(verdict.pod_set_updates)]
        trays = dict.fromkeys(tray for planned in plans for tray in (*planned.trays, *planned.spares))
        if trays:
            return not await self._have_changed(placement.lists, trays.keys())
        if verdict.state != REJECTED or self._has_all_devices:
            return True
        # The next proof rests on caches that are no older than these lists.
        for kind in (NODE, RESOURCE_SLICE, DEVICE_CLASS, RESOURCE_CLAIM_TEMPLATE):
            listed = (await self._api.list(kind)).items
            if set(map(content_hash, listed)) != set(map(content_hash, self._cluster.all(kind))):
                return False
        self._has_all_devices = True
        return False

    async def _have_changed(self, lists: ClusterLists, trays: KeysView[str]) -> bool:
        """Whether nodes of a plan are others by now, or have pods or plans that it did not see."""
        known, news = {node.name: node for node in lists.state.nodes if node.name in trays}, False
        for tray, (node, pods) in zip(trays, await read_trays(self._api, trays, with_pods=True), strict=True):
            cached = self._cluster.at(NODE, None, tray)
            if next(readable(filter(None, [node]), NodeObject), None) != known.get(tray):
                news = True
                if node is not None:
                    self._cluster.feed.take(NODE, node)
                elif cached is not None:
                    self._cluster.feed.drop(NODE, uid_of(cached))
            for pod in pods:
                is_bound = any(map(is_bound_pod, readable([pod], PodObject)))
                if is_bound and uid_of(pod) not in lists.state.bound.get(tray, {}):
                    news = True
                    self._cluster.feed.take(POD, pod)
                    for name in pod_claim_names(pod):
                        claim = await get_or_none(self._api, RESOURCE_CLAIM, name, namespace_of(pod))
                        if claim is not None:
                            self._cluster.feed.take(RESOURCE_CLAIM, claim)
        # A gang may have been planned since.
        seen = set(map(id, lists.records))
        return news or any(
            id(record) not in seen and not trays.isdisjoint(record.reserved)
            for record in self._cluster.records()
        )

    async def _write(self, workload: KueueWorkload, check: str, verdict: Verdict) -> None:
        meta = identity_of(workload.obj, "name", "namespace", "uid", "resourceVersion")
        entry = check_state_json(check, verdict, metav1_time(self._wall()))
        try:
            written = await self._apply(WORKLOAD, meta, {"admissionChecks": [entry]})
        except (Conflict, NotFound):
            # It has changed since the watch showed it: the change wakes the next pass.
            log.info("kueue.workload_changed", workload=workload.full_name)
            return
        # The next pass must not take its trays.
        self._cluster.note_written(WORKLOAD, written)
        log.info(
            "kueue.decided",
            workload=workload.full_name,
            check=check,
            state=verdict.state,
            why=verdict.message,
        )

    async def _apply(self, kind: ResourceKind, meta: Mapping[str, str], status: Object) -> Object:
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "status": status}
        # Kueue has made the entry. By force its fields become ours until Kueue resets them.
        return await self._api.apply(kind, obj, manager=FIELD_MANAGER, force=True, subresource="status")


def _waiting(
    workloads: Iterable[KueueWorkload], checks: Sequence[str]
) -> Iterator[tuple[KueueWorkload, str]]:
    """Each workload that has quota and waits for one of the checks, with the check."""
    for workload in workloads:
        for check in checks:
            state = workload.checks.get(check)
            if state is not None and state.state == PENDING and workload.has_quota:
                yield workload, check
