"""If two pods were ungated for a slot, the one that is not being deleted has it."""

import pytest
from tests.core.gangs.test_gang_completion import KEY, record_of

from rackloom.core.cluster.gang_objects import (
    GANG_GATE,
    GROUP_LABEL,
    RANK_LABELS,
    TRAY_ANNOTATION,
    read_member,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.gangs.slots import assign_slots
from rackloom.core.gangs.snapshot import GangSnapshot

RECORD = record_of([("worker", "t0"), ("worker", "t1")])


def pod(name, index, *, spec, **more):
    labels = {GANG_LABEL: "big", GROUP_LABEL: "worker", RANK_LABELS[0]: str(index)}
    meta = {"name": name, "uid": name, "namespace": "team", "labels": labels, **more}
    meta["annotations"] = {SIZE_ANNOTATION: "worker=2", TRAY_ANNOTATION: "t0"}
    return {"metadata": meta, "spec": spec, "status": {}}


def ungated(name, index, *, node="", going=False):
    meta = {"deletionTimestamp": "2001-01-01T00:00:00Z"} if going else {}
    return read_member(pod(name, index, spec={"nodeName": node} if node else {}, **meta))


def seated(*members):
    found = assign_slots(GangSnapshot(key=KEY, now=0.0, record=RECORD, members=members), RECORD.plan)
    return [member.name for member in found.seated], [misfit.name for misfit in found.misfits]


@pytest.mark.parametrize("bound", [(), ("leaves",), ("stays",), ("leaves", "stays")])
def test_a_pod_that_leaves_takes_no_seat_from_one_that_stays(bound):
    """Otherwise the pod that stays would be deleted too, although it is in its place."""
    places = {name: "t0" if name in bound else "" for name in ("leaves", "stays")}
    leaves = ungated("leaves", 0, node=places["leaves"], going=True)
    stays = ungated("stays", 1, node=places["stays"])
    assert seated(leaves, stays) == (["stays"], [])


def test_of_two_that_stay_the_one_that_is_there_has_it():
    first, second = ungated("first", 0), ungated("second", 1, node="t0")
    assert seated(first, second) == (["second"], ["first"])


def test_a_pod_that_leaves_keeps_its_seat_from_those_at_the_gate():
    """Its tray is free only when the pod is gone."""
    waiting = pod("waits", 1, spec={"schedulingGates": [{"name": GANG_GATE}]})
    members = (ungated("leaves", 0, node="t0", going=True), read_member(waiting))
    found = assign_slots(GangSnapshot(key=KEY, now=0.0, record=RECORD, members=members), RECORD.plan)
    assert [(member.name, tray) for member, tray in found.openings] == [("waits", "t1")]
