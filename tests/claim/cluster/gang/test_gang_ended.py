"""Which seats of a plan nobody needs any more, counted from pods and their Jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.ended import may_have_unused, without_unused
from rackloom.claim.cluster.gang.makers import Maker, maker_of
from rackloom.claim.cluster.gang.members import member_of
from rackloom.claim.cluster.gang.record import GangKey, Record
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Group, Hole, Plan, Seat

KEY = GangKey("team", "big")
INDEX = "batch.kubernetes.io/job-completion-index"


def pod(name, tray, phase, *, group="worker", index=None, job="job", kind="Job"):
    owner = {"apiVersion": "batch/v1", "kind": kind, "name": job, "uid": job, "controller": True}
    labels = {GANG_LABEL: "big", marks.GROUP_LABEL: group} | ({} if index is None else {INDEX: str(index)})
    meta = {"name": name, "uid": name, "namespace": "team", "labels": labels, "ownerReferences": [owner]}
    meta["annotations"] = {marks.SIZE_ANNOTATION: "3", marks.TRAY_ANNOTATION: tray}
    return member_of({"metadata": meta, "spec": {"nodeName": tray}, "status": {"phase": phase}})


def record_of(seats, *, spares=(), cliques=None):
    sizes = {group: sum(one == group for one, _ in seats) for group, _ in seats}
    groups = tuple(Group(name=name, members=size, gpus=4) for name, size in sizes.items())
    plan = Plan(
        gang="team/big",
        seats=tuple(Seat(group, number, tray) for number, (group, tray) in enumerate(seats)),
        cliques=tuple(dict.fromkeys((cliques or {}).values())),
        spares=spares,
        price=(Hole(3, 1, 0),),
        reason="3 trays of clique A",
    )
    return Record(
        key=KEY,
        uid="u",
        resource_version="1",
        created="",
        finalizers=(),
        gang=Gang(name="team/big", groups=groups),
        plan=plan,
        cliques=cliques or {},
    )


def view_of(members, seats, **how):
    return View(key=KEY, now=0.0, record=record_of(seats, **how), members=tuple(members))


def rest(members, makers, seats, **how):
    """The seats that are left of a plan, as group and tray, with its spares; None where all are needed."""
    left = without_unused(view_of(members, seats, **how), record_of(seats, **how), makers)
    return (
        None if left is None else ([(one.group, one.tray) for one in left.seats], left.spares, left.cliques)
    )


THREE = [("worker", "t0"), ("worker", "t1"), ("worker", "t2")]
JOB = {"job": Maker(completions=3, is_indexed=False)}
INDEXED = {"job": Maker(completions=3, is_indexed=True)}


def test_a_seat_goes_for_each_success():
    pods = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Running"), pod("c", "t2", "Succeeded")]
    assert rest(pods, JOB, THREE) == ([("worker", "t1")], (), ())
    assert rest(pods, {}, THREE) is None, "nobody says how many there will be"


def test_the_seat_of_a_pod_that_failed_or_is_missing_is_kept():
    failed = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Failed"), pod("c", "t2", "Running")]
    for pods in (failed, [failed[0], failed[2]]):
        assert rest(pods, JOB, THREE) == (THREE[1:], (), ())


def test_two_successes_of_one_index_are_one_and_indexes_that_a_job_has_no_more_are_none():
    twice = [pod("a", "t0", "Succeeded", index=0), pod("b", "t1", "Succeeded", index=0)]
    assert rest(twice, INDEXED, THREE) == (THREE[1:], (), ())
    beyond = [pod("a", "t0", "Succeeded", index=3), pod("b", "t1", "Running", index=1)]
    assert rest(beyond, INDEXED, THREE) is None


def test_a_tray_with_two_members_goes_when_neither_is_needed():
    seats = [("worker", "t0"), ("worker", "t0"), ("worker", "t1")]
    one = [pod("a", "t0", "Succeeded"), pod("b", "t0", "Failed"), pod("c", "t1", "Running")]
    assert rest(one, JOB, seats) is None
    both = [one[0], pod("b", "t0", "Succeeded"), one[2]]
    assert rest(both, JOB, seats) == ([("worker", "t1")], (), ())


@pytest.mark.parametrize("other", [{"job": "other"}, {"kind": "MPIJob"}])
@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_where_somebody_else_is_of_the_gang_all_seats_are_kept(other, phase):
    """A driver may make one Job after the other for the same seats."""
    seats = [("driver", "t0"), *THREE]
    workers = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Succeeded"), pod("c", "t2", "Running")]
    makers = JOB | {"other": Maker(completions=1, is_indexed=False)}
    assert rest([pod("d", "t0", phase, group="driver", **other), *workers], makers, seats) is None


@pytest.mark.parametrize(
    ("seats", "indexes"),
    [([("driver", "t0"), *THREE[1:]], 4), ([("driver", "t0"), ("worker", "t1"), *THREE[1:]], 3)],
)
def test_the_seat_of_another_group_is_kept_while_its_pod_is_between_two_lives(seats, indexes):
    makers = {"job": Maker(completions=indexes, is_indexed=True)}
    done = [pod(f"w{at}", "t1", "Succeeded", index=at) for at in range(indexes - 1)]
    last = pod("last", "t2", "Running", index=indexes - 1)
    assert rest([*done, last], makers, seats) is None
    assert not may_have_unused(view_of([*done, last], seats), record_of(seats).plan)
    assert may_have_unused(view_of([*done, last], THREE), record_of(THREE).plan), "of one group it is asked"


def test_a_plan_of_which_trays_were_given_back_says_so_and_names_no_price():
    pods = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Running"), pod("c", "t2", "Running")]
    found = record_of(THREE)
    one = without_unused(view_of(pods, THREE), found, JOB)
    assert (one.reason, one.price) == ("trays given back: 1; 3 trays of clique A", ())
    pods[1] = pod("b", "t1", "Succeeded")
    again = replace(found, plan=one)
    assert (
        without_unused(view_of(pods, THREE), again, JOB).reason == "trays given back: 2; 3 trays of clique A"
    )


def test_spares_go_with_the_last_member_of_their_clique():
    cliques = {"t0": "c1", "t1": "c1", "s1": "c1", "t2": "c2", "s2": "c2"}
    one = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Running"), pod("c", "t2", "Running")]
    assert rest(one, JOB, THREE, spares=("s1", "s2"), cliques=cliques) == (
        THREE[1:],
        ("s1", "s2"),
        ("c1", "c2"),
    )
    two = [one[0], one[1], pod("c", "t2", "Succeeded")]
    left = rest(two, JOB, THREE, spares=("s1", "s2"), cliques=cliques)
    assert left == ([("worker", "t1")], ("s1",), ("c1",))


@given(
    phases=st.lists(st.sampled_from(["Running", "Failed", "Succeeded", "none"]), min_size=3, max_size=3),
    completions=st.integers(1, 5),
)
def test_seats_suffice_for_all_that_may_still_run_and_for_no_more(phases, completions):
    pods = [pod(f"p{at}", f"t{at}", phase) for at, phase in enumerate(phases) if phase != "none"]
    left = rest(pods, {"job": Maker(completions=completions, is_indexed=False)}, THREE)
    seats = THREE if left is None else left[0]
    done, running = phases.count("Succeeded"), phases.count("Running")
    wanted = max(3, completions) - done if done else 3
    assert len(seats) == min(3, max(wanted, running))
    assert {f"t{at}" for at, phase in enumerate(phases) if phase == "Running"} <= {tray for _, tray in seats}


def job(**spec):
    return {"metadata": {"name": "j"}, "spec": spec}


def test_a_job_says_how_many_pods_it_makes_or_nobody_does():
    assert maker_of(job(completions=3)) == Maker(completions=3, is_indexed=False)
    assert maker_of(job(completions=3, completionMode="Indexed")) == Maker(completions=3, is_indexed=True)
    assert maker_of(job(parallelism=3)) is None
    owned = {"metadata": {"ownerReferences": [{"kind": "JobSet", "controller": True}]}}
    assert maker_of(job(completions=3) | owned) is None


def test_jobs_of_other_makes_are_no_jobs():
    """Volcano's Job is of another group, and restarts whole."""
    member = pod("a", "t0", "Succeeded")
    assert member.job is not None
    volcano = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "name": "v", "uid": "v"}
    obj = {
        "metadata": {
            "name": "a",
            "uid": "a",
            "namespace": "team",
            "ownerReferences": [volcano | {"controller": True}],
        },
        "spec": {},
    }
    assert member_of(obj).job is None
