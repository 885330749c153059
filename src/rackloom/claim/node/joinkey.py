"""The join key as device attributes: how a device of Kubernetes is found again in the fabric, and back.

Bare attribute names belong to the driver that publishes them. The switch controller knows chassis, slot,
module and fabric GUID; Kubernetes knows GPU UUID and clique; whoever has both of a GPU can join the two.
"""

from collections.abc import Iterable

from rackloom.claim.allocate.objects import DeviceAttribute
from rackloom.topology.identity import GpuKey

CLIQUE = "clique"
CLUSTER_UUID = "clusterUUID"
CLIQUE_ID = "cliqueID"
CHASSIS_SERIAL = "chassisSerial"
SLOT = "slot"
TRAY = "tray"
MODULE_ID = "moduleID"
FABRIC_GUID = "fabricGUID"
GPU_UUID = "uuid"

Attributes = dict[str, DeviceAttribute]


def text(value: str) -> DeviceAttribute:
    """A string attribute."""
    return DeviceAttribute(string=value)


def number(value: int) -> DeviceAttribute:
    """An integer attribute."""
    return DeviceAttribute(int_=value)


def clique_attributes(clique: str) -> Attributes:
    """The clique `<clusterUUID>.<cliqueId>`, whole and in parts; nothing for a node without one."""
    if not clique:
        return {}
    cluster_uuid, _, clique_id = clique.rpartition(".")
    return {CLIQUE: text(clique), CLUSTER_UUID: text(cluster_uuid), CLIQUE_ID: number(int(clique_id))}


def gpu_attributes(key: GpuKey) -> Attributes:
    """What one GPU's key says, for a device that is this GPU."""
    found: Attributes = {}
    if key.place is not None:
        found |= _place(key) | {MODULE_ID: number(key.place.value.module_id)}
    if key.fabric_guid is not None:
        found[FABRIC_GUID] = text(_guid(key.fabric_guid.value))
    if key.gpu_uuid is not None:
        found[GPU_UUID] = text(key.gpu_uuid.value)
    return found


def tray_attributes(keys: Iterable[GpuKey]) -> Attributes:
    """What the keys of a tray's GPUs say, for a device that stands for all of them.

    `module<N>UUID` and `module<N>FabricGUID` name each GPU; chassis and slot are there when all agree.
    """
    placed = [key for key in keys if key.place is not None]
    trays = [_place(key) for key in placed]
    found: Attributes = dict(trays[0]) if trays and all(one == trays[0] for one in trays) else {}
    for key in placed:
        module = f"module{key.place.value.module_id}" if key.place is not None else ""
        if key.gpu_uuid is not None:
            found[f"{module}UUID"] = text(key.gpu_uuid.value)
        if key.fabric_guid is not None:
            found[f"{module}FabricGUID"] = text(_guid(key.fabric_guid.value))
    return found


def _place(key: GpuKey) -> Attributes:
    place = key.place
    if place is None:
        return {}
    return {CHASSIS_SERIAL: text(place.value.chassis_serial), SLOT: number(place.value.slot)}


def _guid(value: int) -> str:
    """As switch controllers and nvidia-smi print it."""
    return f"0x{value:016x}"
