"""The NVLink fabric of a node: the reports of its GPUs, and the clique that follows from them.

A clique is a set of GPUs that can share memory over NVLink, named `<clusterUUID>.<cliqueId>`. Every GPU
of a node must name the same one (`clique_of`). While a GPU is still registering, failed to register, or
GPUs disagree (the fabric is being partitioned), the clique is unknown and `Retry` names the reason. A GPU
behind the NVSwitches of a single machine reports a cluster UUID of zeros: it has no fabric beyond the
machine, and so no clique.

`read_nvml_fabric` reads NVML: nvmlDeviceGetGpuFabricInfoV (version 3, else 2) for state, clique and
health, and nvmlDeviceGetPlatformInfo for chassis, slot, tray, module and GUID. ERROR_NOT_SUPPORTED or a
missing function means that the GPU has no fabric. `read_declared_fabric` reads a JSON file instead, for
rehearsals, simulated nodes and tests:

    {"clusterUUID": "7b968a6d-...", "cliqueId": 1, "state": "completed", "driverVersion": "580.95.05",
     "gpus": [{"uuid": "GPU-...", "pciAddress": "0008:01:00.0", "chassisSerial": "1820325190001", "slot": 3,
               "tray": 2, "moduleId": 1, "fabricGuid": "0x7c0a...", "health": "Healthy"}]}

`state` is one of notSupported, notStarted, inProgress, completed. A GPU may override `clusterUUID`,
`cliqueId` and `state`. Every field of a GPU may be left out.

`FabricMonitor` keeps the newest observation. A failed read keeps the last one, since a GPU that is
being reset has not left its rack, and a known clique never becomes none, since jobs run on it.

Source: nvmlDeviceGetGpuFabricInfo (states and status), and NVIDIA's DRA driver with
CrashOnNVLinkFabricErrors.
"""

import asyncio
from collections.abc import Callable
from ctypes import byref
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import structlog

from rackloom.claim.node.cdi import DRIVER_SECONDS
from rackloom.claim.node.plugin import Health
from rackloom.core.cluster import names
from rackloom.core.cluster.names import OLDEST_IMEX_DRIVER, is_driver_too_old
from rackloom.errors import Refused, Retry
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology.discovery.nvidia_driver import driver_missing_error, nvml_session
from rackloom.topology.discovery.sysfs import normal_pci_address
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, declared_key

# Values, and the rule for the clique.


FABRIC_RETRY_SECONDS = 10.0


class FabricState(IntEnum):
    """How far a GPU has registered with the fabric manager (NVML_GPU_FABRIC_STATE_*)."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3


class GpuFabric(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's report about its NVLink fabric."""

    name: str
    """For messages: `gpu-0 (GPU-...)`."""
    state: FabricState
    status: int = 0
    """NVML return code of the registration, once it is completed. 0 means success."""
    cluster_uuid: str = names.NO_CLUSTER
    clique_id: int = 0
    key: GpuKey = GpuKey()
    tray: int | None = None
    health: Health = Health.UNKNOWN
    health_message: str = "this driver does not report the health of the fabric"


class NodeFabric(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of all GPUs of the node. Empty if the node has no GPUs."""

    gpus: tuple[GpuFabric, ...] = ()
    driver_version: str | None = None


def clique_of(fabric: NodeFabric) -> str:
    """`<clusterUUID>.<cliqueId>`, or "" for a node without an NVLink fabric beyond itself.

    Raises `Retry` while it is unknown, naming the GPU.
    """
    found = {_clique_of_gpu(gpu) for gpu in fabric.gpus} - {""}
    if len(found) > 1:
        raise Retry(
            f"the GPUs of this node are in {len(found)} cliques ({', '.join(sorted(found))}):"
            " the fabric is being partitioned, or partitioned wrongly",
            after=FABRIC_RETRY_SECONDS,
        )
    return found.pop() if found else ""


def check_fabric_driver(fabric: NodeFabric) -> None:
    """Raise `Refused` if the driver's IMEX daemon cannot resolve its peers' names again while it runs."""
    version = fabric.driver_version
    if version is not None and is_driver_too_old(version):
        raise Refused(
            f"NVIDIA's driver {version} is older than {OLDEST_IMEX_DRIVER},"
            f" which first follows peers by DNS name",
            nearest_fix=f"install driver {OLDEST_IMEX_DRIVER} or later on the node",
        )


def _clique_of_gpu(gpu: GpuFabric) -> str:
    if gpu.state is FabricState.NOT_SUPPORTED:
        return ""
    if gpu.state is not FabricState.COMPLETED:
        state = gpu.state.name.lower().replace("_", " ")
        reason = f"{gpu.name} has not joined its NVLink fabric: {state}"
        raise Retry(reason, after=FABRIC_RETRY_SECONDS)
    if gpu.status != 0:
        reason = f"{gpu.name} could not join its NVLink fabric: NVML error {gpu.status}"
        raise Retry(reason, after=FABRIC_RETRY_SECONDS)
    return "" if gpu.cluster_uuid == names.NO_CLUSTER else f"{gpu.cluster_uuid}.{gpu.clique_id}"


# The declared fabric.


class _DeclaredState(StrEnum):
    NOT_SUPPORTED = "notSupported"
    NOT_STARTED = "notStarted"
    IN_PROGRESS = "inProgress"
    COMPLETED = "completed"


class _DeclaredGpuFabric(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    uuid: str | None = None
    pci_address: str | None = None
    chassis_serial: str | None = None
    slot: int | None = None
    tray: int | None = None
    module_id: int | None = None
    fabric_guid: str | None = None
    health: Health = Health.UNKNOWN
    cluster_uuid: str | None = msgspec.field(default=None, name="clusterUUID")
    clique_id: int | None = None
    state: _DeclaredState | None = None


class _DeclaredFabric(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    cluster_uuid: str = msgspec.field(default=names.NO_CLUSTER, name="clusterUUID")
    clique_id: int = 0
    state: _DeclaredState = _DeclaredState.COMPLETED
    driver_version: str | None = None
    gpus: tuple[_DeclaredGpuFabric, ...]


def read_declared_fabric(path: Path) -> NodeFabric:
    """Read the file. Raises `Refused` with the reason if the file is invalid."""
    try:
        file = decode_json(path.read_bytes(), path.name, _DeclaredFabric)
        gpus = tuple(_declared_gpu_fabric(index, gpu, file) for index, gpu in enumerate(file.gpus))
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise Refused(
            f"cannot use fabric file {path}: {error}", nearest_fix="docs/compute-domains.md shows its format"
        ) from error
    return NodeFabric(gpus=gpus, driver_version=file.driver_version)


def _declared_gpu_fabric(index: int, gpu: _DeclaredGpuFabric, file: _DeclaredFabric) -> GpuFabric:
    return GpuFabric(
        name=f"gpu-{index}" if gpu.uuid is None else f"gpu-{index} ({gpu.uuid})",
        state=FabricState[(gpu.state or file.state).name],
        cluster_uuid=gpu.cluster_uuid or file.cluster_uuid,
        clique_id=file.clique_id if gpu.clique_id is None else gpu.clique_id,
        key=declared_key(
            uuid=gpu.uuid,
            pci_address=gpu.pci_address,
            chassis_serial=gpu.chassis_serial,
            slot=gpu.slot,
            module_id=gpu.module_id,
            fabric_guid=gpu.fabric_guid,
        ),
        tray=gpu.tray,
        health=gpu.health,
        health_message="declared",
    )


# The fabric as NVML reports it.


_HEALTH_SUMMARIES = {
    1: (Health.HEALTHY, "the NVLink fabric is healthy"),
    2: (Health.UNHEALTHY, "NVML: the NVLink fabric is unhealthy"),
    3: (Health.UNHEALTHY, "NVML: the NVLink fabric has limited capacity"),
}
_NO_SUMMARY = (Health.UNKNOWN, "this driver does not report the health of the fabric")


def read_nvml_fabric(driver_root: Path) -> NodeFabric:
    """The report of every GPU. Blocks for some milliseconds.

    The library is that of the driver below `driver_root`, or else the system's. Raises `Refused` if there is
    no driver, and `Retry` if the driver does not answer.
    """
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            raise driver_missing_error(driver_root)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(gpu_fabric(nvml, index, handle) for index, handle in enumerate(handles))
        return NodeFabric(gpus=gpus, driver_version=nvml.nvmlSystemGetDriverVersion())


def gpu_fabric(nvml: Any, index: int, handle: Any) -> GpuFabric:
    """The report of one GPU. `nvml` is the initialized library. Raises its errors."""
    uuid = nvml.nvmlDeviceGetUUID(handle)
    name = f"gpu-{index} ({uuid})"
    key, tray = _join_key(nvml, handle, uuid)
    info = _fabric_info(nvml, handle)
    if info is None:
        return GpuFabric(name=name, state=FabricState.NOT_SUPPORTED, key=key, tray=tray)
    health, health_message = _HEALTH_SUMMARIES.get(getattr(info, "healthSummary", 0), _NO_SUMMARY)
    return GpuFabric(
        name=name,
        state=FabricState(info.state),
        status=info.status,
        cluster_uuid=str(UUID(bytes=_raw_field(info, "clusterUuid"))),
        clique_id=info.cliqueId,
        key=key,
        tray=tray,
        health=health,
        health_message=health_message,
    )


def _fabric_info(nvml: Any, handle: Any) -> Any:
    """The newest version that this driver fills in, or None if it has no fabric support."""
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


def _join_key(nvml: Any, handle: Any, uuid: str) -> tuple[GpuKey, int | None]:
    """The join key, and the tray's index. Boards outside a rack have no platform information."""
    info = nvml.c_nvmlPlatformInfo_v2_t()
    info.version = nvml.nvmlPlatformInfo_v2
    pci = nvml.nvmlDeviceGetPciInfo(handle).busId
    key = GpuKey(
        gpu_uuid=Fact(uuid, Source.NVML),
        pci_address=Fact(normal_pci_address(pci) or pci.lower(), Source.NVML),
    )
    try:
        nvml.nvmlDeviceGetPlatformInfo(handle, byref(info))
    except nvml.NVMLError:
        return key, None
    serial = _raw_field(info, "chassisSerialNumber").partition(b"\0")[0].decode("ascii", "replace").strip()
    # On Blackwell the GUID has 8 bytes, and the rest of the field is zero.
    guid = int.from_bytes(_raw_field(info, "ibGuid")[:8], "big")
    slot, module, tray = (_raw_field(info, field)[0] for field in ("slotNumber", "moduleId", "trayIndex"))
    place = Fact(SlotKey(serial, slot, module), Source.NVML) if serial else None
    fabric_guid = Fact(guid, Source.NVML) if guid else None
    return msgspec.structs.replace(key, place=place, fabric_guid=fabric_guid), tray


def _raw_field(info: Any, field: str) -> bytes:
    """A field as it lies in memory: the bindings would read it as text and stop at the first zero."""
    layout = getattr(type(info), field)
    return bytes(info)[layout.offset : layout.offset + layout.size]


# The newest observation.


log = structlog.get_logger(__name__)


class FabricMonitor:
    """The newest fabric that could be read, and the clique that follows from it."""

    def __init__(self, read: Callable[[], NodeFabric], wall: Callable[[], float]) -> None:
        self._read = read
        self._wall = wall
        self._clique: str | None = None
        self._observed = False
        self._on_change: Callable[[], None] = lambda: None
        self.fabric = NodeFabric()
        self.observed_at = 0.0
        self.trouble: str | None = "the fabric was not looked at yet"
        """Why the newest observation failed, or None if it succeeded."""
        self.missing: str | None = None
        """The missing part of this node's fabric: a driver, or a newer one. None if nothing is missing."""

    async def clique(self) -> str:
        """The clique of this node, "" for none. Raises `Retry` until it was known, and without a driver."""
        if self._clique is None:
            await self.observe()
        await self.need_driver()
        if self._clique is None:
            raise Retry(self.trouble or "", after=1.0)
        return self._clique

    async def need_driver(self) -> None:
        """Raise `Retry` if the newest observation found something missing."""
        if not self._observed:
            await self.observe()
        if self.missing is not None:
            raise Retry(self.missing, after=DRIVER_SECONDS)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the clique changes, or a driver comes or goes."""
        self._on_change = callback

    async def observe(self) -> None:
        """Read again.

        A failed reading changes nothing: a GPU that is being reset has not left its rack. Nor does a known
        clique become none, since jobs run on it.
        """
        self._observed = True
        try:
            fabric = await asyncio.to_thread(self._read)
            self._set_missing(None)
            clique = clique_of(fabric)
        except Refused as refused:
            self.trouble = str(refused)
            self._set_missing(str(refused))
            return
        except Retry as retry:
            self.trouble = retry.reason
            log.warning("imex.fabric-unknown", reason=retry.reason)
            return
        self.fabric, self.observed_at, self.trouble = fabric, self._wall(), None
        # Jobs run on the known clique: a GPU that reports none, as after a reset, does not take it away.
        if clique == self._clique or (self._clique and not clique):
            return
        log.info("imex.clique", clique=clique, before=self._clique)
        self._clique = clique
        self._on_change()

    def _set_missing(self, missing: str | None) -> None:
        if missing != self.missing:
            log.warning("imex.driver", missing=missing)
            self.missing = missing
            self._on_change()
