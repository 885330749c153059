"""LeaderWorkerSet's own controller and webhook, with objects rendered for exclusive topology."""

from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import apply, landed, planned, rendered, spread
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import groups, occupy

from rackloom.claim.kube.api import KubeApi

pytestmark = pytest.mark.anyio
SEGMENT = 16
GROUP = "leaderworkerset.sigs.k8s.io/group-index"
SUBGROUP = "leaderworkerset.sigs.k8s.io/subgroup-index"


async def test_each_replica_has_a_clique_to_itself(
    lws: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = groups(tmp_path, namespace, replicas=2, size=TRAYS)
    assert sorted(planned(cluster, file)["cliques"]) == racks[1:]

    apply(cluster, rendered(cluster, file, "lws"))

    pods = await landed(api, namespace, 2 * TRAYS)
    assert set(await spread(api, pods)) == {(racks[1],), (racks[2],)}
    assert list((await spread(api, pods, GROUP)).values()) == [TRAYS, TRAYS]


async def test_each_segment_has_a_clique_to_itself(
    lws: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = groups(tmp_path, namespace, replicas=1, size=2 * SEGMENT)

    apply(cluster, rendered(cluster, file, "lws", "--segment", str(SEGMENT)))

    pods = await landed(api, namespace, 2 * SEGMENT)
    assert set(await spread(api, pods)) == {(racks[1],), (racks[2],)}
    assert list((await spread(api, pods, GROUP, SUBGROUP)).values()) == [SEGMENT, SEGMENT]
