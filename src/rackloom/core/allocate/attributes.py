"""Attributes of published devices: converts plain values to the API's, and builds those of the join key.

An unknown attribute is absent. A selector could match a value that stands for "unknown". A text of more than
64 bytes is left out too: the API server would refuse the whole slice, and a truncated name would be wrong.

The join key connects the switch controller's view (chassis, slot, module id, fabric GUID) with that of
Kubernetes (GPU UUID, clique). `gpu_attributes` describes one GPU. `tray_attributes` describes a device that
stands for all GPUs of a tray (an IMEX channel). It has chassis and slot if all GPUs agree, and
`module<N>UUID` and `module<N>FabricGUID` for each GPU. Names without a domain belong to the driver that
publishes them.
"""

from collections.abc import Iterable, Mapping

from rackloom.core.allocate.objects import DeviceAttribute
from rackloom.topology.join_key import GpuKey

STANDARD_DOMAIN = "resource.kubernetes.io"
LONGEST_TEXT = 64
"""The most bytes of a string attribute."""
CLIQUE, TRAY = "clique", "tray"
CHASSIS_SERIAL, SLOT, MODULE_ID = "chassisSerial", "slot", "moduleID"
FABRIC_GUID, GPU_UUID = "fabricGUID", "uuid"
"""Names of the join key's attributes. The doctor's snapshot reads them back."""

AttributeValue = str | int | bool | DeviceAttribute | None
AttributeValues = dict[str, AttributeValue]


def device_attributes(values: Mapping[str, AttributeValue]) -> dict[str, DeviceAttribute]:
    """Attributes of the values that are known and fit. None and an empty text count as unknown."""
    found = {name: _attribute(value) for name, value in values.items()}
    return {name: attribute for name, attribute in found.items() if attribute is not None}


def _attribute(value: AttributeValue) -> DeviceAttribute | None:
    match value:
        case bool():
            return DeviceAttribute(bool_=value)
        case int():
            return DeviceAttribute(int_=value)
        case str():
            return DeviceAttribute(string=value) if 0 < len(value.encode()) <= LONGEST_TEXT else None
    return value


def clique_attributes(clique: str) -> AttributeValues:
    """The clique `<clusterUUID>.<cliqueId>`, whole and in parts. Empty for a node without a clique."""
    if not clique:
        return {}
    cluster_uuid, _, clique_id = clique.rpartition(".")
    return {CLIQUE: clique, "clusterUUID": cluster_uuid, "cliqueID": int(clique_id)}


def gpu_attributes(key: GpuKey) -> AttributeValues:
    """The attributes that one GPU's key gives to the device of this GPU."""
    module = {} if key.place is None else {MODULE_ID: key.place.value.module_id}
    return {**_slot_attributes(key), **module, FABRIC_GUID: _guid_text(key), GPU_UUID: _uuid_text(key)}


def tray_attributes(keys: Iterable[GpuKey]) -> AttributeValues:
    """The attributes that the keys of a tray's GPUs give to a device that stands for all of them.

    `module<N>UUID` and `module<N>FabricGUID` name each GPU. Chassis and slot are present if all agree.
    """
    located = [(key.place.value.module_id, key) for key in keys if key.place is not None]
    trays = [_slot_attributes(key) for _, key in located]
    found = dict(trays[0]) if trays and all(tray == trays[0] for tray in trays) else {}
    for module_id, key in located:
        found[f"module{module_id}UUID"] = _uuid_text(key)
        found[f"module{module_id}FabricGUID"] = _guid_text(key)
    return found


def _slot_attributes(key: GpuKey) -> AttributeValues:
    if key.place is None:
        return {}
    return {CHASSIS_SERIAL: key.place.value.chassis_serial, SLOT: key.place.value.slot}


def _uuid_text(key: GpuKey) -> str | None:
    return None if key.gpu_uuid is None else key.gpu_uuid.value


def _guid_text(key: GpuKey) -> str | None:
    """The GUID as switch controllers and nvidia-smi print it."""
    return None if key.fabric_guid is None else f"0x{key.fabric_guid.value:016x}"


def is_whole_gpu(kind: str | None) -> bool:
    """Whether the attribute `type` of a GPU driver's device means a whole GPU, not a part of one."""
    return kind in (None, "gpu")
