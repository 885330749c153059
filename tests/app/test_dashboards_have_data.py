"""Every query of every dashboard, sent to a real Prometheus that scrapes Rackloom's programs at work.

One site on simulated racks carries a job, placed as a gang. Its pods hold GPUs and a channel.
The metrics of the site, the leading controllers, two node plugins of a tray of the job, a NIC plugin and the
webhook are scraped as the alerts name their jobs. A file of `transfer run --textfile` is served as the node
exporter would show it.
"""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from starlette.responses import PlainTextResponse
from tests.claim.cluster.admission.test_over_tls import review, serving
from tests.core.transfer.transfer_values import run as transfer
from tests.ports import reserved_ports
from tests.waiting import PATIENCE, until

from rackloom.app.controller import ControllerEndpoints
from rackloom.app.demo.story import example_directory
from rackloom.app.home import Home
from rackloom.app.listeners import serve_http
from rackloom.app.node.nic import NicOptions, nic_node
from rackloom.app.node.process import NodeOptions, PluginEndpoints
from rackloom.app.transfer_textfile import write_transfer_textfile
from rackloom.app.twin.site import EmbeddedSite
from rackloom.app.twin.up import RunningTwin, running_twin
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.run import PluginDirectories
from rackloom.core.cluster.names import IMEX_DRIVER
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    ResourceKind,
)
from rackloom.core.transfer.report import single_report
from rackloom.lab.kube.controllers.mpi_jobs import MPI_JOB
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.serving.limits import PROBES

DASHBOARDS = Path(__file__).parents[2] / "deploy/monitoring/dashboards"
SCRAPE_SECONDS = 5
"""Also how long a scrape may take: on a busy machine a page takes its time."""
RATE_INTERVAL = "5m"
"""For `$__rate_interval`: long enough to cover this test."""
ORG, WORKERS = "blue", 2
ANY_PORT = "127.0.0.1:0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="NO PROMETHEUS: Debian's package has it"),
]


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[str]:
    """A Prometheus that scrapes `targets`, URLs by job. Gives its URL."""
    scrapes = [
        {
            "job_name": job,
            "scheme": url.partition("://")[0],
            "tls_config": {"insecure_skip_verify": True},  # the webhook's authority is its own
            "static_configs": [{"targets": [url.partition("://")[2].rstrip("/")]}],
        }
        for job, url in targets.items()
    ]
    config = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with reserved_ports() as port:
        address = f"127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


# Scraped programs.


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    async with serve_http(app, ANY_PORT, limits=PROBES) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def nic_plugin(folder: Path) -> AsyncIterator[str]:
    """A NIC plugin without a container runtime."""
    api = DirectApi(FakeKube(seed=1), "plugin")
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {}}})
    boot = folder / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot-1\n")
    places = PluginDirectories(registry=folder / "reg", plugins=folder / "plug", cdi=folder / "cdi")
    common = NodeOptions(node="n1", directories=places, sysroot=folder)
    async with (
        nic_node(common, NicOptions(nri_socket=folder / "nri.sock"), api) as process,
        served(PluginEndpoints(process)) as url,
    ):
        yield url


async def review_pods(http: httpx2.AsyncClient) -> None:
    """Questions of the API server."""
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "m"}]}}
    for _ in range(3):
        (await http.post("/validate-pods", json=review("pods", pod))).raise_for_status()


def transfers(file: Path) -> PlainTextResponse:
    """The file of a measurement, as the node exporter shows it."""
    write_transfer_textfile(file, single_report("plain", [transfer(39.0)], "made for a test"), time.time())
    return PlainTextResponse(file.read_text(), media_type="text/plain; version=0.0.4")


async def plugins_of_the_job(stack: AsyncExitStack, whole: RunningTwin) -> dict[str, str]:
    """The GPU plugin and the IMEX plugin of a tray that runs a pod of the job."""
    node = next(node for node in whole.nodes if {GPU_DRIVER, IMEX_DRIVER} <= node.running.keys())
    jobs = {"rackloom-node-gpu": GPU_DRIVER, "rackloom-node-imex": IMEX_DRIVER}
    return {
        job: await stack.enter_async_context(served(PluginEndpoints(node.running[driver])))
        for job, driver in jobs.items()
    }


# Queries.


def queries() -> dict[str, str]:
    """By place on a dashboard."""
    return {
        f"{file.stem}: {panel['title']} {target['refId']}": target["expr"].replace(
            "$__rate_interval", RATE_INTERVAL
        )
        for file in sorted(DASHBOARDS.glob("*.json"))
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    }


async def unanswered(url: str) -> set[str]:
    """The queries that return no data."""
    empty = set()
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for place, query in queries().items():
            answer = await client.get("/api/v1/query", params={"query": query})
            found = answer.raise_for_status().json()["data"]["result"]
            if not [row for row in found if row["value"][1] != "NaN"]:
                empty.add(place)
    return empty


async def scraped(url: str, targets: int) -> None:
    """Wait until `targets` targets are up."""
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                answer = await client.get("/api/v1/query", params={"query": "sum(up)"})
                found = answer.raise_for_status().json()["data"]["result"]
                if found and float(found[0]["value"][1]) == targets:
                    return
            except httpx2.HTTPError:
                found = "no answer"
            assert time.monotonic() < deadline, found
            await asyncio.sleep(1)


# Events.


def client_of_a_tenant(site: EmbeddedSite) -> httpx2.AsyncClient:
    token = site.issuer.mint(ORG, ["TENANT_ADMIN"], time.time(), 3600)
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.AsyncClient(base_url=f"{site.url}/v2/org/{ORG}/nico/", headers=headers, timeout=PATIENCE)


async def carve(tenant: httpx2.AsyncClient, name: str, trays: int) -> None:
    """Create instances on a new logical partition, and wait until all are Ready."""

    async def post(path: str, body: dict[str, Any]) -> Any:
        return (await tenant.post(path, json=body)).raise_for_status().json()

    named = {"name": name, "siteId": (await tenant.get("site")).json()[0]["id"]}
    partition = (await post("nvlink-logical-partition", named))["id"]
    vpc = (await post("vpc", {**named, "nvLinkLogicalPartitionId": partition}))["id"]
    kind = (await tenant.get("instance/type")).json()[0]["id"]
    batch = {"vpcId": vpc, "instanceTypeId": kind, "namePrefix": name, "count": trays}
    await post("instance/batch", {**batch, "topologyOptimized": True})

    async def ready() -> bool:
        found = (await tenant.get(f"instance?vpcId={vpc}")).json()
        return [instance["status"] for instance in found] == ["Ready"] * trays

    await until(ready, "the instances are Ready")


def job() -> dict[ResourceKind, dict[str, Any]]:
    """The job of examples/whole-rack-job with a few workers."""
    text = (example_directory("whole-rack-job") / "job.yaml").read_text()
    text = text.replace("worker=18", f"worker={WORKERS}").replace("replicas: 18", f"replicas: {WORKERS}")
    objects = {obj["kind"]: obj for obj in yaml.safe_load_all(text)}
    for obj in objects.values():
        obj["metadata"]["namespace"] = "default"
    kinds = (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, MPI_JOB)
    return {kind: objects[kind.kind] for kind in kinds}


async def run_job(whole: RunningTwin) -> None:
    """All workers and the launcher run."""
    for kind, obj in job().items():
        await whole.api.create(kind, obj)

    async def running() -> bool:
        pods = (await whole.api.list(POD, "default")).items
        found = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
        return len(found) == WORKERS + 1

    await until(running, "the job runs")


async def end_job(whole: RunningTwin) -> None:
    """Nothing of it is left."""
    for kind, obj in reversed(job().items()):
        await whole.api.delete(kind, obj["metadata"]["name"], "default")

    async def gone() -> bool:
        kinds = (POD, RESOURCE_CLAIM, COMPUTE_DOMAIN, GANG_PLAN)
        return not [obj for kind in kinds for obj in (await whole.api.list(kind, "default")).items]

    await until(gone, "the job is gone")


def test_every_query_returns_data_of_programs_at_work(tmp_path: Path) -> None:
    async def scenario() -> set[str]:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            whole = await enter(running_twin(Home(tmp_path / "site"), port=0, racks=1, profile="gb200-nvl72"))
            tenant, asked = await enter(client_of_a_tenant(whole.site)), await enter(serving())
            await carve(tenant, "first", WORKERS + 1)
            await whole.nodes.up.wait()
            await whole.nodes.settle()
            await run_job(whole)
            targets = {
                "rackloom-site": whole.site.url,
                "rackloom-controller": await enter(served(ControllerEndpoints(whole.cluster.terms[-1]))),
                "rackloom-node-nic": await enter(nic_plugin(tmp_path / "nic")),
                "rackloom-webhook": str(asked.base_url),
                "node": await enter(served(transfers(tmp_path / "transfer.prom"))),
                **await plugins_of_the_job(stack, whole),
            }
            url = stack.enter_context(prometheus(tmp_path, targets))
            await scraped(url, len(targets))
            # Counters and histograms were seen. Now they grow.
            await end_job(whole)
            await carve(tenant, "second", 2)
            await run_job(whole)
            await review_pods(asked)
            deadline, empty = time.monotonic() + PATIENCE, set(queries())
            while empty and time.monotonic() < deadline:
                await asyncio.sleep(1)
                empty &= await unanswered(url)
            return empty

    assert sorted(asyncio.run(scenario())) == []
