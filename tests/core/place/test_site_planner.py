"""Several jobs on one site, as values: urgency, reservations, explanations, and the prices of segments."""

from typing import Any

import pytest
from tests.cli.place_objects import job, mpi_job, node, pod
from tests.core.cluster.views import as_ready

from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.cluster.jobs import PriorityClass, PriorityClasses, read_jobs
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import DraDevices
from rackloom.core.place.site_planner import PlacementReport, PlanRequest, SiteObjects, SitePlanner
from rackloom.errors import Refused

URGENT = PriorityClass(name="urgent", value=7)


def report(objects: list[dict[str, Any]], trays: int, **request: Any) -> PlacementReport:
    nodes = tuple(node(f"tray-{number}", "domain.1") for number in range(trays))
    found = SiteObjects(
        state=read_state(map(as_ready, nodes)),
        devices=DraDevices(nodes=(), classes=device_classes(), slices=()),
    )
    classes = PriorityClasses([URGENT], are_all_known=True)
    asked = PlanRequest(**request)
    return SitePlanner(found, (), (), classes, asked).report(read_jobs(objects, asked.labels))


def urgent(name: str, members: int) -> dict[str, Any]:
    wanted = job(name, members)
    wanted["spec"]["template"]["spec"]["priorityClassName"] = "urgent"
    return wanted


def test_the_urgent_job_takes_the_trays_and_the_other_is_explained() -> None:
    first, second = report([job("later", 3), urgent("now", 2)], trays=4).jobs
    assert first.plan is not None
    assert (first.job, len({seat.tray for seat in first.plan.seats})) == ("now", 2)
    assert second.plan is None
    assert "3" in (second.blocked or "")
    assert second.fixes


def test_a_class_that_the_site_lacks_is_refused() -> None:
    unknown = urgent("now", 1)
    unknown["spec"]["template"]["spec"]["priorityClassName"] = "other"
    with pytest.raises(Refused, match="names the PriorityClass other"):
        report([unknown], trays=1)


def test_trays_that_are_left_out_take_no_job() -> None:
    (answer,) = report([job("all", 4)], trays=4, without_trays=("tray-2",)).jobs
    assert answer.plan is None


def test_segments_are_priced_where_trays_may_be_down() -> None:
    prices = report([], trays=4, down=0.0).segments
    assert [(price.trays, price.outside, price.usable) for price in prices] == [
        (1, 0, 1.0), (2, 0, 1.0), (3, 1, 0.75), (4, 0, 1.0)
    ]  # fmt: skip


LAUNCHER_WITH_GPUS = pod("x", None)["spec"]


def as_worker(workers: int, launcher: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An MPIJob with the launcher as rank 0."""
    found = mpi_job(workers, launcher=launcher)
    found["spec"] |= {"runLauncherAsWorker": True, **fields}
    return found


def test_ports_of_pods_in_the_hosts_network_are_noticed() -> None:
    """The API server gives each the host port of its container port, once the pod is made."""
    container = {**LAUNCHER_WITH_GPUS["containers"][0], "ports": [{"containerPort": 2222}]}
    (answer,) = report([mpi_job(2, hostNetwork=True, containers=[container])], trays=4).jobs
    assert "hostPort 2222 of worker is not honoured: two members may be on one tray" in answer.notes
    (answer,) = report([mpi_job(2, containers=[container])], trays=4).jobs
    assert not [note for note in answer.notes if "hostPort" in note]


def test_a_launcher_that_is_a_worker_counts_in_the_first_segment() -> None:
    (answer,) = report([as_worker(3, LAUNCHER_WITH_GPUS)], trays=4, segment=4).jobs
    assert answer.plan is not None
    assert [seat.group for seat in answer.plan.seats] == ["launcher", *["worker"] * 3]
    assert len(answer.plan.trays) == 4
    with pytest.raises(Refused, match="a segment of 5 members, and launcher and worker have 4"):
        report([as_worker(3, LAUNCHER_WITH_GPUS)], trays=8, segment=5)
    with pytest.raises(Refused, match="a segment of 4 members, and worker has 3"):
        report([mpi_job(3, launcher=LAUNCHER_WITH_GPUS)], trays=8, segment=4)


def test_a_launcher_that_takes_part_of_the_work_without_devices_is_noticed() -> None:
    (answer,) = report([as_worker(2)], trays=4).jobs
    assert (
        "its launcher is rank 0 (runLauncherAsWorker) and takes no device, as its workers do" in answer.notes
    )
    (answer,) = report([as_worker(2, LAUNCHER_WITH_GPUS)], trays=4).jobs
    assert not [note for note in answer.notes if "launcher" in note]


def test_a_launcher_that_takes_devices_without_work_is_noticed() -> None:
    (answer,) = report([mpi_job(2, launcher=LAUNCHER_WITH_GPUS)], trays=4).jobs
    (note,) = [note for note in answer.notes if "launcher" in note]
    assert note == (
        "its launcher takes devices, and no rank runs there: set runLauncherAsWorker, or take them away from"
        " it"
    )


@pytest.mark.parametrize("launcher", [LAUNCHER_WITH_GPUS, None])
def test_a_launcher_that_waits_for_the_workers_is_left_out_of_a_gang(launcher: dict[str, Any] | None) -> None:
    waiting = as_worker(2, launcher, launcherCreationPolicy="WaitForWorkersReady")
    (answer,) = report([waiting], trays=4).jobs
    notes = [note for note in answer.notes if "waits for the workers" in note]
    assert len(notes) == 1
    assert ("another job may take its tray" in notes[0]) == (launcher is not None)


def test_a_job_of_another_manager_makes_no_pods_here() -> None:
    theirs = mpi_job(2)
    theirs["spec"]["runPolicy"] = {"managedBy": "kueue.x-k8s.io/multikueue"}
    (answer,) = report([theirs], trays=4).jobs
    assert answer.notes[-1] == (
        "kueue.x-k8s.io/multikueue manages it (managedBy): the MPI operator of this cluster makes no pods of"
        " it"
    )
    theirs["spec"]["runPolicy"] = {"managedBy": "kubeflow.org/mpi-operator"}
    (answer,) = report([theirs], trays=4).jobs
    assert not [note for note in answer.notes if "managedBy" in note]
