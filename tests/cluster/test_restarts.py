"""Parts of the control plane die and come back; what ran goes on, and what was asked for happens."""

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, Object
from rackloom.claim.kube.kinds import POD

pytestmark = pytest.mark.anyio


def pod(name: str, namespace: str) -> Object:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager"])
async def test_pods_run_after_a_part_was_killed(
    part: str, cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, namespace: str
) -> None:
    await add_nodes(1)
    await api.create(POD, pod("before", namespace))
    cluster.kill_one(part)
    cluster.start_one(part)
    cluster.wait_until_ready()
    await api.create(POD, pod("after", namespace))

    async def both_run() -> bool:
        pods = (await api.list(POD, namespace)).items
        return [one["status"]["phase"] for one in pods] == ["Running", "Running"]

    await until(both_run, "pods from before and after run")
