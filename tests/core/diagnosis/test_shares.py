"""Joining only the changed records gives the result of a full join, for any changes to the records."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.diagnosis.healthy import healthy

from rackloom.core.diagnosis import incremental
from rackloom.core.diagnosis import incremental as module
from rackloom.core.diagnosis.incremental import JoinedShares, SnapshotShares, join_shares, split_snapshot
from rackloom.core.diagnosis.join import gpu_chains

WHOLE = healthy(racks=3, trays=2)
LAYERS = {
    "fabric": ("fabric_gpus", "partitions"),
    "site": ("machines", "instance_gpus", "logicals"),
    "cluster": ("nodes", "devices", "uses", "claims", "compute_domains"),
    "transfer": ("transfers",),
}
FIELDS = [field for fields in LAYERS.values() for field in fields]
EDITS = {
    "fabric_gpus": ("guid", "place", "partition", "healthy"),
    "machines": ("gpus", "tenant", "instance", "chassis_serial", "rack"),
    "devices": ("key", "node", "pool", "kind", "partner", "partner_address"),
    "uses": ("pods", "claim", "pool"),
    "partitions": ("logical", "id"),
    "claims": ("domain",),
    "transfers": ("key", "node"),
    "instance_gpus": ("instance", "module_id"),
}


@st.composite
def changes(draw):
    """A record goes, comes back or takes over a value of another. Or a whole layer goes or comes back."""
    kind = draw(st.sampled_from(["edit", "edit", "edit", "drop", "back", "lose", "heal"]))
    if kind in ("lose", "heal"):
        return kind, draw(st.sampled_from(sorted(LAYERS))), "", 0, 0
    fields = sorted(EDITS) if kind == "edit" else FIELDS
    field = draw(st.sampled_from(fields))
    attribute = draw(st.sampled_from(EDITS[field])) if kind == "edit" else ""
    return kind, field, attribute, draw(st.integers(0, 999)), draw(st.integers(0, 999))


def changed(snapshot, change):
    kind, field, attribute, index, other = change
    if kind in ("lose", "heal"):
        reported = {name: getattr(WHOLE, name) if kind == "heal" else () for name in LAYERS[field]}
        return msgspec.structs.replace(snapshot, **reported)
    records = list(getattr(snapshot, field))
    if kind == "back":
        records = list(getattr(WHOLE, field))
    elif records and kind == "drop":
        del records[index % len(records)]
    elif records:
        value = getattr(records[other % len(records)], attribute)
        at = index % len(records)
        records[at] = msgspec.structs.replace(records[at], **{attribute: value})
    return msgspec.structs.replace(snapshot, **{field: tuple(records)})


TWO_MACHINES_NAME_ONE_TRAY_AND_STAND_IN_ONE_SHARE = [
    ("edit", "machines", "gpus", 1, 172),
    ("edit", "machines", "chassis_serial", 0, 280),
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@example(TWO_MACHINES_NAME_ONE_TRAY_AND_STAND_IN_ONE_SHARE)
@given(st.lists(changes(), max_size=8))
def test_what_changed_is_all_that_has_to_be_joined_again(story):
    snapshot, joined = WHOLE, join_shares(WHOLE, JoinedShares())
    for change in story:
        snapshot = changed(snapshot, change)
        joined = join_shares(snapshot, joined)
        assert sorted(joined.chains, key=repr) == sorted(gpu_chains(snapshot), key=repr)


def test_racks_are_shares_and_the_others_stay_the_very_same():
    before = join_shares(WHOLE, JoinedShares())
    assert len(before.joined) == 3
    sick = (msgspec.structs.replace(WHOLE.fabric_gpus[0], healthy=False), *WHOLE.fabric_gpus[1:])
    after = join_shares(msgspec.structs.replace(WHOLE, fabric_gpus=sick), before)
    assert [after.joined[name][1] is before.joined[name][1] for name in after.joined] == [False, True, True]


def test_a_picture_that_was_read_anew_from_equal_records_is_not_joined_again():
    before = join_shares(WHOLE, JoinedShares())
    after = join_shares(healthy(racks=3, trays=2), before)
    assert all(after.joined[name][1] is before.joined[name][1] for name in before.joined)


def test_racks_that_one_record_ties_together_are_one_share_and_part_again():
    far = WHOLE.fabric_gpus[-1].guid
    tied = msgspec.structs.replace(
        WHOLE, fabric_gpus=(msgspec.structs.replace(WHOLE.fabric_gpus[0], guid=far), *WHOLE.fabric_gpus[1:])
    )
    first = split_snapshot(WHOLE, SnapshotShares())
    second = split_snapshot(tied, first)
    assert (len(first.snapshots), len(second.snapshots)) == (3, 2)
    assert split_snapshot(WHOLE, second).snapshots == first.snapshots


def test_which_groups_are_tied_is_found_anew_only_when_one_names_other_parts_of_the_join_key(monkeypatch):
    found, finds = [], incremental._homes
    monkeypatch.setattr(module, "_homes", lambda parts: found.append(parts) or finds(parts))
    first = split_snapshot(WHOLE, SnapshotShares())
    published, *others = WHOLE.devices
    moved = msgspec.structs.replace(published, pool="elsewhere")
    second = split_snapshot(msgspec.structs.replace(WHOLE, devices=(moved, *others)), first)
    assert (len(found), second.homes) == (1, first.homes)
    assert second.snapshots != first.snapshots
    gone = msgspec.structs.replace(
        WHOLE, devices=tuple(device for device in others if device.node != published.node)
    )
    assert split_snapshot(gone, second).snapshots == split_snapshot(gone, SnapshotShares()).snapshots
    assert len(found) == 3
