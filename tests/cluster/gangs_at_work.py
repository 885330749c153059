"""Gangs on a real control plane: the objects of deploy/kubernetes, two racks, and a gang's messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import installed, led
from tests.waiting import until

from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, GANG_PLAN
from rackloom.core.gangs.snapshot import GangRecord, read_record

CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
CAPACITY = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": "4"}
PATIENCE = 300.0
"""Seconds: a busy machine."""


@asynccontextmanager
async def gangs_at_work(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The webhook and the controllers work inside the context. It exits once no gang is left."""
    await add_nodes(1)
    kinds = (COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, GANG_PLAN)
    async with installed(cluster, api, AdmissionSettings(), *kinds), led(api, cluster):
        yield
        await until(lambda: has_no_plans(api), "the gang controller has ended all gangs", PATIENCE)


async def two_racks(add_nodes: AddNodes, trays: int) -> dict[str, str]:
    """The rack, `1` or `2`, of each node."""
    found = {}
    for rack in ("1", "2"):
        labels = {names.GPU_CLIQUE_LABEL: f"{CLUSTER_UUID}.{rack}"}
        found |= dict.fromkeys(await add_nodes(trays, labels=labels, capacity=CAPACITY), rack)
    return found


async def has_no_plans(api: KubeApi) -> bool:
    return not (await api.list(GANG_PLAN)).items


async def record(api: KubeApi, namespace: str, name: str) -> GangRecord | None:
    try:
        return read_record(await api.get(GANG_PLAN, name, namespace))
    except NotFound:
        return None


async def does_not_fit(api: KubeApi, namespace: str, name: str) -> str:
    """The message of a gang that waits because it does not fit, or empty."""
    found = await record(api, namespace, name)
    placed = None if found is None else found.status.condition("Placed")
    return placed.message if placed is not None and placed.reason == "DoesNotFit" else ""
