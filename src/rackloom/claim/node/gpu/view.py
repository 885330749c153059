"""The GPUs of this node: what was read, what happened since, and when that changes what is published."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import structlog

from rackloom.claim.allocate.objects import Device
from rackloom.claim.node.gpu import published
from rackloom.claim.node.gpu.condition import Conditions, Known, Look, health_of, looked, struck
from rackloom.claim.node.gpu.inventory import Inventory, Vfio
from rackloom.claim.node.gpu.place import Place, places
from rackloom.claim.node.gpu.published import Node
from rackloom.claim.node.gpu.source import GpuSource
from rackloom.claim.node.values import DeviceHealth, Health, Pool, Value
from rackloom.errors import Refused, Retry
from rackloom.topology.machine import Machine

log = structlog.get_logger(__name__)

LOOK_SECONDS = 10.0
LISTEN_SECONDS = 1.0


class Reading:
    """Everything that is read from the machine, in calls that block."""

    def __init__(
        self,
        source: GpuSource,
        machine: Callable[[], Machine],
        vfio: Callable[[], tuple[Vfio, ...]] = tuple,
    ) -> None:
        self.source = source
        self._machine = machine
        self._vfio = vfio

    def read(self) -> "Observation":
        """Raises `Retry` or `Refused` with why nothing can be said.

        Without a driver there are no GPUs but those that are passed through, which need none here.
        """
        vfio = self._vfio()
        try:
            inventory = self.source.read()
        except Refused as refused:
            return Observation(vfio=vfio, missing=None if vfio else str(refused))
        return Observation(inventory=inventory, places=places(self._machine()), vfio=vfio)


class Observation(Value, frozen=True, kw_only=True):
    """What one look found. `missing` is what keeps the node from having GPUs at all."""

    inventory: Inventory = Inventory()
    places: Mapping[str, Place] = {}
    vfio: tuple[Vfio, ...] = ()
    missing: str | None = None


class GpuView:
    """All that is known of the GPUs, kept up to date by `look` and `listen`."""

    def __init__(self, reading: Reading, harmless: frozenset[int], wall: Callable[[], float]) -> None:
        self._reading = reading
        self._harmless = harmless
        self._wall = wall
        self._tell: Callable[[], None] = lambda: None
        self._node = Node()
        self._devices: tuple[Device, ...] = ()
        self._observed_at: float | None = None
        self._trouble = "the GPUs were not looked at yet"
        self.missing: str | None = None
        """What has to appear before this node has GPUs; None for nothing."""

    def when_changed(self, tell: Callable[[], None]) -> None:
        """Have `tell` called whenever the published devices become others."""
        self._tell = tell

    async def pool(self, name: str) -> Pool:
        """The devices to publish. Raises `Retry` until the GPUs were once read."""
        await self.need()
        return Pool(name=name, devices=self._devices)

    async def need(self) -> None:
        """Make sure that the GPUs were read once. Raises `Retry` where that cannot be done now."""
        if self._observed_at is None:
            await self.look()
        if self._observed_at is None:
            raise Retry(self._trouble, after=1.0)

    async def look(self) -> None:
        """Read again. What was known stays when nothing can be read."""
        try:
            found = await asyncio.to_thread(self._reading.read)
        except (Retry, Refused) as trouble:
            self._trouble = trouble.reason
            log.warning("gpu.unknown", reason=trouble.reason)
            return
        if found.missing != self.missing:
            log.warning("gpu.driver", missing=found.missing)
        now = self._wall()
        self._trouble, self._observed_at, self.missing = "", now, found.missing
        look = Look(inventory=found.inventory, unmonitored=self._reading.source.unmonitored(), at=now)
        conditions = looked(self._node.conditions, look, self._harmless)
        self._become(
            Node(conditions=conditions, inventory=found.inventory, places=found.places, vfio=found.vfio)
        )

    async def listen(self) -> None:
        """Wait a moment for errors, and take note of them. Raises `Retry`."""
        xids = await asyncio.to_thread(self._reading.source.wait, LISTEN_SECONDS)
        for xid in xids:
            log.warning("gpu.xid", gpu=xid.uuid, xid=xid.number)
        conditions: Conditions = struck(self._node.conditions, xids, self._wall())
        self._become(msgspec.structs.replace(self._node, conditions=conditions))

    def device(self, name: str) -> Known | None:
        """What a published name stands for; None for a name that is not published."""
        return published.names_of(self._node).get(name)

    def answers(self, uuid: str) -> bool:
        """Whether a GPU was there at the last look."""
        return published.answers(self._node, uuid)

    def health(self, pool: str) -> tuple[DeviceHealth, ...]:
        """Health of every published device."""
        names = published.names_of(self._node)
        return tuple(self._health(pool, name, known) for name, known in names.items())

    def _become(self, node: Node) -> None:
        self._node = node
        devices = published.devices_of(node, self._harmless)
        if devices != self._devices:
            self._devices = devices
            self._tell()

    def _health(self, pool: str, name: str, known: Known) -> DeviceHealth:
        health, message = Health.UNKNOWN, self._trouble
        if not message and known.condition is not None:
            health, message = health_of(known.condition, self._harmless)
        elif not message:
            message = "the driver of a GPU that is passed through is in its virtual machine"
        return DeviceHealth(
            pool=pool, device=name, health=health, observed_at=self._observed_at or 0.0, message=message
        )
