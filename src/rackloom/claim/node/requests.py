"""What kubelet asks for: several claims at once, answered one by one within its patience.

Every claim has a task of its own. A channel claim waits here for a daemon whose own claim arrives at this
same plugin meanwhile, so nothing that another claim needs is held between two attempts: the lock of a claim
lasts one attempt, and no other lock exists.

A prepare that kubelet went away without, because of an error or because it hung up, is repeated in the
background (`BackgroundRetries`). Once the claim is prepared, kubelet is made to ask again (`PodSync`), since
by itself it would not for up to 90 s. kubelet's next call for the claim and its unprepare end the repeating.
A refused claim is repeated too: a label of the node, a role or a kernel module may be put right meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.node.claims import Obsolete, api_trouble, fetch_claim
from rackloom.claim.node.meter import Meter
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.pod_sync import PodSync
from rackloom.claim.node.preparing import Preparing
from rackloom.claim.node.retrying import BackgroundRetries, persist
from rackloom.claim.node.values import ClaimRef, ReadyDevice
from rackloom.errors import Refused, Retry

T = TypeVar("T")
log = structlog.get_logger(__name__)

PATIENCE = 44.0
"""Seconds: kubelet hangs up after 45, and then nobody reads why."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What kubelet is told of one claim: its devices, or why not."""

    devices: tuple[ReadyDevice, ...] = ()
    error: str = ""


class Requests:
    """Answers kubelet for one plugin."""

    def __init__(
        self, plugin: Plugin, api: KubeApi, preparing: Preparing, meter: Meter, pods: PodSync
    ) -> None:
        self._plugin = plugin
        self._api = api
        self._preparing = preparing
        self._meter = meter
        self._pods = pods
        self._retries = BackgroundRetries(self._prepare_unasked)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, refs: Sequence[ClaimRef], patience: float = PATIENCE) -> dict[str, Answer]:
        """Prepare claims; an answer for every UID, within `patience` seconds."""
        deadline = asyncio.get_running_loop().time() + patience
        return await self._all("prepare", refs, lambda ref: self._prepare(ref, deadline))

    async def unprepare(self, refs: Sequence[ClaimRef], patience: float = PATIENCE) -> dict[str, Answer]:
        """Give claims back; an answer for every UID, within `patience` seconds."""
        deadline = asyncio.get_running_loop().time() + patience
        return await self._all("unprepare", refs, lambda ref: self._unprepare(ref, deadline))

    async def close(self) -> None:
        """Stop what goes on without kubelet. No call may be under way, nor come any more."""
        await self._retries.close()

    async def _all(
        self, operation: str, refs: Sequence[ClaimRef], work: Callable[[ClaimRef], Awaitable[Answer]]
    ) -> dict[str, Answer]:
        if not refs:
            return {}
        with self._meter.request(operation):
            answers = await asyncio.gather(*(self._answer(operation, ref, work) for ref in refs))
        if not any(answer.error for answer in answers):
            self._meter.succeeded(operation)
        return {ref.uid: answer for ref, answer in zip(refs, answers, strict=True)}

    async def _answer(
        self, operation: str, ref: ClaimRef, work: Callable[[ClaimRef], Awaitable[Answer]]
    ) -> Answer:
        about = {"operation": operation, "claim": f"{ref.namespace}/{ref.name}", "uid": ref.uid}
        try:
            answer = await work(ref)
        except (Retry, Refused) as trouble:
            permanent = isinstance(trouble, Refused)
            log.warning("node.claim-failed", **about, permanent=permanent, reason=str(trouble))
            self._meter.failed(operation)
            return Answer(error=f"Permanent error: {trouble}" if permanent else str(trouble))
        except Exception as error:
            log.exception("node.claim-broke", **about)
            self._meter.failed(operation)
            return Answer(error=f"internal error ({type(error).__name__}): see the log of the plugin")
        log.info("node.claim-done", **about)
        return answer

    async def _prepare(self, ref: ClaimRef, deadline: float) -> Answer:
        was_missed = self._retries.stop(ref.uid)
        try:
            devices = await self._devices(ref, deadline)
        except Obsolete:
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._retries.begin(ref, refused=isinstance(error, Refused))
            raise
        if was_missed:
            # The call that went without an answer may have been for another pod with the same claim.
            self._retries.begin(ref)
        return Answer(devices=devices)

    async def _prepare_unasked(self, ref: ClaimRef) -> None:
        """As a call of kubelet does it, with a claim that is read anew; then have kubelet call."""
        await self._devices(ref, asyncio.get_running_loop().time() + PATIENCE)
        await self._pods.of_claim(ref)

    async def _devices(self, ref: ClaimRef, deadline: float) -> tuple[ReadyDevice, ...]:
        devices = self._preparing.ready(ref.uid)
        if devices is not None:
            return devices
        claim = await persist(lambda: fetch_claim(self._api, ref, self._plugin.driver), deadline=deadline)

        async def attempt() -> tuple[ReadyDevice, ...]:
            async with self._attempt(ref):
                ready = self._preparing.ready(ref.uid)
                return await _asking(self._preparing.prepare(claim)) if ready is None else ready

        changes = self._plugin.changes(claim)
        return await persist(attempt, deadline=deadline, changes=changes)

    async def _unprepare(self, ref: ClaimRef, deadline: float) -> Answer:
        self._retries.stop(ref.uid)

        async def attempt() -> Answer:
            async with self._attempt(ref):
                await _asking(self._preparing.unprepare(ref.uid))
            return Answer()

        return await persist(attempt, deadline=deadline)

    def _attempt(self, ref: ClaimRef) -> AbstractAsyncContextManager[None]:
        """One attempt at a time for each claim: kubelet repeats a call that it gave up on."""
        return self._locks.setdefault(ref.uid, asyncio.Lock())


async def _asking(work: Awaitable[T]) -> T:
    try:
        return await work
    except KubeError as error:
        raise api_trouble("the API server did not answer as needed", error) from error
