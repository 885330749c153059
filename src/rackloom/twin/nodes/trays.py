"""All trays of a simulated site as nodes of a cluster, kept in step with their switches."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

import structlog

from rackloom.claim.domain.names import SIMULATED_LABEL
from rackloom.claim.kube.api import Expired, KubeApi, KubeError
from rackloom.claim.kube.kinds import RESOURCE_SLICE
from rackloom.claim.node.publisher import RETRY_SECONDS
from rackloom.topology.rack import Site
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.node_objects import NodeSpec
from rackloom.twin.nodes.tray_fabric import seats_of, tray_fabric
from rackloom.twin.nodes.tray_names import TrayNames
from rackloom.twin.nodes.tray_node import Surroundings, TrayNode
from rackloom.twin.switches.fabric import FabricSnapshot, SimulatedFabric

_LABELS = {SIMULATED_LABEL: "true", "nvidia.com/gpu.present": "true"}
_AGAIN_S = 1.0
_NOTHING = "spec.nodeName=none"
"""Selects no slice: the watch is there to break."""
log = structlog.get_logger(__name__)


class Nodes:
    """The nodes by name, their kubelets, and who brings news from the switches to them.

    `api` is the API server as the plugins ask it. `off` are the names of those without power. `up` is set
    once all have been registered.
    """

    def __init__(
        self,
        nodes: Iterable[TrayNode],
        kubelets: Kubelets,
        fabrics: Iterable[SimulatedFabric],
        names: TrayNames,
        api: KubeApi,
    ) -> None:
        self.kubelets = kubelets
        self.off: set[str] = set()
        self.up = asyncio.Event()
        self._names = names
        self._api = api
        self._nodes = {one.name: one for one in nodes}
        self._fabrics = {one.domain: one for one in fabrics}
        self._of_domain: dict[str, list[TrayNode]] = defaultdict(list)
        self._news: dict[str, FabricSnapshot] = {}
        self._told = asyncio.Event()
        self._settled = asyncio.Event()
        for one in self._nodes.values():
            self._of_domain[one.domain].append(one)
        for fabric in self._fabrics.values():
            self._hear(fabric.domain, fabric.snapshot())
            fabric.on_change(partial(self._hear, fabric.domain))

    def __getitem__(self, name: str) -> TrayNode:
        """A node. Raises `KeyError`."""
        return self._nodes[name]

    def __iter__(self) -> Iterator[TrayNode]:
        """All nodes, domain by domain."""
        return iter(self._nodes.values())

    def name_of(self, chassis_serial: str, slot: int) -> str:
        """The node that a tray is."""
        return self._names.node(chassis_serial, slot)

    async def run(self) -> None:
        """Register all nodes and keep them in step with their switches, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.kubelets.run())
                tasks.create_task(self._notice_api_server())
                for node in self:
                    await self._insist(self._register, node)
                    # Registering does not wait for anything: others have to get their turn.
                    await asyncio.sleep(0)
                self.up.set()
                await self._follow()
        finally:
            await asyncio.gather(*(node.power_off() for node in self))

    async def settle(self) -> None:
        """Wait until everything that switches have told reached labels and slices."""
        await self._settled.wait()

    async def look(self, name: str) -> None:
        """Have a node's plugins look now: something about its devices was changed. Raises `KubeError`."""
        await self._nodes[name].look()

    async def lose(self, name: str) -> None:
        """The power of a node fails: it says nothing to anybody any more."""
        self.off.add(name)
        await self.kubelets.lose(name)
        await self._nodes[name].power_off()

    async def heal(self, name: str) -> None:
        """A node that was lost starts again. Raises `KubeError`."""
        self.off.discard(name)
        self._nodes[name].boot()
        await self._register(self._nodes[name])
        await self._nodes[name].look()

    async def reboot(self, name: str) -> None:
        """A node goes and comes back at once."""
        await self.lose(name)
        await self.heal(name)

    def _hear(self, domain: str, snapshot: FabricSnapshot) -> None:
        """Trays stay where they are when their domain goes by another uuid: `domain` is its first."""
        self._news[domain] = snapshot
        self._settled.clear()
        self._told.set()

    async def _follow(self) -> None:
        while True:
            while self._news:
                domain = next(iter(self._news))
                await self._bring(domain, self._news.pop(domain))
            self._settled.set()
            self._told.clear()
            await self._told.wait()

    async def _bring(self, domain: str, news: FabricSnapshot) -> None:
        seats = seats_of(news)
        for node in self._of_domain[domain]:
            changed = node.gpus.follow(tray_fabric(news.domain, node.tray, seats, self._names))
            if changed and node.name not in self.off:
                await self._insist(TrayNode.look, node)

    async def _notice_api_server(self) -> None:
        """Tell the plugins when the API server is back: each has a watch for that, and here all have one."""
        is_cut_off = False
        while True:
            try:
                listed = await self._api.list(RESOURCE_SLICE, fields=_NOTHING)
                if is_cut_off:
                    for node in self:
                        node.notice_api_server()
                is_cut_off = False
                async for _ in self._api.watch(
                    RESOURCE_SLICE, resource_version=listed.resource_version, fields=_NOTHING
                ):
                    pass
            except Expired:
                continue
            except KubeError:
                is_cut_off = True
                await asyncio.sleep(RETRY_SECONDS)

    async def _register(self, node: TrayNode) -> None:
        await self.kubelets.register(
            NodeSpec(node.name, labels=_LABELS, capacity=_capacity(node), boot_id=f"{node.name}-{node.boots}")
        )

    async def _insist(self, act: Callable[[TrayNode], Awaitable[None]], node: TrayNode) -> None:
        """Until the API server takes it, as a kubelet and a plugin do."""
        while True:
            try:
                await act(node)
            except KubeError as error:
                log.warning("twin.node", node=node.name, reason=str(error))
                await asyncio.sleep(_AGAIN_S)
            else:
                return


def tray_nodes(site: Site, names: TrayNames, around: Surroundings) -> tuple[TrayNode, ...]:
    """A node for each tray of a site."""
    return tuple(
        TrayNode(names.node(tray.chassis_serial, tray.slot), tray, domain.uuid, around)
        for domain in site.domains
        for tray in domain.trays
    )


def _capacity(node: TrayNode) -> dict[str, str]:
    return {"cpu": "144", "memory": "960Gi", "pods": "110", "nvidia.com/gpu": str(len(node.tray.gpus))}
