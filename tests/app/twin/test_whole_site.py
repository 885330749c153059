"""The whole twin: a tenant's rack becomes a clique of the cluster, and 18 pods have a channel there."""

import asyncio
import json
import shutil
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from rackloom.app.demo.story import example_directory
from rackloom.app.home import Home
from rackloom.app.twin.site import EmbeddedSite
from rackloom.app.twin.up import RunningTwin, running_twin
from rackloom.claim.kube.client import connect
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    JOB,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Object,
)

PROFILE = "gb200-nvl72"
PATIENCE = 120.0
TRAYS = 18


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (seen := await look()):
            await asyncio.sleep(0.1)
        return seen


async def carve(site: EmbeddedSite, trays: int = TRAYS) -> None:
    """A tenant's instances on `trays` trays of one domain, in one logical partition."""
    token = site.issuer.mint("demo", ["TENANT_ADMIN"], now=time.time(), ttl=600)
    headers = {"Authorization": f"Bearer {token}"}
    base = f"{site.url}/v2/org/demo/nico/"
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE) as http:

        async def post(path: str, body: dict[str, object]) -> Any:
            answer = await http.post(path, json=body)
            assert answer.status_code == 201, answer.text
            return answer.json()

        async def ready() -> bool:
            seen = (await http.get("instance?pageSize=100")).json()
            return [instance["status"] for instance in seen] == ["Ready"] * trays

        named: dict[str, object] = {"name": "job", "siteId": (await http.get("site")).json()[0]["id"]}
        partition = await post("nvlink-logical-partition", named)
        vpc = await post("vpc", {**named, "nvLinkLogicalPartitionId": partition["id"]})
        kind = (await http.get("instance/type")).json()[0]["id"]
        batch = {"namePrefix": "job", "count": trays, "vpcId": vpc["id"], "instanceTypeId": kind}
        await post("instance/batch", {**batch, "topologyOptimized": True})
        await until(ready)


def minimal_example(pods: int) -> tuple[Object, Object]:
    """The ComputeDomain of examples/imex-minimal, and its pod as a Job of `pods` pods."""
    text = (example_directory("imex-minimal") / "compute-domain.yaml").read_text()
    domain, pod = yaml.safe_load_all(text)
    domain["metadata"]["namespace"] = "default"
    template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    spec = {"parallelism": pods, "completions": pods, "template": template}
    return domain, {"metadata": {"name": "job", "namespace": "default"}, "spec": spec}


async def running(whole: RunningTwin, count: int) -> list[Object]:
    pods = (await whole.api.list(POD, "default")).items
    found = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    return found if len(found) == count else []


async def _meshed(whole: RunningTwin) -> Object | None:
    found = await whole.api.get(COMPUTE_DOMAIN, "imex-minimal", "default")
    reported = {
        condition["type"]: condition["status"] for condition in found.get("status", {}).get("conditions", ())
    }
    return found if (reported.get("Ready"), reported.get("Meshed")) == ("True", "True") else None


@pytest.mark.slow
def test_a_job_over_a_whole_rack_runs_with_its_channel(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_twin(Home(tmp_path), port=0, racks=1, profile=PROFILE) as whole:
            await carve(whole.site)
            await whole.nodes.settle()
            domain, job = minimal_example(TRAYS)
            await whole.api.create(COMPUTE_DOMAIN, domain)
            await whole.api.create(JOB, job)
            pods = await until(lambda: running(whole, TRAYS))
            claims = (await whole.api.list(RESOURCE_CLAIM, "default")).items
            uid = {
                claim["metadata"]["ownerReferences"][0]["uid"]: claim["metadata"]["uid"] for claim in claims
            }
            for pod in pods:
                node = whole.nodes[pod["spec"]["nodeName"]]
                (spec,) = node.cdi_files(uid[pod["metadata"]["uid"]])
                (device,) = json.loads(spec.read_text())["devices"]
                assert device["containerEdits"]["deviceNodes"][0]["path"].endswith("/channel0")
            nodes = (await whole.api.list(NODE)).items
            (fabric,) = whole.fabrics.values()
            (partition,) = [partition for partition in fabric.partitions.values() if partition.guids]
            cliques = {node["metadata"]["labels"].get(names.GPU_CLIQUE_LABEL) for node in nodes}
            assert cliques == {f"{fabric.domain}.{partition.id}"}
            status = (await until(lambda: _meshed(whole)))["status"]
            assert len(status["nodes"]) == TRAYS

    asyncio.run(run())


@pytest.mark.slow
def test_controllers_that_die_are_replaced_and_nothing_is_made_twice(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_twin(Home(tmp_path), port=0, racks=1, profile=PROFILE) as whole:
            await carve(whole.site)
            await whole.nodes.settle()
            domain, job = minimal_example(2)
            await whole.api.create(COMPUTE_DOMAIN, domain)
            await whole.cluster.controllers.kill(0.5)
            await whole.api.create(JOB, job)
            await until(lambda: running(whole, 2))
            assert not whole.cluster.work.done()

    asyncio.run(run())


def test_the_kubeconfig_opens_the_cluster_to_its_owner_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_twin(Home(tmp_path), port=0, racks=1, profile=PROFILE) as whole:
            await whole.nodes.up.wait()
            assert stat.S_IMODE(whole.kubeconfig.stat().st_mode) == 0o600
            async with connect(whole.kubeconfig) as api:
                assert len((await api.list(NODE)).items) == TRAYS
                async for event in api.watch(NODE, resource_version="0"):
                    assert event.type == "ADDED"
                    break
            config = json.loads(whole.kubeconfig.read_text())
            server = config["clusters"][0]["cluster"]["server"]
            async with httpx2.AsyncClient(verify=False) as http:
                answer = await http.get(f"{server}/api/v1/nodes")
                assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")
        assert not whole.kubeconfig.exists()

    asyncio.run(run())


@pytest.mark.slow
def test_kubectl_reads_and_applies(tmp_path: Path) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")

    async def run() -> None:
        async with running_twin(Home(tmp_path), port=0, racks=1, profile=PROFILE) as whole:
            await whole.nodes.up.wait()

            async def kubectl(*words: str) -> str:
                cache = ("--cache-dir", str(tmp_path / "kubectl"))
                command = (program or "", "--kubeconfig", str(whole.kubeconfig), *cache, *words)
                done = await asyncio.create_subprocess_exec(
                    *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
                )
                out, err = await asyncio.wait_for(done.communicate(), PATIENCE)
                assert done.returncode == 0, err.decode()
                return out.decode()

            manifest = str(example_directory("imex-minimal") / "compute-domain.yaml")
            assert "created" in await kubectl("apply", "-f", manifest)
            assert "unchanged" in await kubectl("apply", "-f", manifest)
            assert "serverside-applied" in await kubectl("apply", "--server-side", "-f", manifest)
            seen = await kubectl("get", "computedomains,pods,nodes", "-o", "name")
            assert {"computedomain.resource.nvidia.com/imex-minimal", "pod/imex-minimal"} <= set(seen.split())
            assert "deleted" in await kubectl("delete", "-f", manifest)
            slices = (await whole.api.list(RESOURCE_SLICE)).items
            assert len((await kubectl("get", "resourceslices", "-o", "name")).split()) == len(slices)

    asyncio.run(run())
