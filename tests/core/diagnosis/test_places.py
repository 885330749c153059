"""A tray that was moved under an instance: its place and the time, as long as this is the case."""

import msgspec
from tests.core.diagnosis.fabric_faults import exchanged, moved_to_nobody
from tests.core.diagnosis.healthy import NOW, domain, guid, machine, place, serial, slot, with_changed
from tests.core.diagnosis.ward import MACHINE, TRAY, WELL, is_module

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine, unfolded
from rackloom.core.diagnosis.findings import Severity
from rackloom.core.diagnosis.index import SnapshotIndex


def test_both_sides_are_told_with_the_time_and_a_command():
    (found,) = examine(exchanged(WELL))
    assert (found.check, found.severity, found.since) == (Check.TRAY_PLACE, Severity.ERROR, NOW - 60)
    assert f"now in rack-0/slot-{slot(TRAY + 1)}, so" in found.message
    first = f"0x{guid(0, TRAY, 1):016x}"
    assert found.evidence[:2] == (
        f"records: instance i-0-{TRAY} had {first} as rack-0/slot-{slot(TRAY)}/gpu-0",
        f"switch controller of domain {domain(0)}: {first} is rack-0/slot-{slot(TRAY + 1)}/gpu-0"
        f" (chassis {serial(0)} slot {slot(TRAY + 1)} module 1)",
    )
    assert found.fix.startswith(f"rackloom admin tray cordon {MACHINE} --reason moved")
    assert {f"machine {MACHINE}", f"machine {machine(0, TRAY + 1)}"} <= set(found.where)


def test_what_follows_from_it_is_told_under_it():
    (found,) = examine(moved_to_nobody(WELL))
    assert found.since == NOW - 30
    reported = {consequence.split(":")[0] for consequence in found.consequences}
    assert {Check.MACHINE_PRESENT, Check.INTERFACE} <= reported


def test_a_gpu_in_another_module_of_its_tray_is_in_another_place():
    crossed = with_changed(WELL, "fabric_gpus", is_module(1), place=place(0, TRAY, 9))
    crossed = with_changed(crossed, "fabric_gpus", is_module(2), place=place(0, TRAY, 1))
    crossed = with_changed(crossed, "fabric_gpus", is_module(9), place=place(0, TRAY, 2))
    assert [finding.subject for finding in places(crossed)] == [f"machine {MACHINE}"]


def places(snapshot):
    return [finding for finding in unfolded(SnapshotIndex(snapshot)) if finding.check == Check.TRAY_PLACE]


def test_nobody_loses_a_tray_that_nobody_has():
    free = with_changed(exchanged(WELL), "machines", lambda record: record.id == MACHINE, instance=None)
    assert places(free) == []


def test_a_gpu_that_is_back_or_nowhere_was_not_moved():
    back = msgspec.structs.replace(WELL, moved_gpus=exchanged(WELL).moved_gpus)
    assert places(back) == []
    gone = msgspec.structs.replace(back, fabric_gpus=())
    assert places(gone) == []


def test_what_its_own_controller_still_lists_in_its_place_another_one_does_not_move():
    own = next(gpu for gpu in WELL.fabric_gpus if gpu.guid == guid(0, TRAY, 1))
    lie = msgspec.structs.replace(own, domain=domain(1), place=place(1, 0, 1))
    assert places(msgspec.structs.replace(WELL, fabric_gpus=(*WELL.fabric_gpus, lie))) == []


def test_a_reading_that_is_old_moves_nothing():
    old = with_changed(
        exchanged(WELL), "domains", lambda record: record.uuid == domain(0), unknown_since=NOW - 60
    )
    assert places(old) == []
