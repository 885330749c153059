"""The join key as device attributes: how a Kubernetes device is found again in the NVLink fabric.

The switch controller knows chassis, slot, module id and fabric GUID; Kubernetes knows GPU UUID and
clique. A device publishes the parts that are known, so whoever has both can join the two. Attribute names
without a domain belong to the driver that publishes them.

`gpu_attributes` describes one GPU. `tray_attributes` describes a device that stands for all GPUs of a
tray (an IMEX channel): chassis and slot where all GPUs agree, and `module<N>UUID` and
`module<N>FabricGUID` for each GPU.
"""

from collections.abc import Iterable

from rackloom.core.allocate.objects import DeviceAttribute
from rackloom.topology.join_key import GpuKey

CLIQUE = "clique"
CLUSTER_UUID = "clusterUUID"
CLIQUE_ID = "cliqueID"
CHASSIS_SERIAL = "chassisSerial"
SLOT = "slot"
TRAY = "tray"
MODULE_ID = "moduleID"
FABRIC_GUID = "fabricGUID"
GPU_UUID = "uuid"

DeviceAttributes = dict[str, DeviceAttribute]


def text_attribute(value: str) -> DeviceAttribute:
    """A string attribute."""
    return DeviceAttribute(string=value)


def number_attribute(value: int) -> DeviceAttribute:
    """An integer attribute."""
    return DeviceAttribute(int_=value)


def clique_attributes(clique: str) -> DeviceAttributes:
    """The clique `<clusterUUID>.<cliqueId>`, whole and in parts; nothing for a node without one."""
    if not clique:
        return {}
    cluster_uuid, _, clique_id = clique.rpartition(".")
    return {
        CLIQUE: text_attribute(clique),
        CLUSTER_UUID: text_attribute(cluster_uuid),
        CLIQUE_ID: number_attribute(int(clique_id)),
    }


def gpu_attributes(key: GpuKey) -> DeviceAttributes:
    """What one GPU's key says, for a device that is this GPU."""
    found: DeviceAttributes = {}
    if key.place is not None:
        found |= _slot_attributes(key) | {MODULE_ID: number_attribute(key.place.value.module_id)}
    if key.fabric_guid is not None:
        found[FABRIC_GUID] = text_attribute(_guid_text(key.fabric_guid.value))
    if key.gpu_uuid is not None:
        found[GPU_UUID] = text_attribute(key.gpu_uuid.value)
    return found


def tray_attributes(keys: Iterable[GpuKey]) -> DeviceAttributes:
    """What the keys of a tray's GPUs say, for a device that stands for all of them.

    `module<N>UUID` and `module<N>FabricGUID` name each GPU; chassis and slot are there when all agree.
    """
    placed = [key for key in keys if key.place is not None]
    trays = [_slot_attributes(key) for key in placed]
    found: DeviceAttributes = dict(trays[0]) if trays and all(tray == trays[0] for tray in trays) else {}
    for key in placed:
        module = f"module{key.place.value.module_id}" if key.place is not None else ""
        if key.gpu_uuid is not None:
            found[f"{module}UUID"] = text_attribute(key.gpu_uuid.value)
        if key.fabric_guid is not None:
            found[f"{module}FabricGUID"] = text_attribute(_guid_text(key.fabric_guid.value))
    return found


def _slot_attributes(key: GpuKey) -> DeviceAttributes:
    place = key.place
    if place is None:
        return {}
    return {
        CHASSIS_SERIAL: text_attribute(place.value.chassis_serial),
        SLOT: number_attribute(place.value.slot),
    }


def _guid_text(value: int) -> str:
    """As switch controllers and nvidia-smi print it."""
    return f"0x{value:016x}"
