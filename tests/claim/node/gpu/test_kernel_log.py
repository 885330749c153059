"""The kernel log: a stand-in for /dev/kmsg, and the device itself where this process may open it."""

import errno
import os
from pathlib import Path

import pytest
import structlog
from tests.claim.node.gpu.kernel_records import USER, RecordPipe, kernel_record

from rackloom.claim.node.gpu import kernel_log
from rackloom.claim.node.gpu.kernel_log import RECORDS_PER_READ, XIDS_PER_READ, KernelLog
from rackloom.claim.node.gpu.xids import parse_kernel_record

FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
KMSG = Path("/dev/kmsg")


@pytest.fixture
def pipe():
    made = RecordPipe()
    yield made
    made.close()


def numbers(reading):
    return [xid.number for xid in reading.xids]


def test_each_record_is_read_once_and_others_are_passed_over(pipe):
    assert pipe.log.read() == kernel_log.KernelLogReading()
    pipe.write("usb 1-1: new device")
    pipe.write(FALLEN)
    pipe.write(FALLEN, facility=USER)
    pipe.write(FALLEN.replace("79", "48"))
    assert numbers(pipe.log.read()) == [79, 48]
    assert numbers(pipe.log.read()) == []


def test_a_call_takes_so_many_records_and_leaves_the_rest(monkeypatch):
    waiting = [kernel_record(FALLEN, sequence=at) for at in range(2 * XIDS_PER_READ)]
    waiting += [kernel_record("usb 1-1: noise")] * (RECORDS_PER_READ + 5) + [kernel_record(FALLEN)]
    monkeypatch.setattr(kernel_log.os, "read", lambda fd, size: waiting.pop(0) if waiting else b"")
    log = KernelLog(Path("/dev/null"))
    assert [len(log.read().xids) for _ in range(4)] == [XIDS_PER_READ, XIDS_PER_READ, 0, 1]
    log.close()


def test_records_that_the_kernel_overwrote_are_named_and_reading_goes_on(pipe, monkeypatch):
    pipe.write(FALLEN)
    read, errors = os.read, [OSError(errno.EPIPE, "Broken pipe")]

    def overwritten(fd, size):
        if errors:
            raise errors.pop()
        return read(fd, size)

    monkeypatch.setattr(kernel_log.os, "read", overwritten)
    with structlog.testing.capture_logs() as logged:
        reading = pipe.log.read()
    assert (numbers(reading), reading.trouble) == ([79], None)
    assert [entry["event"] for entry in logged] == ["gpu.kernel-log"]


def test_a_log_that_cannot_be_read_is_named_and_opened_again(tmp_path):
    path = tmp_path / "kmsg"
    log = KernelLog(path)
    assert log.read().trouble == f"{path}: No such file or directory"
    path.mkdir()
    # The error of the read itself: a directory can be opened.
    assert log.read().trouble.startswith(f"{path}: ")
    path.rmdir()
    path.touch()
    assert log.read().trouble is None
    log.close()


@pytest.fixture
def kmsg():
    try:
        writer = os.open(KMSG, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"{KMSG} cannot be written here: {error.strerror}")
    os.close(writer)
    log = KernelLog(KMSG)
    if trouble := log.read().trouble:
        pytest.skip(trouble)
    yield log
    log.close()


def test_the_kernels_own_log(kmsg, monkeypatch):
    """The device itself: one record a read, without blocking. No program can speak for the driver."""
    records = []
    parse = parse_kernel_record
    monkeypatch.setattr(
        kernel_log, "parse_kernel_record", lambda record: records.append(record) or parse(record)
    )
    # Each opening has its own allowance of the kernel's rate limit.
    for number in (79, 48):
        KMSG.write_text(f"<2>NVRM: Xid (PCI:ffff:3b:00): {number}, a test of the reader\n")
    assert kmsg.read() == kernel_log.KernelLogReading()
    ours = [record for record in records if b"PCI:ffff:3b:00" in record]
    assert len(ours) == 2
    # The same record, if the kernel itself had written it.
    head, _, rest = ours[0].partition(b",")
    found = parse(b"%d,%b" % (int(head) & 7, rest))
    assert (found.pci_address, found.number) == ("ffff:3b:00", 79)
    assert int(ours[1].split(b",")[1]) > found.sequence
