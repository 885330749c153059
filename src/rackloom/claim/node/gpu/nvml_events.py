"""NVIDIA's driver as the source of GPUs, and of their errors as they happen (XID events)."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rackloom.claim.node.gpu.inventory import Inventory, Xid
from rackloom.claim.node.gpu.nvml import read_gpus
from rackloom.errors import Retry
from rackloom.topology.discovery.nvml import RETRY_SECONDS, nvml_session


class NvmlGpus:
    """The GPUs that NVML knows.

    `wait` is called by one thread at a time. It starts to listen anew after trouble, since events of a GPU
    that was lost do not come back by themselves.
    """

    def __init__(self, driver_root: Path) -> None:
        self._driver_root = driver_root
        self._session = ExitStack()
        self._events: Any = None
        self._deaf: frozenset[str] = frozenset()

    def read(self) -> Inventory:
        """Every GPU that answers. Raises `Retry`, or `Refused` where the driver is missing."""
        return read_gpus(self._driver_root)

    def wait(self, seconds: float) -> tuple[Xid, ...]:
        """The next error within `seconds`, if there is one. Raises `Retry`."""
        import pynvml

        try:
            if self._events is None:
                self._listen()
            event = pynvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
            return (Xid(uuid=pynvml.nvmlDeviceGetUUID(event.device), number=int(event.eventData)),)
        except pynvml.NVMLError_Timeout:
            return ()
        except pynvml.NVMLError as error:
            self.close()
            raise Retry(f"NVML tells of no events: {error}", after=RETRY_SECONDS) from error

    def unmonitored(self) -> frozenset[str]:
        """UUIDs of GPUs that cannot be listened to."""
        return self._deaf

    def close(self) -> None:
        """Stop listening."""
        self._events = None
        with suppress(Retry):
            self._session.close()

    def _listen(self) -> None:
        nvml = self._session.enter_context(nvml_session(self._driver_root))
        if nvml is None:
            self.close()
            raise Retry("NVIDIA's driver is not loaded", after=RETRY_SECONDS)
        events = nvml.nvmlEventSetCreate()
        self._session.callback(nvml.nvmlEventSetFree, events)
        registered = [_register(nvml, events, index) for index in range(nvml.nvmlDeviceGetCount())]
        self._deaf = frozenset(uuid for uuid in registered if uuid is not None)
        self._events = events


def _register(nvml: Any, events: Any, index: int) -> str | None:
    """Listen to one GPU; its UUID where that is not possible. One that is lost tells nothing anyway."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError_NotSupported:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        pass
    return None
