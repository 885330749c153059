"""The isolation mode of this node, which its label may change while the plugin runs."""

import asyncio
from collections.abc import Callable

import structlog

from rackloom.claim.domain.isolation import Isolation, isolation_of
from rackloom.claim.kube.api import KubeApi, KubeError, Object
from rackloom.claim.kube.kinds import NODE

log = structlog.get_logger(__name__)

RETRY_SECONDS = 5.0


class NodeMode:
    """What the node's label says, else `default`. `isolation` is the newest that was seen."""

    def __init__(self, api: KubeApi, node: str, default: Isolation) -> None:
        self._api = api
        self._node = node
        self._default = default
        self.isolation = default

    async def read(self) -> None:
        """Look once. Raises `KubeError`."""
        self._see(await self._api.get(NODE, self._node))

    async def follow(self, changed: Callable[[], None]) -> None:
        """Watch the node for ever; `changed` is called when the mode becomes another one."""
        while True:
            try:
                await self._watch(changed)
            except KubeError as error:
                log.info("imex.node-watch-ended", node=self._node, reason=error.message)
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self, changed: Callable[[], None]) -> None:
        only = f"metadata.name={self._node}"
        listed = await self._api.list(NODE, fields=only)
        for node in listed.items:
            self._tell(node, changed)
        events = self._api.watch(NODE, resource_version=listed.resource_version, fields=only)
        async for event in events:
            if event.type in ("ADDED", "MODIFIED"):
                self._tell(event.object, changed)

    def _tell(self, node: Object, changed: Callable[[], None]) -> None:
        before = self.isolation
        self._see(node)
        if self.isolation is not before:
            log.info("imex.isolation", node=self._node, isolation=self.isolation.value)
            changed()

    def _see(self, node: Object) -> None:
        self.isolation = isolation_of(node["metadata"].get("labels", {}), self._default)
