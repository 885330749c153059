"""The kernel log through a stand-in: a pipe of packets. As with /dev/kmsg, each read returns one record."""

import os
from collections.abc import Callable
from pathlib import Path

from rackloom.claim.node.gpu.kernel_log import KernelLog
from rackloom.claim.node.gpu.xids import KernelXid, parse_kernel_record

KERNEL, USER = 0, 1
"""Facilities: of the kernel's own records, and of those that programs write."""


def kernel_record(text: str, *, sequence: int = 1, facility: int = KERNEL, at: float = 1.0) -> bytes:
    """A record as a read of /dev/kmsg returns it. The kernel wrote it at that time after the boot."""
    return f"{facility << 3 | 4},{sequence},{at * 1e6:.0f},-;{text}\n".encode()


def kernel_xid(text: str, *, sequence: int = 1) -> KernelXid:
    """The XID of a record that has one."""
    found = parse_kernel_record(kernel_record(text, sequence=sequence))
    assert found is not None, text
    return found


class RecordPipe:
    """A kernel log to write to. `log` reads it."""

    def __init__(self, clock: Callable[[], float] = lambda: 1.0) -> None:
        reader, self._writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
        self._reader = reader
        self.log = KernelLog(Path(f"/proc/self/fd/{reader}"), clock)
        self._clock = clock
        self._sequence = 0

    def write(self, text: str, *, facility: int = KERNEL) -> None:
        self._sequence += 1
        record = kernel_record(text, sequence=self._sequence, facility=facility, at=self._clock())
        os.write(self._writer, record)

    def restart_reader(self) -> None:
        """A new reader, to which all that is unread is from before its opening."""
        log = KernelLog(self.log._path, self._clock)
        self.log.close()
        self.log = log

    def close(self) -> None:
        self.log.close()
        os.close(self._reader)
        os.close(self._writer)
