"""The NIXL agent of one end on the UCX backend: optional wheels, UCX settings and UCX's log.

NIXL is imported when an end starts. Nothing else of Rackloom depends on it (`installation`).

Facts behind the UCX settings: NIXL's own device list spoils TCP device names (it appends a port), so
devices are pinned with UCX_NET_DEVICES. NIXL requests two RMA rails by default, and UCX then
silently splits one transfer over two devices. With one pinned device the limit is one rail.
UCX_PROTO_INFO prints a table per operation and peer, first for the loopback connection ("self"), then for
the real one. Only the latter counts.

`open_agent` allocates the buffer before UCX starts, since UCX looks for a CUDA context then, registers
it, and releases both on exit.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rackloom.core.transfer.proof import IN_MEMORY
from rackloom.core.transfer.values import EndConfig, TransferOp, TransferSpec, UcxPins
from rackloom.errors import Refused
from rackloom.prove.transfer.buffers import Buffer, MemoryKind, allocate_buffer
from rackloom.prove.transfer.channel import BlockDescriptor
from rackloom.prove.transfer.installation import require_nixl

# UCX: environment variables in, log out.


_UCX_CALL = {"WRITE": "ucp_put", "READ": "ucp_get"}
_PROTOCOL_TITLE = re.compile(r"\| \S+ (?P<scope>self|intra-node|inter-node) cfg#")
_PROTOCOL_ROW = re.compile(r"\|\s*(?P<range>\d\S*)\s*\|(?P<description>[^|]*)\|(?P<config>[^|]*)\|\s*$")
_LANE_NAME = re.compile(r"\b([a-z]\w*/[\w.:-]+)")
_UCX_COMPLAINT = re.compile(r"\b(?:ERROR|WARN)\s+(.*)$", re.MULTILINE)
_NO_MESSAGES = "no active messages transport"
"""UCX's message if no pinned transport carries messages and has an error handler for the peer. cma carries
no messages. posix, sysv and self have no such handler. NIXL requires one."""
_WITHIN_MEMORY = IN_MEMORY | {"sm", "shm"}
"""Transports of one host, with UCX's names for groups of them."""
_MOST_RAILS = 2
"""NIXL's own limit. It is one if one device is pinned."""


def ucx_environment(ucx: UcxPins, log: Path) -> dict[str, str]:
    """The variables that pin UCX and make it log its actions into `log`."""
    variables = {
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_FILE": str(log),
        "UCX_MAX_RMA_RAILS": str(min(_MOST_RAILS, max(1, len(ucx.net_devices)))),
        "NIXL_LOG_LEVEL": "WARN",
    }
    if ucx.transports:
        variables["UCX_TLS"] = ",".join(ucx.transports)
    if ucx.net_devices:
        variables["UCX_NET_DEVICES"] = ",".join(ucx.net_devices)
    return variables


def ucx_protocols(log: str, op: TransferOp) -> tuple[str, ...]:
    """Transport and device of each lane that UCX uses for `op` towards the peer, such as tcp/rdma0.

    Empty when the log holds no table for that operation.
    """
    lanes: dict[str, None] = {}
    scope, wanted = "self", False
    for line in log.splitlines():
        if title := _PROTOCOL_TITLE.search(line):
            scope, wanted = title["scope"], False
        elif "remote memory" in line:
            wanted = scope != "self" and _UCX_CALL[op] in line
        elif wanted and (row := _PROTOCOL_ROW.search(line)):
            lanes |= dict.fromkeys(_LANE_NAME.findall(row["config"]))
    return tuple(lanes)


def ucx_complaint(log: str) -> str | None:
    """The last warning or error of UCX, which NIXL's own error codes leave out."""
    found = _UCX_COMPLAINT.findall(log)
    return found[-1].strip() if found else None


# NIXL.


_UCX_LIBRARY = re.compile(r"\S*/libucp\S*\.so\S*")


def nixl_version() -> str:
    """Version of the installed NIXL distribution."""
    return version("nixl")


def ucx_version() -> str | None:
    """Version of the UCX that NIXL loaded into this process, from UCX itself, or None before it is loaded."""
    found = _UCX_LIBRARY.search(Path("/proc/self/maps").read_text())
    if found is None:
        return None
    library = ctypes.CDLL(found.group())
    library.ucp_get_version_string.restype = ctypes.c_char_p
    text: bytes = library.ucp_get_version_string()
    return text.decode()


class NixlAgent:
    """A NIXL agent on the UCX backend with one registered buffer. Made by `open_agent`."""

    def __init__(self, role: str, buffer: Buffer, log: Path, pins: UcxPins, *, progress_thread: bool) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except (ImportError, OSError) as error:
            raise Refused(f"NIXL cannot be imported: {error}") from error
        self.buffer, self._log = buffer, log
        try:
            self.nixl: Any = nixl_agent(
                role, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
            )
            whole = [(buffer.address, buffer.size, buffer.ordinal, "")]
            self._registered = self.nixl.register_memory(whole, buffer.memory)
        except Exception as error:
            raise self._not_started(error, pins) from error

    def _not_started(self, error: Exception, pins: UcxPins) -> Refused:
        """UCX could not be started with its pins."""
        alone = bool(pins.transports) and _WITHIN_MEMORY.issuperset(pins.transports)
        if alone and _NO_MESSAGES in self._read_log():
            return Refused(
                f"UCX needs a companion for {', '.join(pins.transports)}: the ends also exchange messages,"
                " and none of these carries messages and notices when the peer is gone",
                nearest_fix="pin tcp too (--transport tcp); the report names what moved the data",
            )
        return Refused(
            self.explain(f"UCX could not be started: {error}"),
            nearest_fix="check that the pinned devices and transports exist at this end",
        )

    def explain(self, problem: str) -> str:
        """`problem` with UCX's own log about it."""
        complaint = ucx_complaint(self._read_log())
        return f"{problem} (UCX: {complaint})" if complaint else problem

    def protocols(self, op: TransferOp) -> tuple[str, ...]:
        """UCX's protocols for `op` towards the peer."""
        return ucx_protocols(self._read_log(), op)

    def request(
        self, spec: TransferSpec, peer: str, remote: tuple[BlockDescriptor, ...], remote_memory: MemoryKind
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
def open_agent(
    role: str, spec: TransferSpec, config: EndConfig, *, progress_thread: bool
) -> Iterator[NixlAgent]:
    """An agent with a buffer of `spec.total_bytes` on `config`. Changes this process' environment.

    Raises:
        Refused: not enough memory, no NIXL, or UCX cannot use its pins.
    """
    require_nixl()
    with TemporaryDirectory(prefix="rackloom-transfer-") as directory:
        log = Path(directory, "ucx.log")
        os.environ |= ucx_environment(config.ucx, log)
        # Before UCX starts: it looks for a CUDA context then.
        buffer = allocate_buffer(config.device, spec.total_bytes)
        try:
            agent = NixlAgent(role, buffer, log, config.ucx, progress_thread=progress_thread)
            try:
                yield agent
            finally:
                agent.release()
        finally:
            buffer.close()
