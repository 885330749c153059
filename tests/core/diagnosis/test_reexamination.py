"""Examining only the differences gives the findings of a full examination, for any changes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.diagnosis import cluster_faults, fabric_faults
from tests.core.diagnosis.healthy import NOW, healthy, with_changed

from rackloom.core.diagnosis import reexamination
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.reexamination import Examined, examine_again
from rackloom.core.diagnosis.snapshot import LostPartition, MovedGpu, SiteSnapshot

WELL = healthy(racks=3, trays=3)
FAULTS = {name: fault for name, (fault, *_) in {**fabric_faults.FAULTS, **cluster_faults.FAULTS}.items()}
TAINTS = ("gpu.nvidia.com/xid=79:NoSchedule",)
VALUES = {
    "layers": {"unknown_since": [None, NOW - 9], "problem": ["", "it is away"]},
    "domains": {
        "unknown_since": [None, NOW - 9],
        "default_policy": ["none", "keep"],
        "paused": [True, False],
        "observed_at": [NOW, NOW - 99],
        "uncertain": [0, 2],
    },
    "fabric_gpus": {
        "healthy": [True, False],
        "uncertain": [True, False],
        "also": [(), (9,)],
        "partition": [None, 9],
    },
    "partitions": {
        "healthy": [True, False],
        "owner": ["site", "foreign"],
        "default": [True],
        "uncertain": [True],
    },
    "logicals": {"name": ["other"], "tenant": ["tenant-0"]},
    "machines": {"missing_since": [None, NOW - 99], "instance": [None], "reservation": ["kept"]},
    "instance_gpus": {
        "status": ["Ready", "Pending"],
        "since": [None, NOW - 100, NOW - 150],
        "logical": [None],
        "machine": ["m-0-0", "m-2-1", "m-none"],
    },
    "nodes": {
        "ready": [True, False, None],
        "unschedulable": [True, False],
        "other_writers": [("kubectl",), ()],
        "clique": [None, "c1u57e7-0.9"],
    },
    "devices": {"taints": [TAINTS, ()], "link": ["down", "active"], "gbps": [100, 400], "numa": [0, 1, None]},
    "uses": {"pods": [("team-0/worker-0",), ("team-1/worker-1",)]},
    "pods": {"node": ["host-99", ""], "owner": ["Job team-0/train", ""], "gated": [True, False]},
    "claims": {"allocated": [True, False], "reserved_for": [(), ("pod-0-0",)]},
    "transfers": {"verdict": ["holds", "fails", "unknown"]},
    "meshes": {"complete": [True, False, None]},
}
MIXED = {
    "fabric_gpus": ("guid", "place", "partition"),
    "machines": ("gpus", "tenant", "instance", "chassis_serial", "rack", "domain"),
    "devices": ("key", "node", "pool", "kind", "partner", "partner_address"),
    "uses": ("pods", "claim", "pool", "device"),
    "pools": ("node", "driver"),
    "nodes": ("clique",),
    "partitions": ("logical", "id", "domain"),
    "claims": ("domain",),
    "transfers": ("key", "node"),
    "instance_gpus": ("instance", "module_id", "machine", "logical"),
}
FIELDS = sorted({*VALUES, *MIXED} - {"layers"})


@st.composite
def changes(draw):
    """A change of a record (new value, another record's value, gone, back), a known fault, or a delay."""
    kind = draw(
        st.sampled_from(["set", "set", "set", "mix", "mix", "drop", "back", "fault", "wait", "lost", "left"])
    )
    if kind == "fault":
        return kind, draw(st.sampled_from(sorted(FAULTS))), "", None, 0, 0
    if kind in ("wait", "lost", "left"):
        return kind, "", "", None, draw(st.integers(0, 200)), draw(st.integers(0, 999))
    table = {"set": VALUES, "mix": MIXED}.get(kind)
    field = draw(st.sampled_from(sorted(table) if table else FIELDS))
    attribute = draw(st.sampled_from(sorted(table[field]))) if table else ""
    value = draw(st.sampled_from(VALUES[field][attribute])) if kind == "set" else None
    return kind, field, attribute, value, draw(st.integers(0, 999)), draw(st.integers(0, 999))


def changed(snapshot: SiteSnapshot, change) -> SiteSnapshot:
    kind, field, attribute, value, index, other = change
    if kind == "fault":
        # A fault is planted in a healthy site: a broken one may lack the record that it breaks.
        return msgspec.structs.replace(FAULTS[field](WELL), at=snapshot.at)
    if kind == "wait":
        return msgspec.structs.replace(snapshot, at=snapshot.at + index)
    if kind == "lost":
        lost = LostPartition(
            domain=f"d0ma1n-{index % 4}", name="old", logical=f"lp-{other % 3}", seen_at=NOW - 600
        )
        return msgspec.structs.replace(snapshot, lost_partitions=(lost,) if index % 2 else ())
    if kind == "left":
        guid = snapshot.fabric_gpus[other % len(snapshot.fabric_gpus)].guid if snapshot.fabric_gpus else 7
        moved = MovedGpu(machine=f"m-{index % 3}-0", module_id=1, guid=guid, since=NOW - 60)
        return msgspec.structs.replace(snapshot, moved_gpus=(moved,) if index % 2 else ())
    records = list(getattr(snapshot, field))
    at = index % len(records) if records else 0
    if kind == "back":
        records = list(getattr(WELL, field))
    elif records and kind == "drop":
        del records[at]
    elif records:
        if kind == "mix":
            value = getattr(records[other % len(records)], attribute)
        records[at] = msgspec.structs.replace(records[at], **{attribute: value})
    return msgspec.structs.replace(snapshot, **{field: tuple(records)})


def do_nothing() -> None:
    pass


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(changes(), max_size=10))
def test_what_differs_is_all_that_has_to_be_examined_again(story):
    snapshot, joined = WELL, join_shares(WELL, JoinedShares())
    examined = examine_again(WELL, joined, Examined(), do_nothing)
    for change in story:
        snapshot = changed(snapshot, change)
        joined = join_shares(snapshot, joined)
        examined = examine_again(snapshot, joined, examined, do_nothing)
        assert examined.findings == examine(snapshot)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_found_and_forgotten_as_if_all_were_examined(name):
    sick, findings = FAULTS[name](WELL), []
    joined, examined = JoinedShares(), Examined()
    for snapshot in (WELL, sick, WELL):
        joined = join_shares(snapshot, joined)
        examined = examine_again(snapshot, joined, examined, do_nothing)
        findings.append(examined.findings)
    assert findings == [(), examine(sick), ()]


def parts_checked(monkeypatch, before, *snapshots):
    """How many parts are checked for each of the snapshots in turn."""
    runs, check = [], reexamination.check_part
    monkeypatch.setattr(reexamination, "check_part", lambda *given: runs.append(given) or check(*given))
    joined = join_shares(before, JoinedShares())
    examined, counts = examine_again(before, joined, Examined(), do_nothing), []
    for snapshot in snapshots:
        runs.clear()
        joined = join_shares(snapshot, joined)
        examined = examine_again(snapshot, joined, examined, do_nothing)
        counts.append(len(runs))
    return counts


def test_only_the_rack_of_a_change_is_checked_again(monkeypatch):
    first = WELL.fabric_gpus[0]
    sick = with_changed(WELL, "fabric_gpus", lambda gpu: gpu.guid == first.guid, healthy=False)
    cordoned = with_changed(sick, "nodes", lambda node: node.name == "host-99", unschedulable=True)
    renamed = msgspec.structs.replace(cordoned, tenants={**WELL.tenants, "tenant-0": "renamed", "new": "new"})
    later = msgspec.structs.replace(
        renamed,
        at=NOW + 3600,
        domains=tuple(msgspec.structs.replace(domain, observed_at=NOW + 9) for domain in WELL.domains),
    )
    silent = with_changed(later, "domains", lambda domain: domain.uuid == "d0ma1n-1", unknown_since=NOW)
    counts = parts_checked(monkeypatch, WELL, sick, cordoned, renamed, later, silent)
    assert counts == [1, 1, 1, 0, 1]


def test_a_site_read_anew_from_equal_records_is_not_checked_again(monkeypatch):
    assert parts_checked(monkeypatch, WELL, healthy(racks=3, trays=3)) == [0]
