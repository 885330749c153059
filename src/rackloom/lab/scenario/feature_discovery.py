"""The API client of GPU Feature Discovery, which may write its labels late.

The real one checks the GPUs once a minute, so a label may be as old as that.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rackloom.claim.kube.api import KubeError
from rackloom.core.kubernetes.objects import Object, ResourceKind
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

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...],
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Write now, or later; a late write has no answer. Writes stay in order while one is late."""
        if dry_run or (not self.lag and not self._late):
            return await super().patch(kind, name, namespace, patch, subresource=subresource, dry_run=dry_run)
        task = asyncio.create_task(self._write_late(kind, name, patch))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return {}

    async def _write_late(
        self, kind: ResourceKind, name: str, patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...]
    ) -> None:
        await asyncio.sleep(self.lag)
        while True:
            with suppress(KubeError):
                await super().patch(kind, name, None, patch)
                return
            await asyncio.sleep(_RETRY_SECONDS)
