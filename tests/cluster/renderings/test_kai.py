"""KAI's own scheduler with its rendered objects: the nodes of the pods, and jobs that it does not split."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import SMALL, apply, landed, planned, rendered, spread
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import free, groups, mpi_job, occupy, pods
from tests.cluster.renderings.kai_parts import POD_GROUP, kai_at_work
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import POD

pytestmark = pytest.mark.anyio
GROUP = "leaderworkerset.sigs.k8s.io/group-index"


@pytest.fixture
async def kai(kai_programs: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    async with kai_at_work(kai_programs, cluster, api):
        yield


async def test_pods_land_in_the_one_clique_that_is_whole(
    kai: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = pods(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    apply(cluster, rendered(cluster, file, "kai"))

    found = await landed(api, namespace, TRAYS)
    assert await spread(api, found) == {(whole,): TRAYS}


async def test_pods_wait_rather_than_be_split(
    kai: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    first, second = await add_rack(), await add_rack()
    documents = rendered(cluster, pods(tmp_path, namespace, TRAYS), "kai")
    for clique in (first, second):
        await occupy(api, namespace, clique, 1)

    apply(cluster, documents)

    await until(lambda: _is_turned_away(api, namespace), "KAI says that there is no room")
    waiting = (await api.list(POD, namespace, labels=f"!{SMALL}")).items
    assert [pod for pod in waiting if "nodeName" in pod["spec"]] == []
    await free(api, namespace, second)
    found = await landed(api, namespace, TRAYS)
    assert await spread(api, found) == {(second,): TRAYS}


async def test_a_launcher_lands_beside_its_workers(
    mpi_jobs: None,
    kai: None,
    cluster: ControlPlane,
    api: KubeApi,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = mpi_job(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    apply(cluster, rendered(cluster, file, "kai"))

    found = await landed(api, namespace, TRAYS + 1)
    assert await spread(api, found) == {(whole,): TRAYS + 1}


async def test_each_replica_shares_a_clique(
    lws: None,
    kai: None,
    cluster: ControlPlane,
    api: KubeApi,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 1)
    file = groups(tmp_path, namespace, replicas=2, size=TRAYS)
    assert sorted(planned(cluster, file)["cliques"]) == racks[1:]

    apply(cluster, rendered(cluster, file, "kai"))

    found = await landed(api, namespace, 2 * TRAYS)
    assert set(await spread(api, found)) == {(racks[1],), (racks[2],)}
    assert list((await spread(api, found, GROUP)).values()) == [TRAYS, TRAYS]


async def _is_turned_away(api: KubeApi, namespace: str) -> bool:
    groups = (await api.list(POD_GROUP, namespace)).items
    return any(group.get("status", {}).get("schedulingConditions") for group in groups)
