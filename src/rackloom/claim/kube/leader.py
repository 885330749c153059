"""Leader election on a Lease (coordination.k8s.io/v1): at most one of several processes leads.

A lease is free when it has not changed for its duration as observed locally, never by comparing the
times that the holder wrote: clocks may differ (client-go's rule). A leader that cannot renew stops
`lease - renew` seconds before anyone else may start. A lease counts from the time of its request, because
the answer may take a while.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.core.cluster.objects import LEASE, Object, metav1_micro_time
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

RELEASE_SECONDS = 2.0
"""Seconds for which a leader that stops tries to release the lease."""


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """Seconds. The defaults are those of kube-controller-manager.

    A lease unchanged for `lease` is free. A leader that has not renewed for `renew` stops. `retry` is the
    time between attempts.
    """

    lease: float = 15.0
    renew: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease > self.renew > self.retry > 0:
            terms = f"lease {self.lease} s, renew {self.renew} s, retry {self.retry} s"
            fix = "have lease > renew > retry > 0"
            raise Refused(f"election terms out of order: {terms}", nearest_fix=fix)


class LeaderElection:
    """One candidate for the lease `name`. `identity` is unique to this run of this process.

    `wall` gives seconds since 1970 and is only written, never compared. Intervals are the running loop's.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        wall: Callable[[], float],
        rng: random.Random,
        terms: LeaseTimings | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._wall = wall
        self._random = rng
        self._terms = terms or LeaseTimings()
        self._observed: tuple[str, float] = ("", 0.0)
        """The last version of the lease, and the loop time when it was first seen."""
        self._renewed_at: float | None = None
        self._leads = False

    @property
    def is_leader(self) -> bool:
        """Whether this process leads now."""
        return self._leads

    async def run(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `lead()` while elected. It is cancelled when the lease is lost, and run again when it is won.

        Returns when `lead` does. The lease is released then, and on cancellation.
        """
        try:
            while True:
                await self._win()
                if await self._hold(lead):
                    return
        finally:
            await self._release()

    async def _win(self) -> None:
        while True:
            try:
                if await self._try():
                    return
            except KubeError as error:
                log.info("the lease was not taken", lease=self._name, why=error.message)
            await asyncio.sleep(self._terms.retry * self._random.uniform(1.0, 1.2))

    async def _hold(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Lead until the lease is lost (False) or `lead` returns (True).

        The lease is renewed until `lead` has ended, so no other process leads before that.
        """
        log.info("leading", lease=self._name, identity=self._identity)
        self._leads = True
        work = asyncio.create_task(lead())
        keeping = asyncio.create_task(self._keep())
        try:
            await asyncio.wait({work, keeping}, return_when=asyncio.FIRST_COMPLETED)
            ended = work.done()
        finally:
            await _cancelled(work)
            self._leads = False
            await _cancelled(keeping)
        if ended:
            work.result()
        else:
            log.warning("the lease is lost", lease=self._name, identity=self._identity)
        return ended

    async def _keep(self) -> None:
        """Renew the lease. Returns once another process holds it, or it could not be renewed in time."""
        while True:
            assert self._renewed_at is not None  # noqa: S101 (only a leader keeps)
            with suppress(KubeError):
                try:
                    async with asyncio.timeout_at(self._renewed_at + self._terms.renew):
                        await asyncio.sleep(self._terms.retry)
                        if not await self._try():
                            return
                except TimeoutError:
                    return

    async def _try(self) -> bool:
        """Take or renew the lease. False while another process holds it, unknown after a KubeError."""
        started = asyncio.get_running_loop().time()
        try:
            lease = await self._api.get(LEASE, self._name, self._namespace)
        except NotFound:
            metadata = {"name": self._name, "namespace": self._namespace}
            await self._api.create(LEASE, {"metadata": metadata, "spec": self._claim({})})
        else:
            if not self._is_free(lease):
                self._renewed_at = None
                return False
            await self._api.replace(LEASE, {**lease, "spec": self._claim(lease.get("spec") or {})})
        # The term counts from the request, since the answer may take a while: we stop early, never late.
        self._renewed_at = started
        return True

    def _is_free(self, lease: Object) -> bool:
        now = asyncio.get_running_loop().time()
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        # Only an unchanged version on our own clock shows that the holder is gone. Its clock may differ.
        if self._observed[0] != version:
            self._observed = (version, now)
        holder = spec.get("holderIdentity")
        lasts = spec.get("leaseDurationSeconds") or self._terms.lease
        return not holder or holder == self._identity or now >= self._observed[1] + lasts

    def _claim(self, spec: Object) -> Object:
        now = metav1_micro_time(self._wall())
        mine = spec.get("holderIdentity") == self._identity
        changes = spec.get("leaseTransitions", 0) + (0 if mine or not spec else 1)
        return spec | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(round(self._terms.lease), 1),
            "acquireTime": spec["acquireTime"] if mine and "acquireTime" in spec else now,
            "renewTime": now,
            "leaseTransitions": changes,
        }

    async def _release(self) -> None:
        """Release the lease if we hold it. If that fails, it expires."""
        if self._renewed_at is None:
            return
        with suppress(KubeError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                lease = await self._api.get(LEASE, self._name, self._namespace)
                if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                    free = {"holderIdentity": "", "renewTime": metav1_micro_time(self._wall())}
                    await self._api.replace(LEASE, {**lease, "spec": lease["spec"] | free})


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait until it has ended, however it does."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None:
        log.debug("a stopped task failed", why=str(task.exception()))
