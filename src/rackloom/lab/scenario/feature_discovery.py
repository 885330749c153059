"""The API client of GPU Feature Discovery, which may write its labels late.

The real one checks the GPUs once a minute, so a label may be as old as that.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rackloom.claim.kube.api import KubeError
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube

DISCOVERY_USER = "gpu-feature-discovery"
_RETRY_SECONDS = 1.0


class FeatureDiscovery(DirectApi):
    """Delays each write by `lag` seconds."""

    def __init__(self, kube: FakeKube) -> None:
        super().__init__(kube, DISCOVERY_USER)
        self.lag = 0.0
        self._late: set[asyncio.Task[None]] = set()

    async def patch(self, *args: Any, dry_run: bool = False, **kwargs: Any) -> Object:
        """Write now, or later. A late write has no answer. Writes stay in order while one is late."""
        write = partial(super().patch, *args, **kwargs)
        if dry_run or (not self.lag and not self._late):
            return await write(dry_run=dry_run)
        task = asyncio.create_task(self._write_late(write))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return {}

    async def _write_late(self, write: Callable[[], Awaitable[Object]]) -> None:
        await asyncio.sleep(self.lag)
        while True:
            with suppress(KubeError):
                await write()
                return
            await asyncio.sleep(_RETRY_SECONDS)
