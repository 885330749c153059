"""The kernel log of this node: the XIDs that NVIDIA's driver writes there, from /dev/kmsg.

Each read of /dev/kmsg returns one record, and each reader has its own position. `KernelLog` starts at the
oldest record that the kernel still has: NVML does not report the errors from before a restart of the plugin.
Such a record has the kernel's own time, which can drift from CLOCK_MONOTONIC. Records of the
last hour count. A record that is new when it is read needs no time.

`read` never blocks, and its calls are bounded: 8 KiB of a record (the kernel's own bound), 256 XIDs, and
2,000 records (20,000 until it has caught up). The rest waits for the next call in the kernel's buffer. If
the kernel overwrites records before they are read, it answers EPIPE once and goes on with the oldest that it
has. Any other error closes the log. The next call opens it again and passes over the XIDs that it has read.

The kernel lets only a process with CAP_SYSLOG read the log, unless `kernel.dmesg_restrict` is 0. The plugin's
pod is privileged, and opens the host's device below its root.
"""

import os
from collections.abc import Callable
from errno import EPIPE
from pathlib import Path

import msgspec
import structlog

from rackloom.claim.node.gpu.xids import UNREPORTED_SECONDS, KernelXid, parse_kernel_record
from rackloom.claim.node.plugin import NodeValue

log = structlog.get_logger(__name__)

RECORD_BYTES = 8192
RECORDS_AT_START = 20_000
RECORDS_PER_READ = 2_000
XIDS_PER_READ = 256
_MARK = b"NVRM: Xid"


class KernelLogReading(NodeValue, frozen=True, kw_only=True):
    """The XIDs since the reading before. `trouble` is why the log cannot be read, or None if it can.

    `is_lossy` if the kernel overwrote records before they were read.
    """

    xids: tuple[KernelXid, ...] = ()
    trouble: str | None = None
    is_lossy: bool = False


class KernelLog:
    """The XIDs of the last hour, and those that the kernel adds. `clock` is CLOCK_MONOTONIC."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._last = -1
        """The sequence of the newest XID."""
        self._fd: int | None = None
        self._trouble: str | None = None
        self._at_end = False
        """Whether all records from before the opening were read."""
        self._open()

    def read(self) -> KernelLogReading:
        """The XIDs that came since the call before. Does not block."""
        limit = RECORDS_PER_READ if self._at_end else RECORDS_AT_START
        if self._fd is None:
            self._open()
        xids: list[KernelXid] = []
        is_lossy = False
        for _ in range(limit):
            if len(xids) == XIDS_PER_READ or (record := self._record()) is None:
                break
            is_lossy |= not record
            if _MARK in record and (xid := self._new_xid(record)) is not None:
                self._last = xid.sequence
                xids.append(xid)
        return KernelLogReading(xids=tuple(xids), trouble=self._trouble, is_lossy=is_lossy)

    def close(self) -> None:
        """Release the device."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._at_end, self._trouble = False, None
        except OSError as error:
            self._trouble = f"{self._path}: {error.strerror}"

    def _new_xid(self, record: bytes) -> KernelXid | None:
        """The XID of a record, unless it was read before or is too old to matter."""
        xid = parse_kernel_record(record)
        if xid is None or self._at_end:
            return xid
        now, written = self._clock(), int(record.split(b",", 3)[2]) / 1e6
        if xid.sequence <= self._last or now - written > UNREPORTED_SECONDS:
            return None
        return msgspec.structs.replace(xid, at=min(written, now))

    def _record(self) -> bytes | None:
        """The next record. Empty if records were lost, and None if there is none yet."""
        if self._fd is None:
            return None
        try:
            record = os.read(self._fd, RECORD_BYTES)
        except BlockingIOError:
            record = None
        except OSError as error:
            if error.errno == EPIPE:
                log.warning("gpu.kernel-log", reason="the kernel overwrote records before they were read")
                return b""
            self.close()
            self._trouble = f"{self._path}: {error.strerror}"
            return None
        self._at_end = self._at_end or not record
        return record or None
