"""kubelet's prepare and unprepare requests: several claims at once, an answer for each in time.

`Requests` gives every claim a task. An IMEX channel waits here for a daemon whose own claim may arrive at
this same plugin later, so nothing that another claim needs is held between two attempts: the lock of
a claim lasts for one attempt, and there is no other lock. Answers are ready after 44 s at the latest,
since kubelet stops waiting after 45 s and then ignores the reason. An attempt that then cannot stop at
once (a thread that talks to a driver or a DHCP server) ends in the background and keeps its lock until then,
so neither the next attempt nor an unprepare overlaps it.

`persist` repeats one attempt until it succeeds, is refused, or the deadline of the caller comes. Pauses
double from 0.25 s to 3 s (exponential backoff) and are at least as long as `Retry` requires. A change that
the driver reports ends a pause early.

A prepare that failed, or that kubelet gave up, is repeated in the background (`BackgroundRetries`) for up to
900 s, until kubelet's next call for the claim or its unprepare. A refused claim is repeated too, since a node
label, a role or a kernel module may be put right. That happens seldom, because each attempt calls the API
server and a tenant can create many claims that will never be prepared. At most 512 claims, of which at most
128 refused, are retried at once, and refused claims share a rate of four attempts a second.

Without this, kubelet would call again late. It calls NodePrepareResources when it syncs a pod without a
sandbox. If that fails, SyncPod records the event FailedPrepareDynamicResources and returns no error, so the
pod is tried again not after 10 s but at its next resync, after 60 to 90 s (k8s.io/kubernetes v1.34 to v1.37,
kuberuntime_manager.go and pod_workers.go, completeWork). A change of the pod's annotations syncs it at once
(config.go, podsDifferSemantically). So `PodSync` writes the time into one annotation of the pods that can be
helped now. It does so in four cases:

- A claim is prepared after kubelet gave up its call.
- kubelet has registered the plugin: earlier pods failed because the driver was not registered.
- The API server answers again: kubelet could not read the pods' claims during the outage.
- This process was stopped (SIGSTOP, a frozen cgroup) for 45 s or more: calls timed out without arriving
  here.

Nothing depends on the annotation. If it cannot be written, pods wait for kubelet's resync.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.node.plugin import CheckpointEntry, NodePlugin, PrepareState, ReadyDevice
from rackloom.claim.node.prepare import ClaimPreparer, ObsoleteClaim, PluginMetrics, api_failure, fetch_claim
from rackloom.claim.node.tasks import beside, cancel_all, pause_until
from rackloom.core.cluster.claims import ClaimRef, allocated_devices
from rackloom.core.cluster.objects import (
    POD,
    RESOURCE_CLAIM,
    Object,
    full_name,
    has_condition,
    has_pod_ended,
    is_being_deleted,
    metav1_micro_time,
    name_of,
    namespace_of,
    pod_claim_names,
    uid_of,
)
from rackloom.errors import Refused, Retry

# Retrying up to a deadline, and after it.


T = TypeVar("T")
RetryWork = Callable[[ClaimRef], Awaitable[None]]
log = structlog.get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.25, 3.0
"""Seconds between attempts: doubling from the first to the last."""
REFUSED_PAUSE = 6.0
"""Seconds between attempts at a claim that is refused."""
REFUSED_GAP = 0.25
"""Seconds between attempts at refused claims altogether: each of more than 24 is tried less often."""
MOST_REFUSED = 128
"""Refused claims that are retried at once, so that they leave room for others."""
NO_ATTEMPT_ENDED = "the first attempt did not end in time"
UNASKED_SECONDS = 900.0
"""How long a claim is retried without a call of kubelet: while a pod waits, it calls every 90 s."""
MOST_CLAIMS = 512
"""Claims that are retried at once. A node takes 110 pods by default. Further claims wait for kubelet."""


async def persist(
    attempt: Callable[[], Awaitable[T]], *, deadline: float, changes: AsyncIterator[None] | None = None
) -> T:
    """Call `attempt` until it returns. At `deadline` (loop time) raise the last `Retry` that it raised.

    Any other error is raised at once. Each of `changes`, which are listened to from the first failure on,
    ends a pause early. Nothing is held while it pauses.
    """
    trouble: Retry | None = None
    pause = FIRST_PAUSE
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit, AsyncExitStack() as stack:
            woken = asyncio.Event()
            while True:
                try:
                    return await attempt()
                except Retry as retry:
                    trouble = retry
                if changes is not None:
                    await stack.enter_async_context(beside(_listen(changes, woken)))
                    changes = None
                await pause_until(woken, max(pause, trouble.after))
                pause = min(2 * pause, LAST_PAUSE)
    except TimeoutError:
        if limit.expired():
            raise (trouble or Retry(NO_ATTEMPT_ENDED, after=0.0)) from None
        raise


async def _listen(changes: AsyncIterator[None], woken: asyncio.Event) -> None:
    try:
        async for _ in changes:
            woken.set()
    except (KubeError, Retry) as trouble:
        # The pauses end without it too.
        log.info("node.watch-ended", reason=str(trouble))


class BackgroundRetries:
    """Prepares claims for which no call of kubelet waits, each in a task.

    `work` is one round for a claim, which ends when nothing is left to do for it. It raises `Retry` if the
    next round may succeed after its pauses, `Refused` if something has to change first, and
    `ObsoleteClaim` if no round can succeed.
    """

    def __init__(self, work: RetryWork) -> None:
        self._work = work
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()

    def begin(self, ref: ClaimRef, *, refused: bool = False) -> None:
        """Retry a claim until that succeeds, the claim is obsolete, or `stop`."""
        self.stop(ref.uid)
        self._refused.discard(ref.uid)
        if len(self._tasks) >= MOST_CLAIMS or (refused and len(self._refused) >= MOST_REFUSED):
            about = {**_claim_fields(ref), "retried": len(self._tasks), "refused": len(self._refused)}
            log.warning("node.claim-not-retried", **about, reason="as many as may be are being retried")
            return
        if refused:
            self._refused.add(ref.uid)
        task = self._tasks[ref.uid] = asyncio.create_task(self._retry(ref))
        task.add_done_callback(partial(self._forget, ref.uid))

    def stop(self, uid: str) -> bool:
        """Stop retrying a claim. Returns whether it was being retried."""
        task = self._tasks.get(uid)
        return task is not None and task.cancel()

    async def close(self) -> None:
        """Stop all, and wait until they have ended."""
        await cancel_all([*self._tasks.values()])

    def _forget(self, uid: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(uid) is task:
            del self._tasks[uid]
            self._refused.discard(uid)

    async def _retry(self, ref: ClaimRef) -> None:
        loop = asyncio.get_running_loop()
        deadline, reported = loop.time() + UNASKED_SECONDS, ""
        if ref.uid in self._refused:
            await self._pause_refused()
        while loop.time() < deadline:
            try:
                await self._work(ref)
            except Retry:
                self._refused.discard(ref.uid)
                await asyncio.sleep(FIRST_PAUSE)
            except ObsoleteClaim as obsolete:
                log.info("node.claim-not-retried", **_claim_fields(ref), reason=str(obsolete))
                return
            except Refused:
                self._refused.add(ref.uid)
                await self._pause_refused()
            except Exception as error:
                # A full disk, for example: it may pass as well, and each kind is worth one report.
                if repr(error) != reported:
                    log.exception("node.claim-broke", operation="retry", **_claim_fields(ref))
                reported = repr(error)
                await asyncio.sleep(LAST_PAUSE)
            else:
                return

    async def _pause_refused(self) -> None:
        await asyncio.sleep(max(REFUSED_PAUSE, len(self._refused) * REFUSED_GAP))


def _claim_fields(ref: ClaimRef) -> dict[str, str]:
    return {"claim": str(ref), "uid": ref.uid}


# Making kubelet sync pods.


RETRY_ANNOTATION = "rackloom.dev/prepare-retry"
"""`<time> <driver>`: no two are equal, since a write that changes nothing is no event on kubelet's watch."""
CLOCK_CHECK_SECONDS = 10.0
"""Between two checks of the clock."""
STOPPED_SECONDS = 45.0
"""kubelet's timeout of a call. If a pause of `CLOCK_CHECK_SECONDS` takes this long, the process was
stopped."""
API_PAUSE_SECONDS = 2.0
"""Between attempts to reach an API server that does not answer and names no time."""


@dataclass(eq=False)
class PodSync:
    """The pods of one node, for the plugin of `driver`. `claims` returns the checkpoint's current entries."""

    api: KubeApi
    node: str
    driver: str
    claims: Callable[[], Mapping[str, CheckpointEntry]]
    wall: Callable[[], float]
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def wake(self) -> None:
        """Make `run` sync pods that kubelet may have failed before it could call the plugin."""
        self._wake.set()

    async def run(self) -> None:
        """Sync the node's waiting pods after each wake and each long stop of this process. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            is_due = await pause_until(self._wake, CLOCK_CHECK_SECONDS)
            paused = loop.time() - began
            if paused >= STOPPED_SECONDS:
                log.warning("node.was-stopped", driver=self.driver, seconds=round(paused))
            if is_due or paused >= STOPPED_SECONDS:
                await self.sync(None)

    async def sync(self, claim: ClaimRef | None) -> None:
        """Sync the pods of this node that use a claim, or those that wait for any claim of this driver.

        It repeats this until it succeeds, or the API server does not allow it.
        """
        namespace = None if claim is None else claim.namespace
        while True:
            try:
                listed = await self.api.list(POD, namespace, fields=f"spec.nodeName={self.node}")
                for pod in listed.items:
                    if has_pod_ended(pod) or is_being_deleted(pod):
                        continue
                    uses = claim is not None and claim.name in pod_claim_names(pod)
                    if uses or (claim is None and await self._is_waiting(pod)):
                        await self._annotate(pod)
            except Rejected as error:
                log.warning("node.pods-not-synced", driver=self.driver, reason=error.message)
                return
            except KubeError as error:
                await asyncio.sleep(error.retry_after or API_PAUSE_SECONDS)
            else:
                return

    async def _is_waiting(self, pod: Object) -> bool:
        """Whether a pod has a claim with devices of this driver, and has not started, as far as can be seen.

        After a reboot kubelet may not have reported yet that the sandbox is gone. The checkpoint shows it
        already.
        """
        namespace, names = namespace_of(pod) or "", tuple(pod_claim_names(pod))
        states = {(claim.ref.namespace, claim.ref.name): claim.state for claim in self.claims().values()}
        ours = [states[namespace, name] for name in names if (namespace, name) in states]
        if any(state is not PrepareState.COMPLETED for state in ours):
            return True
        # kubelet makes the sandbox once all claims are prepared (KEP-3085).
        if has_condition(pod, "PodReadyToStartContainers"):
            return False
        return bool(ours) or any([await self._is_ours(namespace, name) for name in names])

    async def _is_ours(self, namespace: str, name: str) -> bool:
        try:
            claim = await self.api.get(RESOURCE_CLAIM, name, namespace)
        except NotFound:
            return False
        return any(device.driver == self.driver for device in allocated_devices(claim))

    async def _annotate(self, pod: Object) -> None:
        """Change the annotation. The API server refuses the UID in the patch for another pod of the name."""
        text = f"{metav1_micro_time(self.wall())} {self.driver}"
        patch = {"metadata": {"uid": uid_of(pod), "annotations": {RETRY_ANNOTATION: text}}}
        about = {"driver": self.driver, "pod": full_name(pod)}
        try:
            await self.api.patch(POD, name_of(pod), namespace_of(pod), patch)
        except (NotFound, Conflict):
            return
        except Rejected as error:
            log.warning("node.pod-not-synced", **about, reason=error.message)
        else:
            log.info("node.pod-synced", **about)


# Answering the requests.


ANSWER_SECONDS = 44.0
"""Seconds. kubelet stops waiting after 45 and then ignores the reason."""


class ClaimAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one claim: its devices, or the error."""

    devices: tuple[ReadyDevice, ...] = ()
    error: str = ""


@dataclass(eq=False)
class Requests:
    """Answers kubelet for one plugin."""

    plugin: NodePlugin
    api: KubeApi
    preparer: ClaimPreparer
    metrics: PluginMetrics
    pods: PodSync
    _retries: BackgroundRetries = field(init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)
    _attempts: set["asyncio.Task[Any]"] = field(default_factory=set, init=False)
    """The running attempts, including those that no caller waits for."""
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._retries = BackgroundRetries(self._prepare_in_background)

    async def prepare(
        self, refs: Sequence[ClaimRef], patience: float = ANSWER_SECONDS
    ) -> dict[str, ClaimAnswer]:
        """Prepare claims. Returns an answer for every UID, within `patience` seconds."""
        return await self._all("prepare", refs, self._prepare, patience)

    async def unprepare(
        self, refs: Sequence[ClaimRef], patience: float = ANSWER_SECONDS
    ) -> dict[str, ClaimAnswer]:
        """Unprepare claims. Returns an answer for every UID, within `patience` seconds."""
        return await self._all("unprepare", refs, self._unprepare, patience)

    async def close(self) -> None:
        """Stop the background retries, and wait until all attempts have ended. Calls have no attempt then."""
        self._closed = True
        await self._retries.close()
        await cancel_all([*self._attempts])

    async def _all(
        self,
        operation: str,
        refs: Sequence[ClaimRef],
        work: Callable[[ClaimRef, float], Awaitable[ClaimAnswer]],
        patience: float,
    ) -> dict[str, ClaimAnswer]:
        if not refs:
            return {}
        deadline = asyncio.get_running_loop().time() + patience
        with self.metrics.request(operation):
            work_on = (self._answer(operation, ref, partial(work, ref, deadline)) for ref in refs)
            answers = await asyncio.gather(*work_on)
        if not any(answer.error for answer in answers):
            self.metrics.succeeded(operation)
        return {ref.uid: answer for ref, answer in zip(refs, answers, strict=True)}

    async def _answer(
        self, operation: str, ref: ClaimRef, work: Callable[[], Awaitable[ClaimAnswer]]
    ) -> ClaimAnswer:
        about = {"operation": operation, **_claim_fields(ref)}
        try:
            answer = await work()
        except (Retry, Refused) as trouble:
            permanent = isinstance(trouble, Refused)
            log.warning("node.claim-failed", **about, permanent=permanent, reason=str(trouble))
            self.metrics.failed(operation)
            return ClaimAnswer(error=f"Permanent error: {trouble}" if permanent else str(trouble))
        except Exception as error:
            log.exception("node.claim-broke", **about)
            self.metrics.failed(operation)
            return ClaimAnswer(error=f"internal error ({type(error).__name__}): see the log of the plugin")
        log.info("node.claim-done", **about)
        return answer

    async def _prepare(self, ref: ClaimRef, deadline: float) -> ClaimAnswer:
        was_missed = self._retries.stop(ref.uid)
        try:
            devices = await self._devices(ref, deadline)
        except ObsoleteClaim:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not self._closed:
                self._retries.begin(ref, refused=isinstance(error, Refused))
            raise
        if was_missed:
            # The call that got no answer may have been for another pod with the same claim: sync its pods
            # too.
            self._retries.begin(ref)
        return ClaimAnswer(devices=devices)

    async def _prepare_in_background(self, ref: ClaimRef) -> None:
        """Prepare as for a call of kubelet, with the claim read again. Then make kubelet call."""
        await self._devices(ref, asyncio.get_running_loop().time() + ANSWER_SECONDS)
        await self.pods.sync(ref)

    async def _devices(self, ref: ClaimRef, deadline: float) -> tuple[ReadyDevice, ...]:
        devices = self.preparer.ready(ref.uid)
        if devices is not None:
            return devices
        claim = await persist(lambda: fetch_claim(self.api, ref, self.plugin.driver), deadline=deadline)

        async def attempt() -> tuple[ReadyDevice, ...]:
            # kubelet may have called again since, and that call may have succeeded.
            ready = self.preparer.ready(ref.uid)
            return await _api_failures_named(self.preparer.prepare(claim)) if ready is None else ready

        changes = self.plugin.changes(claim)
        return await persist(lambda: self._locked(ref, attempt), deadline=deadline, changes=changes)

    async def _unprepare(self, ref: ClaimRef, deadline: float) -> ClaimAnswer:
        # Before the first attempt: a background prepare must not follow the unprepare.
        self._retries.stop(ref.uid)

        async def attempt() -> ClaimAnswer:
            await _api_failures_named(self.preparer.unprepare(ref.uid))
            return ClaimAnswer()

        return await persist(lambda: self._locked(ref, attempt), deadline=deadline)

    async def _locked(self, ref: ClaimRef, attempt: Callable[[], Awaitable[T]]) -> T:
        """One attempt with the lock of its claim: kubelet repeats a call that it gave up.

        A cancelled caller does not wait until the attempt has ended, but the lock does.
        """
        if self._closed:
            raise Retry("the plugin is ending", after=0.0)
        lock = self._locks.setdefault(ref.uid, asyncio.Lock())

        async def locked() -> T:
            async with lock:
                return await attempt()

        task = asyncio.create_task(locked())
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise


async def _api_failures_named(work: Awaitable[T]) -> T:
    try:
        return await work
    except KubeError as error:
        raise api_failure("the API server did not answer as needed", error) from error
