"""The work grows with a site's records and not with their pairs, on healthy sites and on broken ones."""

import sys
import time

import msgspec
import pytest
from tests.core.diagnosis.healthy import NOW, healthy, with_changed
from tests.web.snapshots import snapshot

from rackloom.core.diagnosis.checks.nics import check_nics
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.index import SnapshotIndex
from rackloom.core.diagnosis.snapshot import LostPartition, PartitionRecord

FEW, MANY = 1, 16


def well(snapshot):
    return snapshot


def ill(snapshot):
    """In every rack: partitions lost and left over, instances waiting, nodes silent, devices kept off."""
    lost = tuple(
        LostPartition(
            domain=partition.domain,
            name=f"old-{partition.name}",
            logical=partition.logical,
            seen_at=NOW - 600,
        )
        for partition in snapshot.partitions
    )
    left = tuple(
        PartitionRecord(
            domain=domain.uuid, id=32766, name="Default", healthy=False, default=True, owner="default"
        )
        for domain in snapshot.domains
    )
    broken = msgspec.structs.replace(snapshot, lost_partitions=lost, partitions=(*snapshot.partitions, *left))
    for field, changes in (
        ("instance_gpus", {"status": "Pending", "problem": "the limit is reached", "since": NOW - 600}),
        ("nodes", {"ready": None, "clique": None}),
        ("devices", {"taints": ("gpu.nvidia.com/xid=79:NoSchedule",)}),
        ("claims", {"allocated": False}),
        ("meshes", {"complete": False}),
    ):
        broken = with_changed(broken, field, lambda _: True, **changes)
    return broken


def work(snapshot):
    """The number of lines run (each turn of a loop or comprehension is one), and the findings."""
    run = 0

    def count(frame, event, argument):
        nonlocal run
        run += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found = examine(snapshot)
    finally:
        sys.settrace(before)
    return run, found


@pytest.mark.parametrize("broken", [well, ill])
def test_each_gpu_is_looked_at_as_often_in_many_racks_as_in_one(broken):
    once, few = work(broken(healthy(racks=FEW, trays=2)))
    often, many = work(broken(healthy(racks=MANY, trays=2)))
    assert often < (MANY / FEW + 1) * once
    assert len(many) == MANY / FEW * len(few)
    assert bool(few) is (broken is ill)
    assert all(finding.state is not CheckState.HOLDS for finding in many)


def seconds_of_nics(racks):
    """CPU seconds for the check of the NICs in racks full of pods: the better of two."""
    seen = snapshot(racks, 18, ("acme", "blue"))
    index = SnapshotIndex(seen, join_shares(seen, JoinedShares()).chains)
    spent = []
    for _ in range(2):
        begun = time.process_time()
        assert not [finding for finding in check_nics(index) if finding.state is CheckState.FAILS]
        spent.append(time.process_time() - begun)
    return min(spent)


@pytest.mark.slow
def test_a_pod_is_not_compared_with_every_nic_of_the_site():
    # Work inside of one line, such as a copy of a large set, is not counted above. Sixteen times the
    # racks are sixteen times the work. With a copy for each pod they were more than 200 times.
    assert seconds_of_nics(320) < 48 * seconds_of_nics(20)
