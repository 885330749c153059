"""The devices that a node publishes for IMEX, and how they are."""

from rackloom.claim.allocate.objects import Device
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.node.imex.fabric import NodeFabric
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.imex.view import FabricView
from rackloom.claim.node.imex.wanted import Kind
from rackloom.claim.node.joinkey import TRAY, Attributes, clique_attributes, number, text, tray_attributes
from rackloom.claim.node.values import DeviceHealth, Health, Pool


def node_pool(settings: ImexSettings, clique: str, fabric: NodeFabric) -> Pool:
    """channel-0 and daemon-0, as far as they are given out here.

    In channel mode the controller publishes the channels of a whole clique; a host that runs nvidia-imex
    itself needs no daemon.
    """
    shared = clique_attributes(clique) | tray_attributes(gpu.key for gpu in fabric.gpus) | _tray(fabric)
    devices = []
    if settings.isolation is not Isolation.CHANNEL:
        devices.append(_device(names.CHANNEL_DEVICE, Kind.CHANNEL, shared))
    if settings.mode is not ImexMode.HOST_MANAGED:
        devices.append(_device(names.DAEMON_DEVICE, Kind.DAEMON, shared))
    return Pool(name=settings.node, devices=tuple(devices))


def health_of(pool: Pool, view: FabricView) -> tuple[DeviceHealth, ...]:
    """Every device of the node is as well as the node's fabric is."""
    health, message = _fabric_health(view)
    return tuple(
        DeviceHealth(
            pool=pool.name,
            device=device.name,
            health=health,
            observed_at=view.observed_at,
            message=message,
        )
        for device in pool.devices
    )


def _device(name: str, kind: Kind, shared: Attributes) -> Device:
    return Device(name=name, attributes={"type": text(kind.value), "id": number(0), **shared})


def _tray(fabric: NodeFabric) -> Attributes:
    trays = {gpu.tray for gpu in fabric.gpus if gpu.tray is not None}
    return {TRAY: number(trays.pop())} if len(trays) == 1 else {}


def _fabric_health(view: FabricView) -> tuple[Health, str]:
    if view.trouble is not None:
        return Health.UNKNOWN, view.trouble
    for health in (Health.UNHEALTHY, Health.UNKNOWN):
        for gpu in view.fabric.gpus:
            if gpu.health is health:
                return health, f"{gpu.name}: {gpu.health_message}"
    return Health.HEALTHY, ""
