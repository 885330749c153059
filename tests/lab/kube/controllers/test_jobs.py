"""The Job controller's decisions, and one Job from its first pod to Complete in virtual time."""

import asyncio
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.controllers.workloads import COMPLETION_INDEX, JobController, job_status, missing_pods
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

PHASES = st.lists(st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]), max_size=12)


def job(**spec: Any) -> Object:
    template = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
    meta = {"name": "j", "namespace": "default", "uid": "u"}
    return {"metadata": meta, "spec": {"template": template, **spec}}


def pods(phases: list[str]) -> list[Object]:
    return [
        {"metadata": {"annotations": {COMPLETION_INDEX: str(index)}}, "status": {"phase": phase}}
        for index, phase in enumerate(phases)
    ]


@given(PHASES, st.integers(1, 8), st.integers(0, 4))
def test_there_are_never_more_pods_than_wanted(phases: list[str], wanted: int, at_once: int) -> None:
    there = pods(phases[:wanted])
    made = missing_pods(job(completions=wanted, parallelism=at_once), there)
    active = sum(phase in ("Pending", "Running") for phase in phases[:wanted])
    assert not made or active + len(made) <= at_once
    taken = [int(pod["metadata"]["annotations"][COMPLETION_INDEX]) for pod in made]
    kept = {index for index, phase in enumerate(phases[:wanted]) if phase != "Failed"}
    assert len(set(taken)) == len(taken)
    assert set(taken).isdisjoint(kept)
    assert all(index < wanted for index in taken)


@given(PHASES)
def test_a_job_that_failed_too_often_is_over(phases: list[str]) -> None:
    limited = job(completions=20, parallelism=20, backoffLimit=2)
    conditions = {condition["type"] for condition in job_status(limited, pods(phases)).get("conditions", ())}
    assert (conditions == {"Failed"}) is (phases.count("Failed") > 2)
    assert not (conditions and missing_pods(limited, pods(phases)))


def test_a_suspended_job_has_no_pods() -> None:
    assert not missing_pods(job(suspend=True), [])


def test_a_job_runs_to_its_end() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "test")
        running = asyncio.create_task(JobController(kube, random.Random(0)).run())
        made = job(completions=3, parallelism=2)
        made["metadata"].pop("uid")
        await api.create(objects.JOB, made)
        ends = iter(["Failed", "Succeeded", "Succeeded", "Succeeded"])
        async with asyncio.timeout(100):
            for phase in ends:
                await asyncio.sleep(5)
                found = kube.store.all(objects.POD)
                active = [pod for pod in found if pod["status"]["phase"] == "Pending"]
                assert 1 <= len(active) <= 2
                name = active[0]["metadata"]["name"]
                await api.patch(
                    objects.POD, name, "default", {"status": {"phase": phase}}, subresource="status"
                )
            await asyncio.sleep(5)
        (ended,) = kube.store.all(objects.JOB)
        assert ended["status"]["conditions"][0]["type"] == "Complete"
        assert (ended["status"]["succeeded"], ended["status"]["failed"]) == (3, 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    event_loop.run_simulation(0, run)
