"""The trays of a twin as guests of a real cluster: marked, published, scheduled onto, and gone at the end."""

from pathlib import Path

import pytest
from tests.cluster.custom import none_is_going
from tests.waiting import until

from rackloom.app.home import Home
from rackloom.app.twin.guest import SITE_LABEL, guest_racks, site_id
from rackloom.app.twin.site import open_embedded_home
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, GPU_DRIVER, SIMULATED_LABEL
from rackloom.core.cluster.objects import (
    CRD,
    DEVICE_CLASS,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
)
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE

pytestmark = pytest.mark.anyio
TRAYS = 18
CLAIM = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": GPU_DRIVER, "count": 4}}]}}
SPEC = {
    "containers": [{"name": "main", "image": "x", "resources": {"claims": [{"name": "gpus"}]}}],
    "resourceClaims": [{"name": "gpus", "resourceClaimName": "gpus"}],
    "tolerations": [{"key": SIMULATED_LABEL, "operator": "Exists", "effect": "NoSchedule"}],
}


async def everything(api: KubeApi) -> set[tuple[str, str]]:
    """All objects of the kinds that a guest may make."""
    kinds = (NODE, RESOURCE_SLICE, DEVICE_CLASS, CRD, NAMESPACE)
    leases = (await api.list(LEASE, LEASE_NAMESPACE)).items
    return {(LEASE.kind, item["metadata"]["name"]) for item in leases} | {
        (kind.kind, item["metadata"]["name"]) for kind in kinds for item in (await api.list(kind)).items
    }


async def test_a_pod_gets_the_gpus_of_a_simulated_tray(api: KubeApi, namespace: str, tmp_path: Path) -> None:
    announced: list[str] = []

    async def published() -> bool:
        nodes = (await api.list(NODE, labels=f"{SIMULATED_LABEL}=true,{GPU_CLIQUE_LABEL}")).items
        slices = (await api.list(RESOURCE_SLICE, fields=f"spec.driver={GPU_DRIVER}")).items
        return len(nodes) == len(slices) == TRAYS

    async def runs() -> bool:
        pod = await api.get(POD, "work", namespace)
        return bool(pod["status"].get("phase") == "Running")

    async def has_ended() -> bool:
        try:
            await api.get(POD, "work", namespace)
        except NotFound:
            return True
        return False

    async def no_slices() -> bool:
        return not (await api.list(RESOURCE_SLICE)).items

    async def nothing_is_going() -> bool:
        return all([await none_is_going(api, kind) for kind in (CRD, NAMESPACE)])

    # The server deletes the objects of a namespace, or of a type, gradually.
    await until(no_slices, "the devices of earlier tests are gone")
    await until(nothing_is_going, "what earlier tests deleted is gone")
    before = await everything(api)
    opened = open_embedded_home(Home(tmp_path), racks=1, profile="gb200-nvl72")
    async with opened as (_, twin):
        async with guest_racks(twin, tmp_path / "cluster", api, announced.append) as guests:
            await until(published, "every tray is published with its clique")
            nodes = (await api.list(NODE, labels=f"{SITE_LABEL}={site_id(twin)}")).items
            assert len(nodes) == TRAYS
            assert all(
                SIMULATED_LABEL in {taint["key"] for taint in node["spec"]["taints"]} for node in nodes
            )
            await api.create(
                RESOURCE_CLAIM, {"metadata": {"name": "gpus", "namespace": namespace}, "spec": CLAIM}
            )
            await api.create(POD, {"metadata": {"name": "work", "namespace": namespace}, "spec": SPEC})
            await until(runs, "the pod runs")
            await api.delete(POD, "work", namespace)
            await until(has_ended, "the pod has ended")
            assert not guests.nodes.work.done()
            assert not guests.controlling.done()
        await until(nothing_is_going, "what the guests made and deleted is gone")
        assert await everything(api) == before
    assert announced == []
