"""GPU memory through the CUDA driver itself, so that no CUDA package is needed beside the driver.

Two ways to allocate: cuMemAlloc (`cuda:`), and the virtual memory management calls with a fabric handle
(`fabric:`), which is what NVLink needs to reach the memory from another node of its domain; UCX's cuda_ipc
then maps it there. A context has to be current before UCX starts, or UCX takes the memory for the host's.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Any

from rackloom.errors import Refused

LIBRARY = "libcuda.so.1"
_FABRIC_SUPPORTED = 128
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED."""
_RDMA_SUPPORTED = 110
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED."""
_FABRIC = 8
"""CU_MEM_HANDLE_TYPE_FABRIC."""
_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

Load = Callable[[str], Any]


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


def missing(load: Load = ctypes.CDLL) -> str | None:
    """Why there is no GPU to use here, or None. Asks the driver, and makes no context."""
    try:
        driver = Driver(load)
    except Refused as refused:
        return refused.reason
    return None if driver.count() else "the CUDA driver finds no GPU"


class Driver:
    """The CUDA driver, initialised; every call that fails is a Refused that names it.

    Raises:
        Refused: there is no driver, or it does not start.
    """

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise Refused(
                f"there is no CUDA driver here ({error})",
                nearest_fix="use --device cpu, or a host with a GPU",
            ) from error
        self.call("cuInit", c_uint(0))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver API.

        Raises:
            Refused: it returned anything but CUDA_SUCCESS.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            raise Refused(
                f"{name} failed: {self._word_for(code)}", nearest_fix="see `nvidia-smi` on this host"
            )

    def count(self) -> int:
        """GPUs that this process may use."""
        number = c_int()
        self.call("cuDeviceGetCount", byref(number))
        return number.value

    def addresses(self) -> tuple[str, ...]:
        """PCI addresses of the GPUs that this process may use, by ordinal, as sysfs writes them."""
        return tuple(self.address(ordinal) for ordinal in range(self.count()))

    def address(self, ordinal: int) -> str:
        """PCI address of one GPU, as sysfs writes it."""
        device, text = c_int(), ctypes.create_string_buffer(32)
        self.call("cuDeviceGet", byref(device), c_int(ordinal))
        self.call("cuDeviceGetPCIBusId", text, c_int(len(text)), device)
        return text.value.decode().lower()

    def _word_for(self, code: int) -> str:
        text = ctypes.c_char_p()
        with suppress(AttributeError):
            self._library.cuGetErrorName(code, byref(text))
        return (text.value or b"an unnamed error").decode() + f" ({code})"


class DeviceMemory:
    """`size` bytes on one GPU, whose primary context becomes current in this thread.

    `name` is `cuda:N` or `fabric:N` with an ordinal or a PCI address for N.

    Raises:
        Refused: no such GPU, not enough memory, or no fabric to share it over.
    """

    def __init__(self, name: str, size: int, load: Load = ctypes.CDLL) -> None:
        kind, _, which = name.partition(":")
        self._driver = Driver(load)
        self.ordinal = self._find(which)
        self._device = c_int()
        self._call("cuDeviceGet", byref(self._device), c_int(self.ordinal))
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._pointer = c_ulonglong()
        self._handle: c_ulonglong | None = None
        self._reserved = size
        if kind == "fabric":
            self._map_fabric(size)
        else:
            self._call("cuMemAlloc_v2", byref(self._pointer), c_size_t(size))

    @property
    def address(self) -> int:
        """Of the first byte, in the unified address space."""
        return self._pointer.value

    def write(self, offset: int, source: int, size: int) -> None:
        """Copy `size` bytes from the host address `source`."""
        self._call("cuMemcpyHtoD_v2", c_ulonglong(self.address + offset), c_void_p(source), c_size_t(size))

    def read(self, offset: int, sink: int, size: int) -> None:
        """Copy `size` bytes to the host address `sink`."""
        self._call("cuMemcpyDtoH_v2", c_void_p(sink), c_ulonglong(self.address + offset), c_size_t(size))

    def copy_from(self, other: "DeviceMemory", size: int) -> None:
        """Copy within the GPU and wait for it: the most that any transfer on this GPU could reach."""
        self._call("cuMemcpyDtoD_v2", c_ulonglong(self.address), c_ulonglong(other.address), c_size_t(size))
        self.synchronize()

    def zero(self, size: int) -> None:
        """Zero the first `size` bytes."""
        self._call("cuMemsetD8_v2", c_ulonglong(self.address), c_ubyte(0), c_size_t(size))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was asked for."""
        self._call("cuCtxSynchronize")

    def free(self) -> None:
        """Give the memory back."""
        if self._handle is None:
            self._call("cuMemFree_v2", self._pointer)
            return
        self._call("cuMemUnmap", self._pointer, c_size_t(self._reserved))
        self._call("cuMemAddressFree", self._pointer, c_size_t(self._reserved))
        self._call("cuMemRelease", self._handle)

    def _find(self, which: str) -> int:
        if which.isdecimal():
            if int(which) >= self._driver.count():
                raise Refused(
                    f"there is no GPU {which}: the CUDA driver finds {self._driver.count()}",
                    nearest_fix="count from 0 among the GPUs this process may use, or give a PCI address",
                )
            return int(which)
        device = c_int()
        self._call("cuDeviceGetByPCIBusId", byref(device), which.encode())
        return device.value

    def _map_fabric(self, size: int) -> None:
        if not self._attribute(_FABRIC_SUPPORTED):
            raise Refused(
                f"GPU {self.ordinal} has no fabric handles: it is in no multi-node NVLink domain",
                nearest_fix="use cuda: for this GPU",
            )
        here = _Location(_ON_DEVICE, self._device.value)
        properties = _Properties(type=_PINNED, handle_types=_FABRIC, location=here)
        properties.flags.gpu_direct_rdma = self._attribute(_RDMA_SUPPORTED)
        grain = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(grain), byref(properties), c_int(0))
        self._reserved = -(-size // grain.value) * grain.value
        whole, handle = c_size_t(self._reserved), c_ulonglong()
        self._call("cuMemCreate", byref(handle), whole, byref(properties), c_ulonglong(0))
        self._handle = handle
        self._call(
            "cuMemAddressReserve", byref(self._pointer), whole, c_size_t(0), c_ulonglong(0), c_ulonglong(0)
        )
        self._call("cuMemMap", self._pointer, whole, c_size_t(0), handle, c_ulonglong(0))
        access = _Access(here, _READ_WRITE)
        self._call("cuMemSetAccess", self._pointer, whole, byref(access), c_size_t(1))

    def _attribute(self, which: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(which), self._device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        self._driver.call(name, *arguments)
