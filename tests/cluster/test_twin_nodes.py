"""The trays of a twin in a real cluster: registered, published, scheduled onto, and gone at the end."""

from pathlib import Path

import pytest
from tests.waiting import until

from rackloom.app.home import Home
from rackloom.app.twin.cluster import installed_device_classes, twin_nodes
from rackloom.app.twin.site import open_embedded_home
from rackloom.claim.kube.api import KubeApi
from rackloom.core.domains.names import GPU_CLIQUE_LABEL, GPU_DRIVER, SIMULATED_LABEL
from rackloom.core.kubernetes.objects import DEVICE_CLASS, NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE

pytestmark = pytest.mark.anyio
TRAYS = 18
CLAIM = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": GPU_DRIVER, "count": 4}}]}}


async def test_a_pod_gets_the_gpus_of_a_simulated_tray(api: KubeApi, namespace: str, tmp_path: Path) -> None:
    (gpus,) = [klass for klass in installed_device_classes() if klass["metadata"]["name"] == GPU_DRIVER]
    await api.create(DEVICE_CLASS, gpus)
    home = Home(tmp_path)

    async def published() -> bool:
        nodes = (await api.list(NODE, labels=f"{SIMULATED_LABEL}=true,{GPU_CLIQUE_LABEL}")).items
        slices = (await api.list(RESOURCE_SLICE, fields=f"spec.driver={GPU_DRIVER}")).items
        return len(nodes) == len(slices) == TRAYS

    async def runs() -> bool:
        pod = await api.get(POD, "work", namespace)
        return bool(pod["status"].get("phase") == "Running")

    async with open_embedded_home(home, racks=1, profile="gb200-nvl72") as (_, twin):
        async with twin_nodes(twin, home.twin / "cluster", api) as guests:
            await until(published, "every tray is published with its clique")
            await api.create(
                RESOURCE_CLAIM, {"metadata": {"name": "gpus", "namespace": namespace}, "spec": CLAIM}
            )
            spec = {
                "containers": [{"name": "main", "image": "x", "resources": {"claims": [{"name": "gpus"}]}}],
                "resourceClaims": [{"name": "gpus", "resourceClaimName": "gpus"}],
            }
            await api.create(POD, {"metadata": {"name": "work", "namespace": namespace}, "spec": spec})
            await until(runs, "the pod runs")
            await api.delete(POD, "work", namespace)
            assert not guests.work.done()
        left = (await api.list(NODE, labels=f"{SIMULATED_LABEL}=true")).items
    assert not left
    await api.delete(DEVICE_CLASS, GPU_DRIVER)
