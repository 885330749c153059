"""Node labels of the IMEX plugin: the ComputeDomain, the isolation mode, and the clique.

- `ComputeDomainLabel` writes the label that brings a ComputeDomain's IMEX daemon to this node. A node
  holds one IMEX session, so the label names at most one ComputeDomain. Another claim has to wait. Every
  write carries the resourceVersion that was read (optimistic concurrency), so it changes that version
  and nothing newer.
- `NodeIsolation` follows the label that chooses the isolation mode, which may change while the plugin
  runs.
- `CliqueLabel` writes `nvidia.com/gpu.clique`, unless another writer does. GPU Feature Discovery writes
  the same label (through node-feature-discovery's master), and two writers would undo each other.
  Server-side apply shows who owns the label: the plugin is one field manager, and gives the label up
  while there is another.
"""

import asyncio
from collections.abc import Callable

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound
from rackloom.claim.node.fabric import FabricMonitor
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, GPU_CLIQUE_LABEL, ImexIsolation, isolation_of
from rackloom.core.cluster.objects import NODE, Object, field_managers, labels_of, version_of
from rackloom.errors import Retry

# The ComputeDomain of the node.


NODE_LABEL_RETRY_SECONDS = 0.25


class ComputeDomainLabel:
    """The label that names the ComputeDomain of the node, at most one."""

    def __init__(self, api: KubeApi, node: str) -> None:
        self._api = api
        self._node = node

    async def acquire(self, uid: str) -> None:
        """Make the label name `uid`. Raises `Retry` while it names another ComputeDomain."""
        # A node holds one IMEX session. Two ComputeDomains that race for it read the same resourceVersion, so
        # the later write gets a conflict. The attempt is repeated and then finds the label taken.
        node = await self._api.get(NODE, self._node)
        found = labels_of(node).get(COMPUTE_DOMAIN_LABEL)
        if found == uid:
            return
        if found is not None:
            raise Retry(
                f"node {self._node} still belongs to ComputeDomain {found}: it can be in one at a time",
                after=NODE_LABEL_RETRY_SECONDS,
            )
        await self._write(node, uid)

    async def release(self, uid: str) -> None:
        """Remove the label if it names `uid`."""
        try:
            node = await self._api.get(NODE, self._node)
        except NotFound:
            return
        if labels_of(node).get(COMPUTE_DOMAIN_LABEL) == uid:
            await self._write(node, None)

    async def _write(self, read: Object, uid: str | None) -> None:
        """The resourceVersion makes the API server refuse the write if the node changed since it was read."""
        labels = {COMPUTE_DOMAIN_LABEL: uid}
        patch = {"metadata": {"resourceVersion": version_of(read), "labels": labels}}
        try:
            await self._api.patch(NODE, self._node, None, patch)
        except Conflict as conflict:
            raise Retry(f"node {self._node} changed meanwhile", after=NODE_LABEL_RETRY_SECONDS) from conflict


# The isolation mode.


log = structlog.get_logger(__name__)

NODE_WATCH_RETRY_SECONDS = 5.0


class NodeIsolation:
    """The isolation mode of the node's label, else `default`. `isolation` is the newest that was read."""

    def __init__(self, api: KubeApi, node: str, default: ImexIsolation) -> None:
        self._api = api
        self._node = node
        self._default = default
        self.isolation = default

    async def read(self) -> None:
        """Read the label once. Raises `KubeError`."""
        self._update(await self._api.get(NODE, self._node))

    async def follow(self, changed: Callable[[], None]) -> None:
        """Watch the node until cancelled. `changed` is called when the mode changes."""
        while True:
            try:
                await self._watch(changed)
            except KubeError as error:
                log.info("imex.node-watch-ended", node=self._node, reason=error.message)
                await asyncio.sleep(NODE_WATCH_RETRY_SECONDS)

    async def _watch(self, changed: Callable[[], None]) -> None:
        only = f"metadata.name={self._node}"
        listed = await self._api.list(NODE, fields=only)
        for node in listed.items:
            self._notify(node, changed)
        events = self._api.watch(NODE, resource_version=listed.resource_version, fields=only)
        async for event in events:
            if event.type in ("ADDED", "MODIFIED"):
                self._notify(event.object, changed)

    def _notify(self, node: Object, changed: Callable[[], None]) -> None:
        before = self.isolation
        self._update(node)
        if self.isolation is not before:
            log.info("imex.isolation", node=self._node, isolation=self.isolation.value)
            changed()

    def _update(self, node: Object) -> None:
        self.isolation = isolation_of(labels_of(node), self._default)


# The clique.


CLIQUE_LABEL_MANAGER = "rackloom-clique-label"
CLIQUE_LABEL_SECONDS = 600.0
CLIQUE_LABEL_RETRY_SECONDS = 10.0
STOP_SECONDS = 5.0


class CliqueLabel:
    """Keeps the label of one node. With `keep`, the label stays while the plugin is down.

    `second_writer` is the field manager that was found to own the label.
    """

    def __init__(self, api: KubeApi, node: str, fabric: FabricMonitor, *, keep: bool = False) -> None:
        self._api = api
        self._node = node
        self._fabric = fabric
        self._keep = keep
        self.second_writer: str | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Keep the label until cancelled. Then remove it if it is ours."""
        try:
            while True:
                pause, trouble = CLIQUE_LABEL_SECONDS, ""
                try:
                    await self.write()
                except (KubeError, Retry) as error:
                    pause, trouble = CLIQUE_LABEL_RETRY_SECONDS, str(error)
                if trouble not in ("", self._trouble):
                    log.warning("imex.clique-label", reason=trouble)
                self._trouble = trouble
                await asyncio.sleep(pause)
        finally:
            if not self._keep:
                try:
                    async with asyncio.timeout(STOP_SECONDS):
                        await self.withdraw()
                except (KubeError, TimeoutError) as trouble:
                    log.warning("imex.clique-label.left-behind", node=self._node, reason=str(trouble))

    async def write(self) -> None:
        """Write the label once, unless another writer does. Raises `Retry` while the clique is unknown."""
        clique = await self._fabric.clique()
        node = await self._api.get(NODE, self._node)
        writers = field_managers(node, GPU_CLIQUE_LABEL)
        self._note_writer(next((writer for writer in writers if writer != CLIQUE_LABEL_MANAGER), None))
        # Two writers would undo each other: give the label up while another one owns it.
        if self.second_writer is not None or not clique:
            await self._release(node)
            return
        try:
            await self._apply({GPU_CLIQUE_LABEL: clique})
        except Conflict as conflict:
            # Another field manager has taken the label since the read.
            self._note_writer(conflict.message)

    async def withdraw(self) -> None:
        """Give up the plugin's ownership. The API server removes a label without an owner."""
        await self._release(await self._api.get(NODE, self._node))

    async def _release(self, node: Object) -> None:
        if CLIQUE_LABEL_MANAGER in field_managers(node, GPU_CLIQUE_LABEL):
            await self._apply({})

    def _note_writer(self, writer: str | None) -> None:
        if writer is not None and writer != self.second_writer:
            log.warning("imex.clique-label.second-writer", node=self._node, writer=writer)
        self.second_writer = writer

    async def _apply(self, labels: dict[str, str]) -> None:
        metadata: Object = {"name": self._node, **({"labels": labels} if labels else {})}
        obj = {"apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": metadata}
        await self._api.apply(NODE, obj, manager=CLIQUE_LABEL_MANAGER)
