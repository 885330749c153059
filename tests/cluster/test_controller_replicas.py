"""Two `rackloom controller` processes: one leads, and when it is killed, the other takes over."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx2
import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import is_served, none_is_going
from tests.waiting import PATIENCE, until

from rackloom.claim.kube.api import Conflict, KubeApi, NotFound
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CRD,
    NAMESPACE,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.domains.crds import domain_crds

pytestmark = pytest.mark.anyio
NAMESPACES = ("rackloom-system", "rackloom-imex")
"""Of the lease, and of the daemons."""


class Replica:
    """A controller process and the port of its pages."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    async def begin(self) -> None:
        assert self.process.stdout is not None
        while not self.port:
            line = (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)).decode()
            assert line, "the controller ended"
            found = re.search(r"metrics on port (\d+)", line)
            self.port = int(found[1]) if found else 0

    async def metric(self, name: str) -> float | None:
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            page = (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text
            healthy = await client.get(f"http://127.0.0.1:{self.port}/healthz")
        assert healthy.status_code == 200
        values = [line.split()[1] for line in page.splitlines() if line.startswith(name)]
        return float(values[0]) if values else None

    async def leads(self) -> bool:
        return await self.metric("rackloom_controller_leading") == 1


@asynccontextmanager
async def replica(cluster: ControlPlane) -> AsyncIterator[Replica]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rackloom.cli.main", "controller", "--image", "rackloom:test"),
        *("--listen", "127.0.0.1:0", "--kubeconfig", str(cluster.admin)),
        stdout=asyncio.subprocess.PIPE,
    )
    replica = Replica(process)
    try:
        await replica.begin()
        yield replica
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def install(api: KubeApi) -> None:
    for crd in domain_crds():
        with suppress(Conflict):
            await api.create(CRD, crd)
    for name in NAMESPACES:
        with suppress(Conflict):
            await api.create(NAMESPACE, {"metadata": {"name": name}})
    await until(lambda: is_served(api, COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE), "the new types are served")


async def has_template(api: KubeApi, namespace: str, name: str) -> bool:
    with suppress(NotFound):
        await api.get(RESOURCE_CLAIM_TEMPLATE, name, namespace)
        return True
    return False


async def make_domain(api: KubeApi, namespace: str, name: str) -> None:
    spec = {"channel": {"resourceClaimTemplate": {"name": name}}}
    await api.create(COMPUTE_DOMAIN, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})
    await until(lambda: has_template(api, namespace, name), f"{name} has its template")


async def test_a_killed_leader_is_replaced(cluster: ControlPlane, api: KubeApi, namespace: str) -> None:
    await install(api)
    async with replica(cluster) as first:
        await until(first.leads, "the first leads")
        await make_domain(api, namespace, "before")
        async with replica(cluster) as second:
            assert not await second.leads()
            first.process.kill()
            await until(second.leads, "the second leads")
            await make_domain(api, namespace, "after")

            async def counted() -> bool:
                return await second.metric('nvidia_dra_compute_domain_info{status="NotReady"}') == 2

            await until(counted, "the new leader counts what was there before it")
            for name in ("before", "after"):
                await api.delete(COMPUTE_DOMAIN, name, namespace)

            async def gone() -> bool:
                return not (await api.list(COMPUTE_DOMAIN)).items

            await until(gone, "everything is taken apart")
    for crd in domain_crds():
        await api.delete(CRD, crd["metadata"]["name"])
    for name in NAMESPACES:
        await api.delete(NAMESPACE, name)
    for kind in (CRD, NAMESPACE):
        await until(lambda kind=kind: none_is_going(api, kind), f"every deleted {kind.kind} is gone")  # type: ignore[misc]
