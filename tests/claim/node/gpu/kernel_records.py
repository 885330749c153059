"""The kernel log through a stand-in: a pipe of packets. As with /dev/kmsg, each read returns one record."""

import os
from pathlib import Path

from rackloom.claim.node.gpu.kernel_log import KernelLog
from rackloom.claim.node.gpu.xids import KernelXid, parse_kernel_record

KERNEL, USER = 0, 1
"""Facilities: of the kernel's own records, and of those that programs write."""


def kernel_record(text: str, *, sequence: int = 1, facility: int = KERNEL) -> bytes:
    """A record as a read of /dev/kmsg returns it."""
    return f"{facility << 3 | 4},{sequence},{sequence * 1000},-;{text}\n".encode()


def kernel_xid(text: str, *, sequence: int = 1) -> KernelXid:
    """The XID of a record that has one."""
    found = parse_kernel_record(kernel_record(text, sequence=sequence))
    assert found is not None, text
    return found


class RecordPipe:
    """A kernel log to write to. `log` reads it."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
        self.log = KernelLog(Path(f"/proc/self/fd/{reader}"))
        os.close(reader)
        self._sequence = 0

    def write(self, text: str, *, facility: int = KERNEL) -> None:
        self._sequence += 1
        os.write(self._writer, kernel_record(text, sequence=self._sequence, facility=facility))

    def close(self) -> None:
        self.log.close()
        os.close(self._writer)
