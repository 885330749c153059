"""The fabric of a node as its GPUs' driver tells it, through NVML.

Source: nvmlDeviceGetGpuFabricInfoV (versions 2 and 3) and nvmlDeviceGetPlatformInfo. An older driver, or a
GPU without a fabric, answers ERROR_NOT_SUPPORTED or lacks the function; both mean that it has none.
"""

from ctypes import byref
from pathlib import Path
from typing import Any
from uuid import UUID

from rackloom.claim.node.imex.fabric import FabricState, GpuFabric, NodeFabric
from rackloom.claim.node.values import Health
from rackloom.topology.discovery.nvml import driver_missing, nvml_session
from rackloom.topology.discovery.pci import pci_address
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey

_SUMMARIES = {1: Health.HEALTHY, 2: Health.UNHEALTHY, 3: Health.UNHEALTHY}
_SUMMARY_TEXTS = {
    1: "the NVLink fabric is healthy",
    2: "NVML: the NVLink fabric is unhealthy",
    3: "NVML: the NVLink fabric has limited capacity",
}


def read_nvml(driver_root: Path) -> NodeFabric:
    """What every GPU says. Blocks for some milliseconds.

    The library is that of the driver below `driver_root`, else the system's. Raises `Refused` where there is
    no driver, and `Retry` when it is there and does not answer.
    """
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            raise driver_missing(driver_root)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(gpu_fabric(nvml, index, handle) for index, handle in enumerate(handles))
        return NodeFabric(gpus=gpus, driver_version=nvml.nvmlSystemGetDriverVersion())


def gpu_fabric(nvml: Any, index: int, handle: Any) -> GpuFabric:
    """What one GPU says; `nvml` is the started library. Raises its errors."""
    uuid = nvml.nvmlDeviceGetUUID(handle)
    name = f"GPU {index} ({uuid})"
    key, tray = _key(nvml, handle, uuid)
    info = _fabric_info(nvml, handle)
    if info is None:
        return GpuFabric(name=name, state=FabricState.NOT_SUPPORTED, key=key, tray=tray)
    summary = getattr(info, "healthSummary", 0)
    return GpuFabric(
        name=name,
        state=FabricState(info.state),
        status=info.status,
        cluster_uuid=str(UUID(bytes=_raw(info, "clusterUuid"))),
        clique_id=info.cliqueId,
        key=key,
        tray=tray,
        health=_SUMMARIES.get(summary, Health.UNKNOWN),
        health_message=_SUMMARY_TEXTS.get(summary, "this driver does not report the health of the fabric"),
    )


def _fabric_info(nvml: Any, handle: Any) -> Any:
    """The newest version that this driver fills in; None where it knows of no fabric."""
    layouts = (
        (nvml.c_nvmlGpuFabricInfo_v3_t, nvml.nvmlGpuFabricInfo_v3),
        (nvml.c_nvmlGpuFabricInfo_v2_t, nvml.nvmlGpuFabricInfo_v2),
    )
    for layout, version in layouts:
        info = layout()
        info.version = version
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        except nvml.NVMLError_ArgumentVersionMismatch:
            continue
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None
        return info
    return None


def _key(nvml: Any, handle: Any, uuid: str) -> tuple[GpuKey, int | None]:
    """The join key, and the tray's index; boards outside a rack have no platform information."""
    info = nvml.c_nvmlPlatformInfo_v2_t()
    info.version = nvml.nvmlPlatformInfo_v2
    pci = nvml.nvmlDeviceGetPciInfo(handle).busId
    key = GpuKey(
        gpu_uuid=Fact(uuid, Source.NVML), pci_address=Fact(pci_address(pci) or pci.lower(), Source.NVML)
    )
    try:
        nvml.nvmlDeviceGetPlatformInfo(handle, byref(info))
    except nvml.NVMLError:
        return key, None
    serial = _raw(info, "chassisSerialNumber").partition(b"\0")[0].decode("ascii", "replace").strip()
    # On Blackwell the GUID has 8 bytes; the rest of the field is zero.
    guid = int.from_bytes(_raw(info, "ibGuid")[:8], "big")
    slot, module, tray = (_raw(info, field)[0] for field in ("slotNumber", "moduleId", "trayIndex"))
    place = Fact(SlotKey(serial, slot, module), Source.NVML) if serial else None
    return GpuKey(
        place=place,
        fabric_guid=Fact(guid, Source.NVML) if guid else None,
        gpu_uuid=key.gpu_uuid,
        pci_address=key.pci_address,
    ), tray


def _raw(info: Any, field: str) -> bytes:
    """A field as it lies in memory: the bindings would read it as text and stop at the first zero."""
    place = getattr(type(info), field)
    return bytes(info)[place.offset : place.offset + place.size]
