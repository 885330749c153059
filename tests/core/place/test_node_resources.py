"""CPU and memory bound a plan as in kube-scheduler: no tray is overfull, and refusals name the shortage."""

from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.cli.place_objects import job, node, pod
from tests.core.cluster.views import as_ready

from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.cluster.jobs import PriorityClasses, read_jobs
from rackloom.core.cluster.pods import read_pod
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.scheduling import pod_requests
from rackloom.core.cluster.trays import DraDevices
from rackloom.core.place.gang_planner import NodeUse
from rackloom.core.place.site_planner import JobAnswer, PlanRequest, SiteObjects, SitePlanner

Amounts = dict[str, str]


def tray(name: str, **amounts: str) -> dict[str, Any]:
    found = node(name, "domain.1")
    found["status"]["allocatable"] |= {"pods": "110", **amounts}
    return found


def asking(name: str, members: int, gpus: int = 4, **requests: str) -> dict[str, Any]:
    wanted = job(name, members)
    (container,) = wanted["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": requests}
    return wanted


def running(name: str, on: str, **requests: str) -> dict[str, Any]:
    """A pod without GPUs, such as that of a DaemonSet."""
    return {
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"nodeName": on, "containers": [{"name": "main", "resources": {"requests": requests}}]},
        "status": {"phase": "Running"},
    }


def answers(
    objects: list[dict[str, Any]], nodes: list[dict[str, Any]], *pods: dict[str, Any], **request: Any
) -> tuple[JobAnswer, ...]:
    devices = DraDevices(nodes=(), classes=device_classes(), slices=())
    found = SiteObjects(state=read_state(map(as_ready, nodes), pods), devices=devices)
    asked = PlanRequest(**request)
    planner = SitePlanner(found, (), (), PriorityClasses([], are_all_known=False), asked)
    return planner.report(read_jobs(objects, asked.labels)).jobs


def trays_of(answer: JobAnswer) -> Counter[str]:
    assert answer.plan is not None, answer.blocked
    return Counter(seat.tray for seat in answer.plan.seats)


def test_a_tray_whose_cpus_others_request_is_passed_over() -> None:
    nodes = [tray(f"t{number}", cpu="144", memory="960Gi") for number in range(4)]
    busy = running("agent", "t0", cpu="100")
    (answer,) = answers([asking("train", 3, cpu="96")], nodes, busy)
    assert set(trays_of(answer)) == {"t1", "t2", "t3"}


def test_a_refusal_names_the_resource_that_binds() -> None:
    nodes = [tray(f"t{number}", cpu="144", memory="960Gi") for number in range(2)]
    (answer,) = answers([asking("train", 2, cpu="96", memory="1000Gi")], nodes)
    assert answer.plan is None
    assert "has 960Gi of the 1000Gi memory of a member" in (answer.blocked or "")


def test_memory_leaves_room_for_fewer_members_than_gpus_do() -> None:
    nodes = [tray(f"t{number}", cpu="144", memory="100Gi") for number in range(4)]
    (answer,) = answers([asking("train", 4, gpus=1, memory="60Gi")], nodes)
    assert trays_of(answer) == {"t0": 1, "t1": 1, "t2": 1, "t3": 1}


def test_what_a_job_takes_is_gone_for_the_next() -> None:
    nodes = [tray("t0", cpu="100"), tray("t1", cpu="100")]
    first, second = answers([asking("a", 1, gpus=1, cpu="60"), asking("b", 1, gpus=1, cpu="60")], nodes)
    assert set(trays_of(first)) != set(trays_of(second))


def test_a_node_that_does_not_say_what_it_has_is_not_judged() -> None:
    (answer,) = answers([asking("train", 1, cpu="96")], [node("t0", "domain.1")])
    assert trays_of(answer) == {"t0": 1}


def test_the_resources_of_a_job_that_is_preempted_count_as_free() -> None:
    """Its resources go with it. The requests of a DaemonSet stay."""
    nodes = [tray("t0", cpu="144")]
    holder = pod("old", "t0")
    holder["metadata"]["namespace"] = "default"
    holder["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "100"}
    wanted = asking("train", 1, cpu="96")
    wanted["spec"]["template"]["spec"]["priority"] = 10
    (answer,) = answers([wanted], nodes, holder)
    assert any("old" in fix for fix in answer.fixes), answer
    (kept,) = answers([wanted], nodes, holder, running("agent", "t0", cpu="50"))
    assert not any("old" in fix for fix in kept.fixes), kept


SIZES = st.sampled_from(["0", "10", "40", "70", "96"])


@given(
    st.lists(SIZES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), SIZES), min_size=1, max_size=3),
)
def test_no_tray_is_given_more_than_it_has(taken: list[str], wanted: list[tuple[int, int, str]]) -> None:
    nodes = [tray(f"t{number}", cpu="100") for number in range(len(taken))]
    pods = [running(f"agent-{number}", f"t{number}", cpu=cpu) for number, cpu in enumerate(taken)]
    jobs = [asking(f"j{number}", *size, cpu=cpu) for number, (*size, cpu) in enumerate(wanted)]
    used = {f"t{number}": Fraction(cpu) for number, cpu in enumerate(taken)}
    gpus = Counter[str]()
    by_name = {obj["metadata"]["name"]: obj for obj in jobs}
    for answer in answers(jobs, nodes, *pods):
        if answer.plan is not None:
            spec = read_pod(by_name[answer.job.rpartition("/")[2]]["spec"]["template"]).spec
            needed = pod_requests(spec)
            for seat in answer.plan.seats:
                used[seat.tray] += needed["cpu"]
                gpus[seat.tray] += needed["nvidia.com/gpu"]
    assert all(amount <= 100 for amount in used.values())
    assert all(count <= 4 for count in gpus.values())


def test_what_a_job_has_already_is_free_once_it_is_gone() -> None:
    labels = {"batch.kubernetes.io/job-name": "train"}
    own = running("train-0", "t0", cpu="96")
    own["metadata"] |= {"namespace": "default", "labels": labels}
    state = read_state([as_ready(tray("t0", cpu="144", memory="960Gi"))], [own])
    use = NodeUse(state, {"Job train": "train"})
    assert (use.left("t0") or {})["cpu"] == 48_000
    assert (use.left_without("t0", {"train"}) or {})["cpu"] == 144_000
