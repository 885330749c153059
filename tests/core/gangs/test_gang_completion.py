"""The slots of a plan that no pod needs any more, counted from pods and their Jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rackloom.core.cluster.gang_objects import GROUP_LABEL, TRAY_ANNOTATION, GangKey, read_member
from rackloom.core.cluster.gang_owners import FinishedMPIJob, OwnerJob, read_finished_mpi_job, read_owner_job
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.trays import FreeRegionCount, Gang, GangGroup, GangPlan, MemberAssignment
from rackloom.core.gangs.slots import awaits_last_pods, may_have_unused_trays, without_unused_trays
from rackloom.core.gangs.snapshot import GangRecord, GangSnapshot

KEY = GangKey("team", "big")
INDEX = "batch.kubernetes.io/job-completion-index"


VERSIONS = {"MPIJob": "kubeflow.org/v2beta1", "StatefulSet": "apps/v1"}


def pod(name, tray, phase, *, group="worker", index=None, job="job", kind="Job"):
    """A pod of an owner of this `kind`, or without an owner if `kind` is None."""
    owner = {"apiVersion": VERSIONS.get(kind, "batch/v1"), "kind": kind, "name": job, "uid": job}
    labels = {GANG_LABEL: "big", GROUP_LABEL: group} | ({} if index is None else {INDEX: str(index)})
    meta = {"name": name, "uid": name, "namespace": "team", "labels": labels}
    meta |= {"ownerReferences": [owner | {"controller": True}]} if kind else {}
    meta["annotations"] = {SIZE_ANNOTATION: "3", TRAY_ANNOTATION: tray}
    return read_member({"metadata": meta, "spec": {"nodeName": tray}, "status": {"phase": phase}})


def record_of(seats, *, spares=(), cliques=None):
    sizes = {group: sum(known == group for known, _ in seats) for group, _ in seats}
    groups = tuple(GangGroup(name=name, members=size, gpus=4) for name, size in sizes.items())
    plan = GangPlan(
        gang="team/big",
        seats=tuple(MemberAssignment(group, number, tray) for number, (group, tray) in enumerate(seats)),
        cliques=tuple(dict.fromkeys((cliques or {}).values())),
        spares=spares,
        price=(FreeRegionCount(3, 1, 0),),
        reason="3 trays of clique A",
    )
    return GangRecord(
        key=KEY,
        uid="u",
        resource_version="1",
        created=0.0,
        finalizers=(),
        gang=Gang(name="team/big", groups=groups),
        plan=plan,
        cliques=cliques or {},
    )


def maker(completions, *, parallelism=3, is_indexed=False, **how):
    return OwnerJob(completions=completions, parallelism=parallelism, is_indexed=is_indexed, **how)


def view_of(members, seats, owners=None, **how):
    return GangSnapshot(
        key=KEY, now=0.0, record=record_of(seats, **how), members=tuple(members), owners=owners
    )


def rest(members, owners, seats, **how):
    """The seats that are left of a plan, as group and tray, with its spares. None if all are needed."""
    left = without_unused_trays(view_of(members, seats, owners, **how), record_of(seats, **how))
    return (
        None
        if left is None
        else ([(seat.group, seat.tray) for seat in left.seats], left.spares, left.cliques)
    )


THREE = [("worker", "t0"), ("worker", "t1"), ("worker", "t2")]
JOB = {"job": maker(completions=3)}
INDEXED = {"job": maker(completions=3, is_indexed=True)}


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
    pods = [pod("a", "t0", "Succeeded"), pod("b", "t0", "Failed"), pod("c", "t1", "Running")]
    assert rest(pods, JOB, seats) is None
    both = [pods[0], pod("b", "t0", "Succeeded"), pods[2]]
    assert rest(both, JOB, seats) == ([("worker", "t1")], (), ())


@pytest.mark.parametrize("other", [{"job": "other"}, {"kind": "MPIJob"}])
@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_where_somebody_else_is_of_the_gang_all_seats_are_kept(other, phase):
    """A driver may make one Job after the other for the same seats."""
    seats = [("driver", "t0"), *THREE]
    workers = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Succeeded"), pod("c", "t2", "Running")]
    owners = JOB | {"other": maker(completions=1)}
    assert rest([pod("d", "t0", phase, group="driver", **other), *workers], owners, seats) is None


@pytest.mark.parametrize(
    ("seats", "indexes"),
    [([("driver", "t0"), *THREE[1:]], 4), ([("driver", "t0"), ("worker", "t1"), *THREE[1:]], 3)],
)
def test_the_seat_of_another_group_is_kept_while_its_pod_is_between_two_lives(seats, indexes):
    owners = {"job": maker(completions=indexes, is_indexed=True)}
    done = [pod(f"w{at}", "t1", "Succeeded", index=at) for at in range(indexes - 1)]
    last = pod("last", "t2", "Running", index=indexes - 1)
    assert rest([*done, last], owners, seats) is None
    assert not may_have_unused_trays(view_of([*done, last], seats), record_of(seats).plan)
    assert may_have_unused_trays(view_of([*done, last], THREE), record_of(THREE).plan), (
        "of one group it is asked"
    )


def test_a_job_of_two_thousand_million_indexes_is_counted_without_making_a_list_of_them():
    status = {"completedIndexes": "0-9,20-2147483646"}
    found = read_owner_job(job(completions=2147483647, completionMode="Indexed") | {"status": status})
    done = [pod(f"p{at}", "t0", "Succeeded", index=at) for at in (9, 10, 19, 20)]
    assert found.over(done) == 2147483647 - 10 + 2
    assert found.over([]) == 2147483647 - 10


@given(
    closed=st.sets(st.integers(0, 12)),
    failed=st.sets(st.integers(0, 12)),
    done=st.sets(st.integers(0, 12)),
    completions=st.integers(1, 12),
)
def test_each_index_is_counted_once_whoever_says_that_it_is_over(closed, failed, done, completions):
    status = {"completedIndexes": written(closed), "failedIndexes": written(failed)}
    found = read_owner_job(job(completions=completions, completionMode="Indexed") | {"status": status})
    pods = [pod(f"p{at}", "t0", "Succeeded", index=at) for at in done]
    assert found.over(pods) == len({index for index in closed | failed | done if index < completions})


def written(indexes):
    """The indexes in the form that a Job writes: runs of three and more become a range."""
    starts = sorted(index for index in indexes if index - 1 not in indexes)
    ends = sorted(index for index in indexes if index + 1 not in indexes)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


@pytest.mark.parametrize("text", ["x", "0,1-", "-3", "1,,2", "0-1-2", "9" * 5000])
def test_indexes_that_cannot_be_read_prove_nothing(text):
    status = {"completedIndexes": text}
    found = read_owner_job(job(completions=3, completionMode="Indexed") | {"status": status})
    assert found.over([pod("a", "t0", "Succeeded", index=2)]) == 1


def test_an_index_that_failed_for_good_needs_no_seat_either():
    pods = [pod("a", "t0", "Failed", index=0), pod("b", "t1", "Running", index=1)]
    owners = {"job": maker(completions=3, is_indexed=True, closed=(range(1),))}
    assert rest(pods, owners, THREE) == (THREE[1:], (), ())
    assert rest(pods, INDEXED, THREE) is None, "it is tried again"


def test_a_success_that_the_job_has_counted_counts_also_when_its_pod_is_gone():
    pods = [pod("b", "t1", "Running"), pod("c", "t2", "Running")]
    assert rest(pods, {"job": maker(completions=3, succeeded=1)}, THREE) == (
        THREE[1:],
        (),
        (),
    )


def test_trays_of_an_mpi_job_that_is_over_are_free_and_before_it_is_none():
    seats = [("launcher", "t0"), ("worker", "t0"), ("worker", "t1"), ("worker", "t2")]
    mine = {"group": "worker", "job": "mpi", "kind": "MPIJob"}
    pods = [
        pod("l", "t0", "Failed", group="launcher", job="launcher"),
        *(
            pod(f"w{at}", f"t{at}", phase, **mine)
            for at, phase in enumerate(("Succeeded", "Failed", "Running"))
        ),
    ]
    over = {"mpi": FinishedMPIJob(uid="mpi"), "launcher": FinishedMPIJob(uid="mpi")}
    assert may_have_unused_trays(view_of(pods, seats), record_of(seats).plan)
    assert rest(pods, over, seats) == ([("worker", "t2")], (), ())
    for owners in (
        {},
        {"mpi": FinishedMPIJob(uid="mpi")},
        over | {"launcher": FinishedMPIJob(uid="another")},
    ):
        assert rest(pods, owners, seats) is None


def test_trays_of_pods_that_an_mpi_job_that_is_over_has_deleted_are_free_where_the_gang_is_all_its_own():
    seats = [("launcher", "t0"), *THREE]
    pods = [pod("w2", "t2", "Running", job="mpi", kind="MPIJob")]
    replicas = {("big", "launcher"): 1, ("big", "worker"): 3}
    assert may_have_unused_trays(view_of(pods, seats), record_of(seats).plan)
    assert rest(pods, {"mpi": FinishedMPIJob(uid="mpi", replicas=replicas)}, seats) == (
        [("worker", "t2")],
        (),
        (),
    )
    for more in (
        {("big", "worker"): 2},
        {("big", "launcher"): 0},
        {("big", "launcher"): 0, ("other", "launcher"): 1},
    ):
        assert rest(pods, {"mpi": FinishedMPIJob(uid="mpi", replicas=replicas | more)}, seats) is None


def test_an_mpi_job_says_how_many_pods_of_which_group_it_had():
    def role(gang, group, **replicas):
        return {
            "template": {"metadata": {"labels": {GANG_LABEL: gang, GROUP_LABEL: group}}},
            **replicas,
        }

    roles = {"Launcher": role("big", "launcher"), "Worker": role("big", "worker", replicas=18)}
    status = {
        "conditions": [{"type": "Succeeded", "status": "True"}],
        "completionTime": "2001-01-01T00:00:00Z",
    }
    mpi_job = {"metadata": {"name": "m", "uid": "m"}, "spec": {"mpiReplicaSpecs": roles}, "status": status}
    assert read_finished_mpi_job(mpi_job).replicas == {("big", "launcher"): 1, ("big", "worker"): 18}
    mpi_job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = None
    assert read_finished_mpi_job(mpi_job).replicas == {("big", "launcher"): 1, ("big", "worker"): 0}
    mpi_job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 18
    mpi_job["spec"]["mpiReplicaSpecs"]["Launcher"] = {"template": {"spec": {}}}
    assert read_finished_mpi_job(mpi_job).replicas == {("big", "worker"): 18}


def test_an_mpi_job_of_another_manager_says_nothing_about_its_pods():
    """The operator does not reconcile it, so another manager's rules give its status a meaning."""
    status = {
        "conditions": [{"type": "Succeeded", "status": "True"}],
        "completionTime": "2001-01-01T00:00:00Z",
    }

    def read(manager):
        policy = {"managedBy": manager}
        return read_finished_mpi_job(
            {"metadata": {"name": "m", "uid": "m"}, "spec": {"runPolicy": policy}, "status": status}
        )

    assert read("kueue.x-k8s.io/multikueue") is None
    assert read("kubeflow.org/mpi-operator") is not None
    assert read(None) is not None


def test_what_nobody_owns_and_ended_stays_ended():
    bare = [
        pod(f"p{at}", f"t{at}", phase, kind=None)
        for at, phase in enumerate(("Failed", "Succeeded", "Running"))
    ]
    assert may_have_unused_trays(view_of(bare, THREE), record_of(THREE).plan)
    assert rest(bare, {}, THREE) == (THREE[2:], (), ())
    assert rest(bare[1:], {}, THREE) == ([THREE[0], THREE[2]], (), ()), "one that is gone may be made by hand"
    assert rest([bare[0], *map(of_a_set, "bc")], {}, THREE) is None


def of_a_set(name):
    return pod(name, f"t{ord(name) - ord('a')}", "Running", kind="StatefulSet")


def test_pods_of_a_stateful_set_come_back():
    pods = [pod("a", "t0", "Failed", kind="StatefulSet"), *map(of_a_set, "bc")]
    assert rest(pods, {}, THREE) is None
    assert not may_have_unused_trays(view_of(pods, THREE), record_of(THREE).plan)


ENDED = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Succeeded"), pod("c", "t2", "Failed")]


@pytest.mark.parametrize(
    ("how", "is_awaited"),
    [
        ({"completions": 3}, True),
        ({"completions": 3, "is_owned": True}, True),
        ({"completions": 3, "is_ending": True}, False),
        ({"completions": 3, "is_suspended": True}, False),
        ({"completions": 3, "succeeded": 3}, False),
        ({"completions": 6}, False),
        ({"completions": 3, "parallelism": 2}, False),
        ({"completions": 2}, False),
        ({"completions": 4}, True),
    ],
)
def test_the_last_pods_are_awaited_where_their_job_alone_makes_them(how, is_awaited):
    owners = {"job": maker(**how)}
    assert awaits_last_pods(view_of(ENDED, THREE, owners)) is is_awaited
    assert not awaits_last_pods(view_of(ENDED, THREE)), "nobody knows"
    assert not awaits_last_pods(view_of([*ENDED, pod("d", "t2", "Running")], THREE, owners))
    assert not awaits_last_pods(
        view_of([pod(member.name, member.tray, "Failed") for member in ENDED], THREE, owners)
    )


def test_seats_for_just_the_last_pods_are_left_also_of_trays_for_several():
    seats = [("worker", "t0")] * 4
    pods = [*(pod(name, "t0", "Succeeded") for name in "abc"), pod("d", "t0", "Failed")]
    owners = {"job": maker(completions=4, parallelism=4)}
    assert rest(pods, owners, seats) == (seats[:1], (), ())
    (left,) = without_unused_trays(view_of(pods, seats, owners), record_of(seats)).seats
    assert left.tray == "t0"
    assert (
        without_unused_trays(view_of(pods, seats, owners), record_of(seats)).reason == "3 trays of clique A"
    )


def test_a_plan_of_which_trays_were_given_back_says_so_and_names_no_price():
    pods = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Running"), pod("c", "t2", "Running")]
    found = record_of(THREE)
    reduced = without_unused_trays(view_of(pods, THREE, JOB), found)
    assert (reduced.reason, reduced.price) == ("trays given back: 1; 3 trays of clique A", ())
    pods[1] = pod("b", "t1", "Succeeded")
    again = replace(found, plan=reduced)
    left = without_unused_trays(view_of(pods, THREE, JOB), again)
    assert left.reason == "trays given back: 2; 3 trays of clique A"


def test_spares_go_with_the_last_member_of_their_clique():
    cliques = {"t0": "c1", "t1": "c1", "s1": "c1", "t2": "c2", "s2": "c2"}
    pods = [pod("a", "t0", "Succeeded"), pod("b", "t1", "Running"), pod("c", "t2", "Running")]
    assert rest(pods, JOB, THREE, spares=("s1", "s2"), cliques=cliques) == (
        THREE[1:],
        ("s1", "s2"),
        ("c1", "c2"),
    )
    two = [pods[0], pods[1], pod("c", "t2", "Succeeded")]
    left = rest(two, JOB, THREE, spares=("s1", "s2"), cliques=cliques)
    assert left == ([("worker", "t1")], ("s1",), ("c1",))


@given(
    phases=st.lists(st.sampled_from(["Running", "Failed", "Succeeded", "none"]), min_size=3, max_size=3),
    completions=st.integers(1, 5),
)
def test_seats_suffice_for_all_that_may_still_run_and_for_no_more(phases, completions):
    pods = [pod(f"p{at}", f"t{at}", phase) for at, phase in enumerate(phases) if phase != "none"]
    left = rest(pods, {"job": maker(completions=completions)}, THREE)
    seats = THREE if left is None else left[0]
    done, running = phases.count("Succeeded"), phases.count("Running")
    wanted = max(3, completions) - done if done else 3
    assert len(seats) == min(3, max(wanted, running))
    assert {f"t{at}" for at, phase in enumerate(phases) if phase == "Running"} <= {tray for _, tray in seats}


def job(**spec):
    return {"metadata": {"name": "j"}, "spec": spec}


def test_a_job_says_how_many_pods_it_makes_or_nobody_does():
    assert read_owner_job(job(completions=3, parallelism=3)) == maker(completions=3)
    assert read_owner_job(job(completions=3, parallelism=3, completionMode="Indexed")) == maker(
        completions=3, is_indexed=True
    )
    assert read_owner_job(job(parallelism=3)) is None
    owner = {"kind": "JobSet", "name": "set", "uid": "u", "controller": True}
    owned = job(completions=3, parallelism=3) | {"metadata": {"name": "j", "ownerReferences": [owner]}}
    assert read_owner_job(owned) == maker(completions=3, is_owned=True)


def test_a_job_says_what_is_over_and_whether_it_makes_pods():
    status = {"succeeded": 5, "completedIndexes": "1,3-5,7", "failedIndexes": "2,4-5"}
    found = read_owner_job(job(completions=9, completionMode="Indexed") | {"status": status})
    assert (found.succeeded, found.closed, found.is_still) == (
        5,
        (range(1, 2), range(2, 3), range(3, 6), range(7, 8)),
        False,
    )
    assert read_owner_job(job(completions=3, suspend=True)).is_still
    for type_ in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"):
        for status, still in (("True", True), ("False", False)):
            ended = {"status": {"conditions": [{"type": type_, "status": status}]}}
            assert read_owner_job(job(completions=3) | ended).is_still is still
    going = {"metadata": {"name": "j", "deletionTimestamp": "2001-01-01T00:00:00Z"}}
    assert read_owner_job(job(completions=3) | going).is_still


@pytest.mark.parametrize(
    ("type_", "is_owned", "is_over"),
    [
        ("Complete", False, True),
        ("Complete", True, True),
        ("Failed", False, True),
        ("Failed", True, False),
        ("SuccessCriteriaMet", False, False),
        ("Suspended", False, False),
    ],
)
def test_a_job_is_over_for_good_unless_its_owner_may_make_it_anew(type_, is_owned, is_over):
    owner = {"kind": "JobSet", "name": "set", "uid": "u", "controller": True}
    meta = {"name": "j"} | ({"ownerReferences": [owner]} if is_owned else {})
    condition = {"type": type_, "status": "True", "lastTransitionTime": "2001-01-01T00:00:00Z"}
    ended = job(completions=3) | {"metadata": meta, "status": {"conditions": [condition]}}
    assert read_owner_job(ended).over_since == ("2001-01-01T00:00:00Z" if is_over else None)
    ended["metadata"] = meta | {"deletionTimestamp": "2001-01-01T00:00:01Z"}
    assert read_owner_job(ended).over_since is None


@pytest.mark.parametrize(
    ("type_", "time", "is_over"),
    [
        ("Succeeded", "2001-01-01T00:00:00Z", True),
        ("Failed", "2001-01-01T00:00:00Z", True),
        ("Failed", None, False),
        ("Running", "2001-01-01T00:00:00Z", False),
    ],
)
def test_an_mpi_job_is_over_once_its_launcher_is_not_tried_again(type_, time, is_over):
    """A worker that was evicted makes it Failed, without a completion time, and pods may follow."""
    status = {"conditions": [{"type": type_, "status": "True"}], "completionTime": time}
    found = read_finished_mpi_job({"metadata": {"name": "m", "uid": "m"}, "status": status})
    assert found == (FinishedMPIJob(uid="m") if is_over else None)


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
    assert read_member(obj).job is None
