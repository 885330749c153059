"""The GPUs of a node through NVML: inventory, and errors as they happen (XID events).

A GPU that has fallen off the bus or needs a reset is left out, and the others are still read. Values that
an older driver or a smaller GPU does not have are None. A recovery action that this version does not know
counts as the strongest one.

`NvmlGpus` is the source that the plugin uses. `mig` reads and makes MIG devices. `wait` blocks on an
NVML event set for XID critical errors. It starts a new session after any NVML error, since events of a GPU
that was lost do not come back otherwise, and when another library counts. It ends its session
when a driver container is about to end: with the GPUs open, the kernel module could not be unloaded. GPUs
that do not support events are reported as unmonitored.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rackloom.claim.node.fabric import FabricState, GpuFabric, NodeFabric, clique_of, gpu_fabric
from rackloom.claim.node.gpu.inventory import (
    GpuInventory,
    MigDevice,
    MigPartition,
    NodeGpu,
    RecoveryAction,
    XidError,
)
from rackloom.claim.node.gpu.mig import (
    destroy_mig_device,
    leave_mig_mode,
    make_mig_device,
    mig_devices,
    mig_mode,
    mig_partitions,
    mig_switchable,
)
from rackloom.claim.node.gpu.xids import recovery_action
from rackloom.errors import Retry
from rackloom.topology.discovery.nvidia_driver import (
    NVML_RETRY_SECONDS,
    driver_missing_error,
    nvml_fingerprint,
    nvml_session,
)
from rackloom.topology.discovery.sysfs import normal_pci_address

# The inventory.


T = TypeVar("T")
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
_ADDRESSING = {0: "None", 1: "HMM", 2: "ATS"}


def read_gpus(driver_root: Path, *, dynamic_mig: bool = False) -> GpuInventory:
    """Every GPU that answers, with the MIG devices that may be made on it if `dynamic_mig`.

    Raises `Refused` if the driver is missing, and `Retry` if it fails.
    """
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            raise driver_missing_error(driver_root)
        read = (_read_if_present(nvml, index, dynamic_mig) for index in range(nvml.nvmlDeviceGetCount()))
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuInventory(
            gpus=tuple(gpu for gpu in read if gpu is not None),
            driver_version=nvml.nvmlSystemGetDriverVersion(),
            # NVML reports 12080 for 12.8.
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
        )


def if_supported(nvml: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None if the GPU or its driver does not support the question."""
    unknown = (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
        nvml.NVMLError_NoPermission,
    )
    try:
        return question()
    except unknown:
        return None


def _read_if_present(nvml: Any, index: int, dynamic_mig: bool) -> NodeGpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _read_gpu(nvml, handle, gpu_fabric(nvml, index, handle), dynamic_mig)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        return None


def _read_gpu(nvml: Any, handle: Any, fabric: GpuFabric, dynamic_mig: bool) -> NodeGpu:
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    in_mig_mode = mig_mode(nvml, handle)
    return NodeGpu(
        minor=nvml.nvmlDeviceGetMinorNumber(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        pci_address=normal_pci_address(bus_id) or bus_id.lower(),
        product=nvml.nvmlDeviceGetName(handle),
        memory_bytes=_memory(nvml, handle),
        brand=_BRANDS.get(nvml.nvmlDeviceGetBrand(handle)),
        architecture=_ARCHITECTURES.get(nvml.nvmlDeviceGetArchitecture(handle)),
        compute_capability="{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        addressing_mode=if_supported(nvml, lambda: _addressing(nvml, handle)),
        mig_mode=in_mig_mode,
        migs=mig_devices(nvml, handle) if in_mig_mode else (),
        partitions=mig_partitions(nvml, handle) if dynamic_mig else (),
        mig_switchable=dynamic_mig and mig_switchable(nvml, handle),
        recovery=if_supported(nvml, lambda: _recovery(nvml, handle)),
        key=fabric.key,
        tray=fabric.tray,
        clique=_clique_or_none(fabric),
        fabric_health=fabric.health,
        fabric_message=fabric.health_message,
        fabric_joining=fabric.state in (FabricState.NOT_STARTED, FabricState.IN_PROGRESS),
    )


def _clique_or_none(fabric: GpuFabric) -> str:
    """A GPU that is still registering has none yet: absent means unknown."""
    try:
        return clique_of(NodeFabric(gpus=(fabric,)))
    except Retry:
        return ""


def _memory(nvml: Any, handle: Any) -> int:
    """Bytes. A GPU that shares the machine's memory (DGX Spark) has none."""
    memory = if_supported(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return 0 if memory is None else int(memory.total)


def _addressing(nvml: Any, handle: Any) -> str | None:
    """How the GPU reaches the host's pageable memory. The bindings leave the version out of the request."""
    from ctypes import byref

    mode = nvml.c_nvmlDeviceAddressingMode_t()
    mode.version = nvml.nvmlDeviceAddressingMode_v1
    nvml._nvmlCheckReturn(nvml._nvmlGetFunctionPointer("nvmlDeviceGetAddressingMode")(handle, byref(mode)))
    return _ADDRESSING.get(mode.value)


def _recovery(nvml: Any, handle: Any) -> RecoveryAction | None:
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return recovery_action(int(field.value.uiVal))


# XID events.


class NvmlGpus:
    """The GPUs that NVML knows.

    `read` and `wait` take turns. `wait` starts to listen again after trouble, since events of a GPU
    that was lost do not come back otherwise.
    """

    def __init__(self, driver_root: Path, *, dynamic_mig: bool = False) -> None:
        self._driver_root = driver_root
        self._dynamic_mig = dynamic_mig
        self._session = ExitStack()
        self._events: Any = None
        self._fingerprint: tuple[object, ...] = ()
        self._unmonitored: frozenset[str] = frozenset()
        self._sessions = threading.RLock()

    def read(self) -> GpuInventory:
        """Every GPU that answers. Raises `Retry`, or `Refused` if the driver is missing."""
        with self._sessions:
            return read_gpus(self._driver_root, dynamic_mig=self._dynamic_mig)

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """The next error within `seconds`, if there is one. Raises `Retry`."""
        with self._sessions:
            return self._wait(seconds)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing of the driver is open here while this is entered: `read` and `wait` wait."""
        with self._sessions:
            self.close()
            yield

    def _wait(self, seconds: float) -> tuple[XidError, ...]:
        import pynvml

        fingerprint = nvml_fingerprint(self._driver_root)
        if fingerprint != self._fingerprint:
            self.close()
            self._fingerprint = fingerprint
        try:
            if self._events is None:
                self._listen()
            event = pynvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
            return (XidError(uuid=pynvml.nvmlDeviceGetUUID(event.device), number=int(event.eventData)),)
        except pynvml.NVMLError_Timeout:
            return ()
        except pynvml.NVMLError as error:
            self.close()
            raise Retry(f"NVML tells of no events: {error}", after=NVML_RETRY_SECONDS) from error

    def unmonitored(self) -> frozenset[str]:
        """UUIDs of GPUs that cannot be listened to."""
        return self._unmonitored

    def make(self, partition: MigPartition, *, began: bool) -> MigDevice:
        """Make a MIG device, or complete one. Raises `Retry`, `PlaceTaken` or `Refused`."""
        with self._handle(partition.gpu) as (nvml, handle):
            return make_mig_device(nvml, handle, partition, began=began)

    def destroy(self, partition: MigPartition) -> None:
        """Destroy a MIG device if it exists. Raises `Retry`."""
        with self._handle(partition.gpu) as (nvml, handle):
            destroy_mig_device(nvml, handle, partition)

    def leave_mig_mode(self, uuid: str) -> None:
        """Take a whole GPU out of MIG mode. Raises `Retry`."""
        with self._handle(uuid) as (nvml, handle):
            leave_mig_mode(nvml, handle, uuid)

    @contextmanager
    def _handle(self, uuid: str) -> Iterator[tuple[Any, Any]]:
        with nvml_session(self._driver_root) as nvml:
            if nvml is None:
                raise Retry("NVIDIA's driver is not loaded", after=NVML_RETRY_SECONDS)
            yield nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)

    def close(self) -> None:
        """Stop listening."""
        self._events = None
        with suppress(Retry):
            self._session.close()

    def _listen(self) -> None:
        nvml = self._session.enter_context(nvml_session(self._driver_root))
        if nvml is None:
            self.close()
            raise Retry("NVIDIA's driver is not loaded, or is being replaced", after=NVML_RETRY_SECONDS)
        events = nvml.nvmlEventSetCreate()
        self._session.callback(nvml.nvmlEventSetFree, events)
        registered = [_register(nvml, events, index) for index in range(nvml.nvmlDeviceGetCount())]
        self._unmonitored = frozenset(uuid for uuid in registered if uuid is not None)
        self._events = events


def _register(nvml: Any, events: Any, index: int) -> str | None:
    """Register for the events of one GPU. Returns its UUID if it has no events. A lost GPU returns None."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError_NotSupported:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        pass
    return None
