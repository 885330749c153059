"""The buffer of one end, in host or GPU memory: filled from a seed, wiped, and hashed in the same way.

`HostBuffer` is private memory that begins on a page. The kernel copies to and from sockets with `rep
movsb`, which loses a third of the rate over loopback on AMD processors if source and destination differ
in alignment. Memory from malloc begins 16 bytes into a page. It refuses sizes for which two buffers would
not fit into available memory.

`DeviceBuffer` calls the CUDA driver API through ctypes, so no CUDA package is needed beside the driver.
`cuda:N` allocates with cuMemAlloc. `fabric:N` uses the virtual memory management calls with a fabric
handle, which NVLink needs to reach the memory from another node of its domain. UCX's cuda_ipc maps it
there. The primary context has to be current before UCX starts, or UCX takes the memory for the host's.

numpy is imported only when a buffer is made.
"""

import ctypes
import hashlib
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from pathlib import Path
from typing import Any, Literal

from rackloom.errors import Refused
from rackloom.prove.transfer.channel import BlockDescriptor

# GPU memory through the CUDA driver API.


CUDA_LIBRARY = "libcuda.so.1"
_FABRIC_SUPPORTED = 128
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED."""
_RDMA_SUPPORTED = 110
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED."""
_FABRIC_HANDLE = 8
"""CU_MEM_HANDLE_TYPE_FABRIC."""
_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

LibraryLoader = Callable[[str], Any]


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


class CudaDriver:
    """The CUDA driver, initialised. Every call that fails is a Refused that names it.

    Raises:
        Refused: there is no driver, or it does not start.
    """

    def __init__(self, load: LibraryLoader = ctypes.CDLL) -> None:
        try:
            self._library = load(CUDA_LIBRARY)
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
                f"{name} failed: {self._error_name(code)}", nearest_fix="see `nvidia-smi` on this host"
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

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        with suppress(AttributeError):
            self._library.cuGetErrorName(code, byref(text))
        return (text.value or b"an unnamed error").decode() + f" ({code})"


# Buffers that NIXL can register.


MemoryKind = Literal["DRAM", "VRAM"]
"""NIXL's words for host and GPU memory."""
_COPY_REPEATS = 10
_CHUNK_BYTES = 64 << 20
"""Bytes filled and hashed at a time, so that neither needs a second buffer of full size."""


def page_aligned(size: int) -> mmap.mmap:
    """Zeroed private memory that begins on a page.

    The kernel copies to and from a socket with `rep movsb`, which costs a third of the rate over loopback on
    AMD's processors if source and destination differ in alignment. Memory from malloc begins 16 bytes
    into a page.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer(ABC):
    """`size` bytes at `address` that NIXL can register as `memory` of device `ordinal`."""

    memory: MemoryKind
    ordinal = 0

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    @abstractmethod
    def address(self) -> int:
        """The address of the first byte."""

    @abstractmethod
    def put(self, offset: int, data: Any) -> None:
        """Overwrite from `offset` with a uint8 array."""

    @abstractmethod
    def get(self, offset: int, size: int) -> Any:
        """A uint8 array with `size` bytes from `offset`."""

    @abstractmethod
    def wipe(self) -> None:
        """Zero everything."""

    def close(self) -> None:  # noqa: B027 (host memory goes with its array)
        """Give the memory back."""

    def copy_seconds(self) -> float | None:
        """Shortest time in which this device copies a whole buffer to another, or None for host memory."""
        return None

    def fill(self, seed: int) -> None:
        """Overwrite everything with the pseudo-random bytes of `seed`."""
        import numpy as np

        generator = np.random.Generator(np.random.SFC64(seed))
        for start in range(0, self.size, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, self.size - start)
            words = generator.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
            self.put(start, words.view(np.uint8)[:size])

    def digest(self) -> str:
        """blake2b-256 of everything, hexadecimal."""
        hasher = hashlib.blake2b(digest_size=32)
        for start in range(0, self.size, _CHUNK_BYTES):
            hasher.update(self.get(start, min(_CHUNK_BYTES, self.size - start)).data)
        return hasher.hexdigest()

    def blocks(self, block_size: int) -> tuple[BlockDescriptor, ...]:
        """One descriptor per block, in address order."""
        start = self.address
        return tuple((start + offset, block_size, self.ordinal) for offset in range(0, self.size, block_size))


class HostBuffer(Buffer):
    """Host memory, zeroed.

    Raises:
        Refused: the host does not have that much memory to give.
    """

    memory: MemoryKind = "DRAM"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        available = _available_memory()
        if available is not None and 2 * size > available:  # the other end may live here too
            raise Refused(
                f"two buffers of {size} bytes where {available} bytes are available",
                nearest_fix="ask for smaller or fewer blocks",
            )
        import numpy as np

        self.array = np.frombuffer(page_aligned(size), np.uint8)

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(self.array.ctypes.data)

    def put(self, offset: int, data: Any) -> None:
        """Overwrite from `offset` with a uint8 array."""
        self.array[offset : offset + data.size] = data

    def get(self, offset: int, size: int) -> Any:
        """A view of `size` bytes from `offset`."""
        return self.array[offset : offset + size]

    def wipe(self) -> None:
        """Zero everything."""
        self.array.fill(0)


class DeviceBuffer(Buffer):
    """Memory of one GPU. Its primary context becomes current in this thread.

    `name` is `cuda:N` or `fabric:N` with an ordinal or a PCI address for N.

    Raises:
        Refused: no such GPU, not enough memory, or no fabric to share it over.
    """

    memory: MemoryKind = "VRAM"

    def __init__(self, name: str, size: int, load: LibraryLoader = ctypes.CDLL) -> None:
        super().__init__(size)
        kind, _, which = name.partition(":")
        self._driver = CudaDriver(load)
        self._call = self._driver.call
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
        """The address of the first byte, in the unified address space."""
        return self._pointer.value

    def put(self, offset: int, data: Any) -> None:
        """Overwrite from `offset` with a uint8 array."""
        source = c_void_p(data.ctypes.data)
        self._call("cuMemcpyHtoD_v2", c_ulonglong(self.address + offset), source, c_size_t(data.size))

    def get(self, offset: int, size: int) -> Any:
        """A copy of `size` bytes from `offset` in host memory."""
        import numpy as np

        copy = np.empty(size, np.uint8)
        sink = c_void_p(copy.ctypes.data)
        self._call("cuMemcpyDtoH_v2", sink, c_ulonglong(self.address + offset), c_size_t(size))
        return copy

    def wipe(self) -> None:
        """Zero everything."""
        self._call("cuMemsetD8_v2", c_ulonglong(self.address), c_ubyte(0), c_size_t(self.size))
        self._call("cuCtxSynchronize")

    def copy_from(self, other: "DeviceBuffer") -> None:
        """Copy within the GPU and wait for it: the most that any transfer on this GPU could reach."""
        whole = c_size_t(self.size)
        self._call("cuMemcpyDtoD_v2", c_ulonglong(self.address), c_ulonglong(other.address), whole)
        self._call("cuCtxSynchronize")

    def copy_seconds(self) -> float | None:
        """Shortest of some copies to a second buffer, or None if there is no room for one."""
        try:
            other = DeviceBuffer(f"cuda:{self.ordinal}", self.size)
        except Refused:
            return None
        try:
            return min(_seconds_of(lambda: other.copy_from(self)) for _ in range(_COPY_REPEATS))
        finally:
            other.close()

    def close(self) -> None:
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
        properties = _Properties(type=_PINNED, handle_types=_FABRIC_HANDLE, location=here)
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


def allocate_buffer(device: str, size: int) -> Buffer:
    """A buffer on `cpu`, `cuda:N` or `fabric:N` (N: an ordinal or a PCI address).

    Raises:
        Refused: no such device, or not enough memory.
    """
    kind, colon, which = device.partition(":")
    if device == "cpu":
        return HostBuffer(size)
    if kind in ("cuda", "fabric") and colon and which:
        return DeviceBuffer(device, size)
    raise Refused(f"{device!r} is no device", nearest_fix="use cpu, cuda:0 or fabric:0 (or a PCI address)")


def _seconds_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
