"""kube-scheduler with its rendered objects: node and pod affinity, and the in-tree PodGroup."""

from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import apply, landed, planned, rendered, spread
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import job, occupy, pods
from tests.cluster.renderings.plane import POD_GROUPS

from rackloom.claim.kube.api import KubeApi

pytestmark = pytest.mark.anyio
SEGMENT = 16


@pytest.mark.parametrize("target", ["affinity", "podgroup"])
async def test_a_full_rack_job_lands_in_the_one_clique_that_is_whole(
    cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path, target: str
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = job(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    objects = rendered(cluster, file, target)
    groups = [value["apiVersion"] for value in objects if value["kind"] == "PodGroup"]
    assert groups == [POD_GROUPS] * (target == "podgroup")
    apply(cluster, objects)

    found = await landed(api, namespace, TRAYS)
    assert await spread(api, found) == {(whole,): TRAYS}


async def test_segments_land_on_the_trays_of_the_plan(
    cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = pods(tmp_path, namespace, 2 * SEGMENT)
    plan = planned(cluster, file, "--segment", str(SEGMENT))

    apply(cluster, rendered(cluster, file, "affinity", "--segment", str(SEGMENT)))

    found = await landed(api, namespace, 2 * SEGMENT)
    trays = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in found}
    assert trays == {f"rack-{seat['member']}": seat["tray"] for seat in plan["seats"]}
    assert await spread(api, found) == {(racks[1],): SEGMENT, (racks[2],): SEGMENT}
