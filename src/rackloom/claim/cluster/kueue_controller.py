"""The admission checks of Kueue: which workloads have room as a whole (`core.kueue.checks`).

An AdmissionCheck with the controller `rackloom.dev/placement` gets the condition Active. Workloads that have
quota and wait for it are decided in one pass at a time, the most urgent first: there is one key for all of
them, so no two passes see the same room. Each pass lists the cluster, so no verdict rests on a cache. The
workloads themselves show the room of earlier verdicts, so nothing is kept in memory.

A verdict is written by server-side apply with the UID and the resourceVersion that it was made from, and
owns the entry of its check alone. A workload that has changed since is decided again. A pass ends at the
first error of the API server. The other workloads stay Pending and are tried again.

A cluster that does not serve Kueue's types has nothing to follow: the informers try again now and then, and
nothing else is read.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import structlog

from rackloom.claim.cluster.controller_runtime import DEFECT_RETRY_SECONDS, ControllerRuntime
from rackloom.claim.kube.api import Conflict, KubeApi, NotFound, list_taint_rules
from rackloom.claim.kube.informer import CacheSet, Informer, is_not_served
from rackloom.core.cluster.kueue_objects import PENDING, KueueWorkload, controller_of_check, read_workload
from rackloom.core.cluster.objects import (
    ADMISSION_CHECK,
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    GANG_PLAN,
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
)
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.snapshot import GangSettings
from rackloom.core.kueue.checks import KueueCluster, PlacementPass
from rackloom.core.kueue.plans import CONTROLLER_NAME, Verdict, active_condition, check_state_json

log = structlog.get_logger(__name__)

FIELD_MANAGER = "rackloom-kueue"
"""The manager of the fields that are applied."""
_LISTED_KINDS = {
    "nodes": NODE,
    "claims": RESOURCE_CLAIM,
    "slices": RESOURCE_SLICE,
    "classes": DEVICE_CLASS,
    "templates": RESOURCE_CLAIM_TEMPLATE,
    "domains": COMPUTE_DOMAIN,
    "gang_plans": GANG_PLAN,
    "flavors": RESOURCE_FLAVOR,
}


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
        quota: QuotaMode = QuotaMode.NONE,
    ) -> None:
        self.caches = CacheSet(
            {
                kind: (Informer(api, kind, excuses=is_not_served, rng=rng),)
                for kind in (ADMISSION_CHECK, WORKLOAD)
            }
        )
        self._api = api
        self._wall = wall
        self._settings = settings
        self._quota = quota
        self._runtime: ControllerRuntime[KueueWorkKey] = ControllerRuntime(
            "kueue", api, self.caches, rng, self._reconcile
        )
        self.caches.on_change(self._changed)

    async def run(self) -> None:
        """Follow the cluster and decide about workloads, until cancelled."""
        await self._runtime.run(workers=2)

    def _changed(self, kind: ResourceKind, obj: Object) -> None:
        if kind == ADMISSION_CHECK:
            self._runtime.queue.add(CheckKey(name_of(obj)))
            self._runtime.queue.add(PassKey())
        elif any(_waiting([read_workload(obj)], self._checks())):
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
        cached = map(read_workload, self.caches.all(WORKLOAD))
        if next(_waiting(cached, checks), None) is None:
            return
        # Pods come first: one that is bound in the meantime is counted as held, never as room.
        lists = {"pods": (await self._api.list(POD)).items}
        lists |= {name: (await self._api.list(kind)).items for name, kind in _LISTED_KINDS.items()}
        lists["taint_rules"] = await list_taint_rules(self._api.list)
        workloads = [read_workload(obj) for obj in (await self._api.list(WORKLOAD)).items]
        placement = await asyncio.to_thread(
            PlacementPass, KueueCluster(**lists), workloads, checks, self._settings, self._quota
        )
        for workload, check in sorted(_waiting(workloads, checks), key=lambda pair: pair[0].order):
            try:
                # A search may take seconds, and the event loop has a lease to renew.
                verdict = await asyncio.to_thread(placement.decide, workload, check)
            except Exception:
                # A defect that one workload triggers must not keep the others waiting.
                log.exception("kueue.defect", workload=workload.full_name)
                self._runtime.queue.add_after(PassKey(), DEFECT_RETRY_SECONDS)
                continue
            await self._write(workload, check, verdict)

    async def _write(self, workload: KueueWorkload, check: str, verdict: Verdict) -> None:
        meta = identity_of(workload.obj, "name", "namespace", "uid", "resourceVersion")
        entry = check_state_json(check, verdict, metav1_time(self._wall()))
        try:
            await self._apply(WORKLOAD, meta, {"admissionChecks": [entry]})
        except (Conflict, NotFound):
            # It has changed since it was listed: the change wakes the next pass.
            log.info("kueue.workload_changed", workload=workload.full_name)
            self._runtime.queue.add_after(PassKey(), self._settings.settle)
            return
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
