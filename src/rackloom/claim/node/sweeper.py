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
            await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self) -> None:
        """One sweep; what cannot be decided now is left to the next."""
        self._preparing.forget_aborted()
        self._preparing.sweep_specs()
        orphans = [ref for ref in self._begun() if await self._is_gone(ref)]
        if orphans:
            log.info("node.self-initiated-unprepare", claims=[ref.uid for ref in orphans])
            await self._requests.unprepare(orphans)
        try:
            await self._plugin.tidy(tuple(self._checkpoint.claims.values()))
        except (KubeError, Retry) as trouble:
            log.info("node.tidy-later", driver=self._plugin.driver, reason=str(trouble))

    def _begun(self) -> Sequence[ClaimRef]:
        entries = self._checkpoint.claims.values()
        return [entry.ref for entry in entries if entry.state is State.STARTED]

    async def _is_gone(self, ref: ClaimRef) -> bool:
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await self._api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
        except NotFound:
            return True
        except (KubeError, TimeoutError):
            return False
        return bool(found["metadata"]["uid"] != ref.uid)
