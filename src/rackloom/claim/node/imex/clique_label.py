"""The node label `nvidia.com/gpu.clique`, written only when nobody else writes it.

GPU Feature Discovery writes the same label (through node-feature-discovery's master), and two writers would
undo each other. Server-side apply tells who owns it: ours is one field manager, and what only it owns goes
away when it stops applying it.
"""

import asyncio
from typing import Any

import structlog

from rackloom.claim.domain.names import GPU_CLIQUE_LABEL
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, Object
from rackloom.claim.kube.kinds import NODE
from rackloom.claim.node.imex.view import FabricView
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

MANAGER = "rackloom-clique-label"
LOOK_SECONDS = 600.0
RETRY_SECONDS = 10.0
STOP_SECONDS = 5.0


class CliqueLabel:
    """Keeps the label of one node; with `keep`, also while the plugin is down.

    `second_writer` is the field manager that was found to own the label.
    """

    def __init__(self, api: KubeApi, node: str, fabric: FabricView, *, keep: bool = False) -> None:
        self._api = api
        self._node = node
        self._fabric = fabric
        self._keep = keep
        self.second_writer: str | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Keep the label until it is cancelled; then remove it if it is ours."""
        try:
            while True:
                pause, trouble = LOOK_SECONDS, ""
                try:
                    await self.write()
                except (KubeError, Retry) as error:
                    pause, trouble = RETRY_SECONDS, str(error)
                if trouble not in ("", self._trouble):
                    log.warning("imex.clique-label", reason=trouble)
                self._trouble = trouble
                await asyncio.sleep(pause)
        finally:
            if not self._keep:
                await self._withdraw_in_time()

    async def write(self) -> None:
        """Write the label once, unless somebody else does. Raises `Retry` while the clique is unknown."""
        clique = await self._fabric.clique()
        node = await self._api.get(NODE, self._node)
        others = (one for one in owners(node, GPU_CLIQUE_LABEL) if one != MANAGER)
        self._found(next(others, None))
        if self.second_writer is not None or not clique:
            await self._give_up(node)
            return
        try:
            await self._apply({GPU_CLIQUE_LABEL: clique})
        except Conflict as conflict:
            # Somebody was faster since the read.
            self._found(conflict.message)

    async def withdraw(self) -> None:
        """Give up what we own of the label: it goes away if nobody else owns it."""
        await self._give_up(await self._api.get(NODE, self._node))

    async def _withdraw_in_time(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.withdraw()
        except (KubeError, TimeoutError) as trouble:
            log.warning("imex.clique-label.left-behind", node=self._node, reason=str(trouble))

    async def _give_up(self, node: Object) -> None:
        if MANAGER in owners(node, GPU_CLIQUE_LABEL):
            await self._apply({})

    def _found(self, writer: str | None) -> None:
        if writer is not None and writer != self.second_writer:
            log.warning("imex.clique-label.second-writer", node=self._node, writer=writer)
        self.second_writer = writer

    async def _apply(self, labels: dict[str, str]) -> None:
        metadata: Object = {"name": self._node, **({"labels": labels} if labels else {})}
        obj = {"apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": metadata}
        await self._api.apply(NODE, obj, manager=MANAGER)


def owners(obj: Object, label: str) -> tuple[str, ...]:
    """Field managers that own `label` of `obj`."""
    fields = obj["metadata"].get("managedFields", ())
    return tuple(one["manager"] for one in fields if f"f:{label}" in _labels(one))


def written(obj: Object, label: str) -> dict[str, str]:
    """When each owner of `label` of `obj` last changed any of its fields, RFC 3339, where the object says."""
    fields = obj["metadata"].get("managedFields", ())
    return {one["manager"]: one["time"] for one in fields if "time" in one and f"f:{label}" in _labels(one)}


def _labels(entry: Any) -> Any:
    return entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:labels", {})
