"""The buffer of one end: host memory, or memory of a GPU; filled, wiped and hashed the same way."""

import hashlib
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rackloom.errors import Refused
from rackloom.prove.transfer.cuda import DeviceMemory
from rackloom.prove.transfer.messages import Descriptor

Memory = Literal["DRAM", "VRAM"]
"""NIXL's words for host and GPU memory."""
_COPIES = 10
_CHUNK = 64 << 20
"""Bytes filled and hashed at a time, so that neither needs a second buffer of full size."""


def pages(size: int) -> mmap.mmap:
    """Zeroed private memory that begins on a page.

    The kernel copies to and from a socket with `rep movsb`, which costs a third of the rate over loopback on
    AMD's processors where source and destination differ in alignment; what malloc gives begins 16 bytes
    into a page.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer(ABC):
    """`size` bytes at `address` that NIXL can register as `memory` of device `ordinal`."""

    memory: Memory
    ordinal = 0

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    @abstractmethod
    def address(self) -> int:
        """Of the first byte."""

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
        """Shortest time in which this device copies a whole buffer to another; None if nobody asks (host)."""
        return None

    def fill(self, seed: int) -> None:
        """Overwrite everything with the pseudo-random bytes of `seed`."""
        import numpy as np

        generator = np.random.Generator(np.random.SFC64(seed))
        for start in range(0, self.size, _CHUNK):
            size = min(_CHUNK, self.size - start)
            words = generator.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
            self.put(start, words.view(np.uint8)[:size])

    def digest(self) -> str:
        """blake2b-256 of everything, hexadecimal."""
        hasher = hashlib.blake2b(digest_size=32)
        for start in range(0, self.size, _CHUNK):
            hasher.update(self.get(start, min(_CHUNK, self.size - start)).data)
        return hasher.hexdigest()

    def blocks(self, block_size: int) -> tuple[Descriptor, ...]:
        """One descriptor per block, in address order."""
        start = self.address
        return tuple((start + offset, block_size, self.ordinal) for offset in range(0, self.size, block_size))


class HostBuffer(Buffer):
    """Host memory, zeroed.

    Raises:
        Refused: the host does not have that much memory to give.
    """

    memory: Memory = "DRAM"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        available = _available_memory()
        if available is not None and 2 * size > available:  # the other end may live here too
            raise Refused(
                f"two buffers of {size} bytes where {available} bytes are available",
                nearest_fix="ask for smaller or fewer blocks",
            )
        import numpy as np

        self.array = np.frombuffer(pages(size), np.uint8)

    @property
    def address(self) -> int:
        """Of the first byte."""
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
    """Memory of a GPU.

    Raises:
        Refused: as DeviceMemory.
    """

    memory: Memory = "VRAM"

    def __init__(self, device: DeviceMemory, size: int) -> None:
        super().__init__(size)
        self._device, self.ordinal = device, device.ordinal

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._device.address

    def put(self, offset: int, data: Any) -> None:
        """Overwrite from `offset` with a uint8 array."""
        self._device.write(offset, data.ctypes.data, data.size)

    def get(self, offset: int, size: int) -> Any:
        """A copy of `size` bytes from `offset` in host memory."""
        import numpy as np

        copy = np.empty(size, np.uint8)
        self._device.read(offset, copy.ctypes.data, size)
        return copy

    def wipe(self) -> None:
        """Zero everything."""
        self._device.zero(self.size)

    def copy_seconds(self) -> float | None:
        """Shortest of some copies to a second buffer; None if there is no room for one."""
        try:
            other = DeviceMemory(f"cuda:{self.ordinal}", self.size)
        except Refused:
            return None
        try:
            return min(_seconds(lambda: other.copy_from(self._device, self.size)) for _ in range(_COPIES))
        finally:
            other.free()

    def close(self) -> None:
        """Give the memory back."""
        self._device.free()


def allocate(device: str, size: int) -> Buffer:
    """A buffer on `cpu`, `cuda:N` or `fabric:N` (N: an ordinal or a PCI address).

    Raises:
        Refused: no such device, or not enough memory.
    """
    kind, colon, which = device.partition(":")
    if device == "cpu":
        return HostBuffer(size)
    if kind in ("cuda", "fabric") and colon and which:
        return DeviceBuffer(DeviceMemory(device, size), size)
    raise Refused(f"{device!r} is no device", nearest_fix="use cpu, cuda:0 or fabric:0 (or a PCI address)")


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
