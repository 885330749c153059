"""The rest of a plan after trays were released: which pods start there, and which wait."""

from rackloom.core.cluster.gang_objects import (
    GANG_GATE,
    GANG_TAINT,
    TRAY_ANNOTATION,
    GangKey,
    TrayNode,
    read_member,
)
from rackloom.core.cluster.nodes import Taint
from rackloom.core.cluster.objects import GANG_PLAN, POD
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.trays import Gang, GangGroup, GangPlan, MemberAssignment
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.snapshot import GangRecord, GangSettings, GangSnapshot

KEY = GangKey("team", "big")
TAINT = Taint(GANG_TAINT, "NoSchedule", "u")


def pod(name, job, tray=None, phase="Pending"):
    """A pod that was ungated for its tray, or a gated pod."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job, "controller": True}
    notes = {SIZE_ANNOTATION: "3"} | ({TRAY_ANNOTATION: tray} if tray else {})
    meta = {"name": name, "uid": name, "namespace": "team", "labels": {GANG_LABEL: "big"}}
    spec = {"nodeName": tray} if tray else {"schedulingGates": [{"name": GANG_GATE}]}
    meta |= {"annotations": notes, "ownerReferences": [owner]}
    return read_member({"metadata": meta, "spec": spec, "status": {"phase": phase}})


def decided(trays, *members):
    plan = GangPlan(
        gang="team/big",
        seats=tuple(MemberAssignment("member", number, tray) for number, tray in enumerate(trays)),
        cliques=("A",),
        spares=(),
        price=(),
        reason="why",
    )
    record = GangRecord(
        key=KEY,
        uid="u",
        resource_version="1",
        created=0.0,
        finalizers=(),
        gang=Gang(name="team/big", groups=(GangGroup(name="member", members=3, gpus=4),), exclusive=True),
        plan=plan,
        cliques=dict.fromkeys(trays, "A"),
    )
    nodes = {tray: TrayNode(name=tray, resource_version="1", taints=(TAINT,)) for tray in trays}
    snapshot = GangSnapshot(key=KEY, now=100.0, record=record, members=members, nodes=nodes)
    return [(action.kind, action.name) for action in reconcile_gang(snapshot, GangSettings()).actions]


DONE = (pod("a", "first", "t0", "Succeeded"), pod("b", "first", "t1", "Succeeded"))
FAILED = pod("c", "first", "t2", "Failed")


def test_pods_of_another_job_do_not_take_the_openings_of_those_that_come_back():
    others = [pod(f"another-{number}", "second") for number in range(3)]
    pods = (DONE[0], pod("b", "first", "t1", "Running"), FAILED, *others, pod("d", "first"))
    assert decided(("t1", "t2"), *pods) == [(POD, "d")]


def test_the_last_member_that_failed_begins_anew_on_its_tray():
    assert decided(("t2",), *DONE, FAILED, pod("d", "first")) == [(POD, "d")]


def test_of_two_last_members_the_first_that_comes_back_begins_at_once():
    """A Job recreates them one after the other, with a longer delay after each failure."""
    failed = (pod("b", "first", "t1", "Failed"), FAILED)
    assert decided(("t1", "t2"), DONE[0], *failed, pod("d", "first")) == [(POD, "d")]


def test_a_rest_to_which_nobody_comes_back_is_given_up():
    others = (pod(f"another-{number}", "second") for number in range(3))
    assert decided(("t2",), *DONE, FAILED, *others) == [(GANG_PLAN, "big")]
