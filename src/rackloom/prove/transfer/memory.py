"""NIXL and the buffer: everything that needs the optional wheels is imported here, when an end starts.

Without wheels for the platform the feature says so and nothing else breaks.
"""

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rackloom.errors import Refused
from rackloom.prove.transfer import ucx
from rackloom.prove.transfer.messages import Descriptor
from rackloom.prove.transfer.values import Op, TransferSpec, Ucx

NOT_INSTALLED = "NIXL is not installed: no wheel for this platform"
_FIX = "install requirements/nixl.txt (Linux on x86-64 or arm64)"
_BACKENDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_CHUNK = 64 << 20
"""Bytes filled at a time, so that filling needs no second buffer of full size."""


def missing() -> str | None:
    """Why no transfer can run here, or None. Imports nothing."""
    if sys.platform != "linux" or not find_spec("nixl") or not find_spec("numpy"):
        return NOT_INSTALLED
    return None if any(find_spec(name) for name in _BACKENDS) else NOT_INSTALLED


def require() -> None:
    """Raise Refused where `missing` has something to say."""
    if reason := missing():
        raise Refused(reason, nearest_fix=_FIX)


def nixl_version() -> str:
    """Version of the installed NIXL distribution."""
    return version("nixl")


class Buffer:
    """Host memory of `size` bytes, zeroed.

    Raises:
        Refused: the host does not have that much memory to give.
    """

    def __init__(self, size: int) -> None:
        available = _available_memory()
        if available is not None and 2 * size > available:  # the other end may live here too
            raise Refused(
                f"two buffers of {size} bytes where {available} bytes are available",
                nearest_fix="ask for smaller or fewer blocks",
            )
        import numpy as np

        self.array = np.zeros(size, np.uint8)

    def fill(self, seed: int) -> None:
        """Overwrite everything with the pseudo-random bytes of `seed`."""
        import numpy as np

        generator = np.random.Generator(np.random.SFC64(seed))
        for start in range(0, self.array.size, _CHUNK):
            part = self.array[start : start + _CHUNK]
            words = generator.integers(0, 1 << 64, -(-part.size // 8), dtype=np.uint64)
            part[:] = words.view(np.uint8)[: part.size]

    def wipe(self) -> None:
        """Zero everything."""
        self.array.fill(0)

    def digest(self) -> str:
        """blake2b-256 of everything, hexadecimal."""
        return hashlib.blake2b(self.array.data, digest_size=32).hexdigest()

    def blocks(self, block_size: int) -> tuple[Descriptor, ...]:
        """One descriptor per block, in address order."""
        start, size = self.array.ctypes.data, self.array.size
        return tuple((start + offset, block_size, 0) for offset in range(0, size, block_size))


class Agent:
    """A NIXL agent on the UCX backend with one registered buffer; made by `open_agent`."""

    def __init__(self, role: str, buffer: Buffer, log: Path, *, progress_thread: bool) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except (ImportError, OSError) as error:
            raise Refused(f"{NOT_INSTALLED} ({error})", nearest_fix=_FIX) from error
        self.buffer, self._log = buffer, log
        try:
            self.nixl: Any = nixl_agent(
                role, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
            )
            whole = [(buffer.array.ctypes.data, buffer.array.size, 0, "")]
            self._registered = self.nixl.register_memory(whole, "DRAM")
        except Exception as error:
            raise Refused(
                self.explain(f"UCX could not be started: {error}"),
                nearest_fix="check that the pinned devices and transports exist at this end",
            ) from error

    def explain(self, problem: str) -> str:
        """`problem` with what UCX itself logged about it."""
        said = ucx.complaint(self._read_log())
        return f"{problem} (UCX: {said})" if said else problem

    def protocols(self, op: Op) -> tuple[str, ...]:
        """What UCX uses for `op` towards the peer."""
        return ucx.protocols(self._read_log(), op)

    def request(self, spec: TransferSpec, peer: str, remote: tuple[Descriptor, ...]) -> Any:
        """A reusable request that moves this buffer to (WRITE) or from (READ) the peer's blocks."""
        local = self.nixl.get_xfer_descs(list(self.buffer.blocks(spec.block_size)), "DRAM")
        return self.nixl.initialize_xfer(
            spec.op, local, self.nixl.get_xfer_descs(list(remote), "DRAM"), peer, backends=["UCX"]
        )

    def release(self) -> None:
        """Deregister the buffer."""
        self.nixl.deregister_memory(self._registered)

    def _read_log(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX leaves its last lines in the C library's buffer
        return self._log.read_text(errors="replace") if self._log.exists() else ""


@contextmanager
def open_agent(role: str, spec: TransferSpec, pins: Ucx, *, progress_thread: bool) -> Iterator[Agent]:
    """An agent with a buffer of `spec.total_bytes`, pinned by `pins`. Changes this process' environment.

    Raises:
        Refused: not enough memory, no NIXL, or UCX cannot use what it was pinned to.
    """
    require()
    with TemporaryDirectory(prefix="rackloom-transfer-") as directory:
        log = Path(directory, "ucx.log")
        os.environ |= ucx.environment(pins, log)
        agent = Agent(role, Buffer(spec.total_bytes), log, progress_thread=progress_thread)
        try:
            yield agent
        finally:
            agent.release()


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
