"""The kernel log: a stand-in for /dev/kmsg, and the device itself where this process may open it."""

import errno
import os
import time
from pathlib import Path

import pytest
import structlog
from tests.claim.node.gpu.kernel_records import USER, RecordPipe, kernel_record

from rackloom.claim.node.gpu import kernel_log
from rackloom.claim.node.gpu.kernel_log import RECORDS_AT_START, RECORDS_PER_READ, XIDS_PER_READ, KernelLog
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
    def written(noise):
        records = [kernel_record(FALLEN, sequence=at) for at in range(2 * XIDS_PER_READ)]
        return [*records, *[kernel_record("usb 1-1: noise")] * noise, kernel_record(FALLEN, sequence=9999)]

    waiting = written(RECORDS_AT_START + 5)
    monkeypatch.setattr(kernel_log.os, "read", lambda fd, size: waiting.pop(0) if waiting else b"")
    log = KernelLog(Path("/dev/null"), lambda: 1.0)
    assert [len(log.read().xids) for _ in range(4)] == [XIDS_PER_READ, XIDS_PER_READ, 0, 1]
    waiting = written(RECORDS_PER_READ + 5)
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
    assert (numbers(reading), reading.trouble, reading.is_lossy) == ([79], None, True)
    assert not pipe.log.read().is_lossy
    assert [entry["event"] for entry in logged] == ["gpu.kernel-log"]


def test_a_log_that_cannot_be_read_is_named_and_opened_again(tmp_path):
    path = tmp_path / "kmsg"
    log = KernelLog(path, lambda: 1.0)
    assert log.read().trouble == f"{path}: No such file or directory"
    path.mkdir()
    # The error of the read itself: a directory can be opened.
    assert log.read().trouble.startswith(f"{path}: ")
    path.rmdir()
    path.touch()
    assert log.read().trouble is None
    log.close()


def test_the_records_of_the_last_hour_count_at_the_start(tmp_path):
    path = tmp_path / "kmsg"
    log = KernelLog(path, lambda: 5000.0)
    writes = [(79, 1399.0), (48, 1401.0), (119, 5002.0)]
    waiting = [kernel_record(FALLEN.replace("79", str(n)), sequence=n, at=at) for n, at in writes]
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_log.os, "read", lambda fd, size: waiting.pop(0) if waiting else b"")
        assert [(xid.number, xid.at) for xid in log.read().xids] == [(48, 1401.0), (119, 5000.0)]
        waiting = [kernel_record(FALLEN, sequence=200, at=4000.0)]
        # The kernel's clock may have drifted. The record came now.
        assert [(xid.number, xid.at) for xid in log.read().xids] == [(79, None)]
    log.close()


def test_a_log_that_is_opened_again_goes_on_after_its_last_xid(monkeypatch, tmp_path):
    path = tmp_path / "kmsg"
    path.touch()
    written = [kernel_record(FALLEN, sequence=7)]
    log, unread = KernelLog(path, lambda: 1.0), list(written)

    def read(fd, size):
        if not unread:
            raise BlockingIOError
        record = unread.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    monkeypatch.setattr(kernel_log.os, "read", read)
    assert numbers(log.read()) == [79]
    unread.append(OSError(errno.ENODEV, "No such device"))
    assert log.read().trouble == f"{path}: No such device"
    unread += [*written, kernel_record(FALLEN.replace("79", "48"), sequence=8)]
    assert numbers(log.read()) == [48]
    log.close()


@pytest.fixture
def kmsg():
    try:
        writer = os.open(KMSG, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"{KMSG} cannot be written here: {error.strerror}")
    os.close(writer)
    log = KernelLog(KMSG, time.monotonic)
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
