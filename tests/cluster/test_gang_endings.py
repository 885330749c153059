"""Members of a gang that succeed before the others, on a real control plane: nothing waits for them."""

from collections.abc import AsyncIterator

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.gangs_at_work import PATIENCE, gangs_at_work, record, two_racks
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.gang_objects import GROUP_LABEL, reserving_plans
from rackloom.core.cluster.objects import JOB, NODE, POD, Object, is_pod_ready
from rackloom.core.cluster.pods import SIZE_ANNOTATION

pytestmark = pytest.mark.anyio
MEMBERS = 3


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook and the controllers at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


def indexed_job(namespace: str) -> Object:
    resources = {"limits": {"nvidia.com/gpu": "4"}}
    spec = {
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "none", "resources": resources}],
    }
    meta = {
        "labels": {"job": "ends", "rackloom.dev/gang": "ends"},
        "annotations": {SIZE_ANNOTATION: str(MEMBERS)},
    }
    count = {"parallelism": MEMBERS, "completions": MEMBERS, "completionMode": "Indexed", "backoffLimit": 6}
    return {
        "metadata": {"name": "ends", "namespace": namespace},
        "spec": {**count, "template": {"metadata": meta, "spec": spec}},
    }


async def end(api: KubeApi, namespace: str, pod: str, phase: str) -> None:
    """End a pod with a phase, as its kubelet reports it."""
    await api.patch(POD, pod, namespace, {"status": {"phase": phase}}, subresource="status")


async def running(api: KubeApi, namespace: str) -> dict[str, tuple[str, str]]:
    """By index: the name of the pod that runs, and its node.

    Ready is a kubelet's last report of a running pod. It would overwrite an earlier `end`.
    """
    pods = (await api.list(POD, namespace, labels="job=ends")).items
    return {
        pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: (
            pod["metadata"]["name"],
            pod["spec"]["nodeName"],
        )
        for pod in pods
        if pod["status"].get("phase") == "Running" and is_pod_ready(pod)
    }


async def all_run(add_nodes: AddNodes, api: KubeApi, namespace: str) -> dict[str, tuple[str, str]]:
    """The job on two racks, by index, once all of it runs."""
    await two_racks(add_nodes, MEMBERS)
    await api.create(JOB, indexed_job(namespace))

    async def look() -> dict[str, tuple[str, str]]:
        found = await running(api, namespace)
        return found if len(found) == MEMBERS else {}

    return await until(look, "the gang runs", PATIENCE)


async def held(api: KubeApi) -> set[str]:
    return {item["metadata"]["name"] for item in (await api.list(NODE)).items if reserving_plans(item)}


async def test_the_tray_of_an_index_that_succeeded_is_free_and_that_of_one_that_failed_is_not(
    driver: None, add_nodes: AddNodes, api: KubeApi, namespace: str
) -> None:
    pods = await all_run(add_nodes, api, namespace)
    await end(api, namespace, pods["0"][0], "Succeeded")
    left = {pods["1"][1], pods["2"][1]}

    async def is_free() -> bool:
        return await held(api) == left

    await until(is_free, "the tray of index 0 is given back", PATIENCE)
    plan = await record(api, namespace, "ends")
    assert plan is not None
    assert set(plan.reserved) == left

    await end(api, namespace, pods["1"][0], "Failed")

    async def again() -> tuple[str, str] | None:
        now = (await running(api, namespace)).get("1")
        return None if now is None or now[0] == pods["1"][0] else now

    made_anew = await until(again, "index 1 runs again", PATIENCE)
    assert made_anew is not None
    assert made_anew[1] == pods["1"][1], "on its own tray"
    assert await held(api) == left
    await api.delete(JOB, "ends", namespace)


async def test_the_last_index_comes_back_to_its_tray_when_all_others_have_succeeded(
    driver: None, add_nodes: AddNodes, api: KubeApi, namespace: str
) -> None:
    pods = await all_run(add_nodes, api, namespace)
    for index in ("0", "1"):
        await end(api, namespace, pods[index][0], "Succeeded")
    # The Job waits ten seconds now, during which the gang has no pod.
    await end(api, namespace, pods["2"][0], "Failed")

    async def again() -> str:
        now = (await running(api, namespace)).get("2")
        return "" if now is None or now[0] == pods["2"][0] else now[1]

    assert await until(again, "index 2 runs again", PATIENCE) == pods["2"][1]
    assert await held(api) == {pods["2"][1]}
    await end(api, namespace, (await running(api, namespace))["2"][0], "Succeeded")

    async def is_free() -> bool:
        return not await held(api)

    await until(is_free, "the job is complete, and the last tray is given back", PATIENCE)
    await api.delete(JOB, "ends", namespace)


def half(namespace: str, group: str) -> Object:
    """One of two Jobs that are a gang together."""
    made = indexed_job(namespace)
    made["metadata"]["name"] = group
    made["spec"] |= {"parallelism": 2, "completions": 2}
    meta = made["spec"]["template"]["metadata"]
    meta["labels"][GROUP_LABEL] = group
    meta["annotations"] = {SIZE_ANNOTATION: "a=2,b=2"}
    return made


async def test_two_jobs_go_on_after_a_pause_with_the_members_that_are_left(
    driver: None, add_nodes: AddNodes, api: KubeApi, namespace: str
) -> None:
    await two_racks(add_nodes, 4)
    for group in ("a", "b"):
        await api.create(JOB, half(namespace, group))

    async def run(count: int) -> set[str]:
        pods = (await api.list(POD, namespace, labels="job=ends")).items
        found = {
            pod["metadata"]["name"]
            for pod in pods
            if pod["status"].get("phase") == "Running" and is_pod_ready(pod)
        }
        return found if len(found) == count else set()

    async def both_run() -> set[str]:
        return await run(4)

    first = min(await until(both_run, "both jobs run", PATIENCE))
    await end(api, namespace, first, "Succeeded")

    async def is_counted() -> bool:
        return (await api.get(JOB, "a", namespace))["status"].get("succeeded") == 1

    await until(is_counted, "job a has counted its first pod", PATIENCE)
    await api.delete(POD, first, namespace)
    await suspend(api, namespace, True)

    async def is_over() -> bool:
        return not await held(api) and await record(api, namespace, "ends") is None

    await until(is_over, "all trays are given back", PATIENCE)
    await suspend(api, namespace, False)

    async def the_rest_runs() -> set[str]:
        return await run(3)

    await until(the_rest_runs, "the three that are left run", PATIENCE)
    plan = await record(api, namespace, "ends")
    assert plan is not None
    assert set(plan.reserved) == await held(api)
    assert len(plan.reserved) == 3
    for group in ("a", "b"):
        await api.delete(JOB, group, namespace)


async def suspend(api: KubeApi, namespace: str, is_suspended: bool) -> None:
    for group in ("a", "b"):
        await api.patch(JOB, group, namespace, {"spec": {"suspend": is_suspended}})
