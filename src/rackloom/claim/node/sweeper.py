"""Gives back what was begun for claims that are no more."""

import asyncio
from collections.abc import Sequence

import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.preparing import Preparing
from rackloom.claim.node.requests import Requests
from rackloom.claim.node.values import ClaimRef, State
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 600.0
AGAIN_SECONDS = 10.0
"""After a sweep that could not decide everything, as when a node boots before its network is up."""
READ_SECONDS = 20.0


class Sweeper:
    """Looks at the start and every ten minutes for claims that kubelet will never mention again.

    Kubelet gives back what it saw prepared. A claim that was only begun when its pod went away is ours alone.
    """

    def __init__(
        self, plugin: Plugin, api: KubeApi, checkpoint: Checkpoint, preparing: Preparing, requests: Requests
    ) -> None:
        self._plugin = plugin
        self._api = api
        self._checkpoint = checkpoint
        self._preparing = preparing
        self._requests = requests

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            complete = await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS if complete else AGAIN_SECONDS)

    async def sweep(self) -> bool:
        """One sweep; whether everything could be decided and done. What could not is left to the next."""
        self._preparing.forget_aborted()
        self._preparing.sweep_specs()
        begun = self._begun()
        gone = [await self._is_gone(ref) for ref in begun]
        orphans = [ref for ref, is_gone in zip(begun, gone, strict=True) if is_gone]
        answers = {}
        if orphans:
            log.info("node.self-initiated-unprepare", claims=[ref.uid for ref in orphans])
            answers = await self._requests.unprepare(orphans)
        try:
            await self._plugin.tidy(tuple(self._checkpoint.claims.values()))
        except (KubeError, Retry) as trouble:
            log.info("node.tidy-later", driver=self._plugin.driver, reason=str(trouble))
            return False
        return None not in gone and not any(answer.error for answer in answers.values())

    def _begun(self) -> Sequence[ClaimRef]:
        entries = self._checkpoint.claims.values()
        return [entry.ref for entry in entries if entry.state is State.STARTED]

    async def _is_gone(self, ref: ClaimRef) -> bool | None:
        """None while the API server does not say."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await self._api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
        except NotFound:
            return True
        except (KubeError, TimeoutError):
            return None
        return bool(found["metadata"]["uid"] != ref.uid)
