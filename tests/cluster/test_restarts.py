"""Parts of the control plane die and come back. Running pods go on, and pending requests complete."""

import asyncio
import contextlib

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.core.cluster.objects import POD, Object

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
    await asyncio.to_thread(cluster.kill_one, part)
    cluster.start_one(part)  # By this thread: a process ends with the one that started it.
    await asyncio.to_thread(cluster.wait_until_ready)

    async def made() -> bool:
        """A ready server may have no etcd yet, and may carry out a request without an answer."""
        with contextlib.suppress(KubeError):
            await api.apply(POD, pod("after", namespace), manager="test")
            return True
        return False

    await until(made, "a pod is made after it")

    async def both_run() -> bool:
        with contextlib.suppress(KubeError):
            pods = (await api.list(POD, namespace)).items
            return [pod["status"]["phase"] for pod in pods] == ["Running", "Running"]
        return False

    await until(both_run, "pods from before and after run")
