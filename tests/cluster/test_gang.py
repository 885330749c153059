"""A whole-rack MPIJob on a real control plane: gated by the webhook, placed, reserved, pinned and let go.

The API server, scheduler, controllers and MPI operator are real. Our controller and our webhook have only the
rights that deploy/kubernetes gives them. Nodes are simulated, and carry the labels of their clique.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import MPI_JOB
from tests.cluster.gangs_at_work import PATIENCE, does_not_fit, gangs_at_work, has_no_plans, record, two_racks
from tests.cluster.installed import as_account
from tests.cluster.kubectl import typed
from tests.waiting import until

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL, TRAY_ANNOTATION, reserving_plans
from rackloom.core.cluster.objects import EVENT, JOB, NODE, POD, Object
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets

pytestmark = pytest.mark.anyio
TRAYS = 18


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook and the controllers at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


@pytest.fixture
async def racks(add_nodes: AddNodes) -> dict[str, str]:
    """Two racks of 18 trays: the rack of each node."""
    return await two_racks(add_nodes, TRAYS)


def mpi_job(namespace: str, name: str, workers: int) -> Object:
    def template(group: str, limits: dict[str, str]) -> Object:
        meta = {
            "labels": {"job": name, GROUP_LABEL: group, "rackloom.dev/gang": name},
            "annotations": {SIZE_ANNOTATION: f"launcher=1,worker={workers}"},
        }
        container = {"name": "main", "image": "none", "resources": {"limits": limits}}
        return {"metadata": meta, "spec": {"containers": [container]}}

    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "slotsPerWorker": 4,
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": template("launcher", {})},
                "Worker": {"replicas": workers, "template": template("worker", {"nvidia.com/gpu": "4"})},
            },
        },
    }


def small_job(namespace: str, pods: int) -> Object:
    """A job without a gang: each of its pods takes any whole tray."""
    container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    spec = {"restartPolicy": "Never", "containers": [container]}
    template = {"metadata": {"labels": {"job": "small"}}, "spec": spec}
    return {
        "metadata": {"name": "small", "namespace": namespace},
        "spec": {"parallelism": pods, "completions": pods, "template": template},
    }


async def bound(api: KubeApi, namespace: str, job: str) -> dict[str, str]:
    """The node of each pod of a job that has one."""
    pods = (await api.list(POD, namespace, labels=f"job={job}")).items
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}


def all_bound(api: KubeApi, namespace: str, job: str, count: int) -> Callable[[], Awaitable[dict[str, str]]]:
    async def look() -> dict[str, str]:
        found = await bound(api, namespace, job)
        return found if len(found) == count else {}

    return look


async def held(api: KubeApi) -> set[str]:
    """Nodes that are reserved for any gang."""
    return {item["metadata"]["name"] for item in (await api.list(NODE)).items if reserving_plans(item)}


async def test_a_full_rack_job_is_whole_beside_one_that_would_have_split_its_rack(
    driver: None,
    mpi_operator: None,
    cluster: ControlPlane,
    racks: dict[str, str],
    api: KubeApi,
    namespace: str,
) -> None:
    await api.create(MPI_JOB, mpi_job(namespace, "rack", TRAYS))

    async def reserved() -> bool:
        found = await record(api, namespace, "rack")
        return found is not None and found.plan is not None and await held(api) == set(found.reserved)

    await until(reserved, "the rack is reserved", PATIENCE)
    # Its pods may take any free tray of the cluster. kube-scheduler would spread them over both racks.
    await api.create(JOB, small_job(namespace, 6))
    places = await until(all_bound(api, namespace, "rack", TRAYS + 1), "the gang is bound", PATIENCE)
    (rack,) = {racks[node] for node in places.values()}
    workers = {node for name, node in places.items() if "worker" in name}
    assert len(workers) == TRAYS
    small = await until(all_bound(api, namespace, "small", 6), "the small job is bound", PATIENCE)
    assert {racks[node] for node in small.values()} == {"1", "2"} - {rack}

    # A second gang does not fit beside it: it gets a message, and takes nothing.
    await api.create(MPI_JOB, mpi_job(namespace, "late", TRAYS))
    await until(lambda: does_not_fit(api, namespace, "late"), "the second gang is told", PATIENCE)
    assert await held(api) == workers
    assert await bound(api, namespace, "late") == {}
    events = (await api.list(EVENT, namespace, fields="reason=DoesNotFit")).items
    assert "MPIJob" in {event["involvedObject"]["kind"] for event in events}
    # The doctor names it in the words of the event, and its fix works when pasted.
    findings = examine(await site_snapshot(time.time(), cluster=api))
    (found,) = [finding for finding in findings if finding.check == Check.GANG]
    assert found.subject == f"GangPlan {namespace}/late"
    assert found.message in {f"DoesNotFit: {event['message']}" for event in events}
    shown = await asyncio.to_thread(typed, cluster, found.fix)
    assert shown.returncode == 0, shown.stderr
    assert "DoesNotFit" in shown.stdout

    # The first ends, and the second has the whole rack.
    await api.delete(MPI_JOB, "rack", namespace)
    places = await until(all_bound(api, namespace, "late", TRAYS + 1), "the second gang is bound", PATIENCE)
    assert {racks[node] for node in places.values()} == {rack}
    await api.delete(MPI_JOB, "late", namespace)
    await until(lambda: has_no_plans(api), "the plan is gone", PATIENCE)
    assert await held(api) == set()


async def test_members_of_a_node_that_is_gone_move_to_another_of_their_rack_and_nobody_else(
    driver: None,
    mpi_operator: None,
    add_nodes: AddNodes,
    kubelets: SimulatedKubelets,
    api: KubeApi,
    namespace: str,
) -> None:
    racks = await two_racks(add_nodes, 4)
    await api.create(MPI_JOB, mpi_job(namespace, "part", 3))
    before = await until(all_bound(api, namespace, "part", 4), "the gang is bound", PATIENCE)
    lost = before["part-worker-2"]
    await kubelets.lose(lost)
    await api.delete(NODE, lost)

    async def moved() -> dict[str, str]:
        found = await bound(api, namespace, "part")
        return found if len(found) == len(before) and lost not in found.values() else {}

    after = await until(moved, "the member of the lost node is bound elsewhere", PATIENCE)
    assert {name for name in before if before[name] != after[name]} == {"part-worker-2"}
    assert racks[after["part-worker-2"]] == racks[lost]
    await until(lambda: is_held(api, set(after.values())), "just its trays are reserved", PATIENCE)
    await kubelets.register(NodeSpec(lost))
    await api.delete(MPI_JOB, "part", namespace)
    await until(lambda: has_no_plans(api), "the plan is gone", PATIENCE)
    assert await held(api) == set()


async def is_held(api: KubeApi, nodes: set[str]) -> bool:
    return await held(api) == nodes


async def test_the_controller_may_change_pods_of_gangs_only_and_only_to_let_them_go(
    driver: None, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    plain: Object = {
        "metadata": {"name": "plain", "namespace": namespace},
        "spec": {
            "schedulingGates": [{"name": GANG_GATE}],
            "containers": [{"name": "main", "image": "none"}],
        },
    }
    gang = {
        **plain,
        "metadata": {**plain["metadata"], "name": "ganged", "labels": {"rackloom.dev/gang": "g"}},
    }
    for pod in (plain, gang):
        await api.create(POD, pod)
    note = {"op": "add", "path": "/metadata/annotations", "value": {TRAY_ANNOTATION: "n"}}
    gate = {"op": "remove", "path": "/spec/schedulingGates/0"}
    image = {"op": "replace", "path": "/spec/containers/0/image", "value": "other"}
    # Until the policy is in effect, a change succeeds. Only `note` and `image` can then be sent again.
    repeatable = {"plain": (note,), "ganged": (image,)}
    changes = {"plain": (note, gate), "ganged": (gate, image)}
    async with as_account(api, cluster, "rackloom-controller") as own:
        for name, change in repeatable.items():
            await until(lambda n=name, c=change: refused(own, namespace, n, c), f"{name} stays as it is")
        for name, change in changes.items():
            assert await refused(own, namespace, name, change), f"{name} stays as it is"
        with pytest.raises(Rejected):
            await own.delete(POD, "plain", namespace)
        await own.delete(POD, "ganged", namespace)


async def refused(own: KubeApi, namespace: str, name: str, change: tuple[Object, ...]) -> bool:
    """Tries a forbidden change. Call it repeatedly, because a new policy takes effect only after a moment."""
    try:
        await own.patch(POD, name, namespace, change)
    except Rejected as error:
        return "controller" in error.message
    return False
