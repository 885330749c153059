"""The kernel log of this node: the XIDs that NVIDIA's driver writes there, from /dev/kmsg.

Each read of /dev/kmsg returns one record, and each reader has its own position. `KernelLog` starts at the
end, as NVML reports only events from now on. It never blocks, and its calls are bounded: 8 KiB of a record
(the kernel's own bound), 2,000 records and 256 XIDs a call. The rest waits for the next call in the kernel's
buffer. If the kernel overwrites records before they are read, it answers EPIPE once and goes on with the
oldest that it has. Any other error closes the log, and the next call opens it again.

The kernel lets only a process with CAP_SYSLOG read the log, unless `kernel.dmesg_restrict` is 0. The plugin's
pod is privileged, and opens the host's device below its root.
"""

import os
from contextlib import suppress
from errno import EPIPE
from pathlib import Path

import structlog

from rackloom.claim.node.gpu.xids import KernelXid, parse_kernel_record
from rackloom.claim.node.plugin import NodeValue

log = structlog.get_logger(__name__)

RECORD_BYTES = 8192
RECORDS_PER_READ = 2_000
XIDS_PER_READ = 256
_MARK = b"NVRM: Xid"


class KernelLogReading(NodeValue, frozen=True, kw_only=True):
    """The XIDs since the reading before. `trouble` is why the log cannot be read, or None if it can."""

    xids: tuple[KernelXid, ...] = ()
    trouble: str | None = None


class KernelLog:
    """The records that the kernel adds from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._trouble: str | None = None
        self._open()

    def read(self) -> KernelLogReading:
        """The XIDs that came since the call before. Does not block."""
        if self._fd is None:
            self._open()
        xids: list[KernelXid] = []
        for _ in range(RECORDS_PER_READ):
            if len(xids) == XIDS_PER_READ or (record := self._record()) is None:
                break
            if _MARK in record and (xid := parse_kernel_record(record)) is not None:
                xids.append(xid)
        return KernelLogReading(xids=tuple(xids), trouble=self._trouble)

    def close(self) -> None:
        """Release the device."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Anything else than the kernel's device has no end to go to.
            with suppress(OSError):
                os.lseek(self._fd, 0, os.SEEK_END)
            self._trouble = None
        except OSError as error:
            self._trouble = f"{self._path}: {error.strerror}"

    def _record(self) -> bytes | None:
        """The next record. Empty if records were lost, and None if there is none yet."""
        if self._fd is None:
            return None
        try:
            return os.read(self._fd, RECORD_BYTES) or None
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == EPIPE:
                log.warning("gpu.kernel-log", reason="the kernel overwrote records before they were read")
                return b""
            self.close()
            self._trouble = f"{self._path}: {error.strerror}"
            return None
