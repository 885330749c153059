"""NIXL and its agent: the optional wheels are imported here, when an end starts.

Without wheels for the platform, or with wheels that this host cannot load, the feature says so and nothing
else breaks.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rackloom.errors import Refused
from rackloom.prove.transfer import ucx
from rackloom.prove.transfer.buffers import Buffer, Memory, allocate
from rackloom.prove.transfer.messages import Descriptor
from rackloom.prove.transfer.values import Op, Seat, TransferSpec

NOT_INSTALLED = "NIXL is not installed: no wheel for this platform"
_FIX = "install requirements/nixl.txt (Linux on x86-64 or arm64)"
_BACKENDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_IMPORT_SECONDS = 60.0
_UCX_CORE = re.compile(r"\S*/libucp\S*\.so\S*")


def missing() -> str | None:
    """Why no transfer can run here, or None. Imports nothing into this process."""
    if sys.platform != "linux" or not find_spec("nixl") or not find_spec("numpy"):
        return NOT_INSTALLED
    if not any(find_spec(name) for name in _BACKENDS):
        return NOT_INSTALLED
    return _import_problem()


@cache
def _import_problem() -> str | None:
    """Why NIXL cannot be imported, tried in a process of its own: foreign machine code may kill it."""
    command = (sys.executable, "-P", "-c", "import nixl._api")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_IMPORT_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"NIXL is installed, but importing it takes more than {_IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = (done.stderr.strip().splitlines() or [f"the import ended with {done.returncode}"])[-1]
    return f"NIXL is installed, but cannot be imported: {said}"


def require() -> None:
    """Raise Refused where `missing` has something to say."""
    if reason := missing():
        raise Refused(reason, nearest_fix=_FIX)


def nixl_version() -> str:
    """Version of the installed NIXL distribution."""
    return version("nixl")


def ucx_version() -> str | None:
    """Version of the UCX that NIXL loaded into this process, from UCX itself; None before it did."""
    found = _UCX_CORE.search(Path("/proc/self/maps").read_text())
    if found is None:
        return None
    library = ctypes.CDLL(found.group())
    library.ucp_get_version_string.restype = ctypes.c_char_p
    said: bytes = library.ucp_get_version_string()
    return said.decode()


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
            whole = [(buffer.address, buffer.size, buffer.ordinal, "")]
            self._registered = self.nixl.register_memory(whole, buffer.memory)
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

    def request(
        self, spec: TransferSpec, peer: str, remote: tuple[Descriptor, ...], remote_memory: Memory
    ) -> Any:
        """A reusable request that moves this buffer to (WRITE) or from (READ) the peer's blocks."""
        local = self.nixl.get_xfer_descs(list(self.buffer.blocks(spec.block_size)), self.buffer.memory)
        return self.nixl.initialize_xfer(
            spec.op, local, self.nixl.get_xfer_descs(list(remote), remote_memory), peer, backends=["UCX"]
        )

    def release(self) -> None:
        """Deregister the buffer."""
        self.nixl.deregister_memory(self._registered)

    def _read_log(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX leaves its last lines in the C library's buffer
        return self._log.read_text(errors="replace") if self._log.exists() else ""


@contextmanager
def open_agent(role: str, spec: TransferSpec, seat: Seat, *, progress_thread: bool) -> Iterator[Agent]:
    """An agent with a buffer of `spec.total_bytes` on `seat`. Changes this process' environment.

    Raises:
        Refused: not enough memory, no NIXL, or UCX cannot use what it was pinned to.
    """
    require()
    with TemporaryDirectory(prefix="rackloom-transfer-") as directory:
        log = Path(directory, "ucx.log")
        os.environ |= ucx.environment(seat.ucx, log)
        buffer = allocate(seat.device, spec.total_bytes)  # before UCX starts: it looks for a CUDA context
        try:
            agent = Agent(role, buffer, log, progress_thread=progress_thread)
            try:
                yield agent
            finally:
                agent.release()
        finally:
            buffer.close()
