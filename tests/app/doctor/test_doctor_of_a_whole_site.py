"""The doctor over a whole running site: nothing is wrong with a rack at work, and planted faults are found.

The same reading that `rackloom doctor --home` does, through the same server of the cluster and the same
database, beside the service that owns them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import yaml

from rackloom.app.demo.story import example_directory
from rackloom.app.doctor import DoctorSources, choose_sources, read_snapshot
from rackloom.app.home import Home
from rackloom.app.twin.up import RunningTwin, running_twin
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, JOB, NODE, POD
from rackloom.core.diagnosis.acceptance import AcceptanceOutcome, acceptance
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.core.diagnosis.join import gpu_chains
from rackloom.core.diagnosis.snapshot import Layer, SiteSnapshot
from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition

PATIENCE = 180.0
TRAYS = 4


async def until(see: Callable[[], Awaitable[Any]]) -> Any:
    last: Any = None
    try:
        async with asyncio.timeout(PATIENCE):
            while not (last := await see()):
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(f"it did not come true: {last}") from None
    return last


class Ward:
    """A whole site with a job on a tenant's trays, and the doctor beside it."""

    def __init__(self, home: Path, whole: RunningTwin) -> None:
        self.home, self.whole = home, whole
        (self.fabric,) = whole.fabrics.values()
        self.server = whole.site.twin.servers[self.fabric.domain]
        self.seen: tuple[Finding, ...] = ()

    async def snapshot(self) -> SiteSnapshot:
        return await read_snapshot(choose_sources(DoctorSources(home=self.home)), time.time())

    async def findings(self) -> tuple[Finding, ...]:
        self.seen = examine(await self.snapshot())
        return self.seen

    async def until_found(self, *checks: str) -> tuple[Finding, ...]:
        """Wait until the doctor finds these and nothing else."""

        async def found() -> bool:
            return sorted(finding.check for finding in await self.findings()) == sorted(checks)

        try:
            await until(found)
        except AssertionError as error:
            raise AssertionError(f"{checks} are not what is found: {self.seen}") from error
        return self.seen

    def read_again(self) -> None:
        """Have the service read its switch now and not when its interval is over."""
        self.whole.site.deps.wake(frozenset({self.fabric.domain}))

    async def work(self) -> None:
        """A tenant's instances on some trays, and a job with a pod on each."""
        site = self.whole.site
        token = site.issuer.mint("demo", ["TENANT_ADMIN"], now=time.time(), ttl=3600)
        base = f"{site.url}/v2/org/demo/nico/"
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60) as http:
            named: dict[str, object] = {"name": "job", "siteId": (await http.get("site")).json()[0]["id"]}
            partition = (await http.post("nvlink-logical-partition", json=named)).json()
            vpc = (await http.post("vpc", json={**named, "nvLinkLogicalPartitionId": partition["id"]})).json()
            kind = (await http.get("instance/type")).json()[0]["id"]
            batch = {"namePrefix": "job", "count": TRAYS, "vpcId": vpc["id"], "instanceTypeId": kind}
            made = await http.post("instance/batch", json={**batch, "topologyOptimized": True})
            assert made.status_code == 201, made.text
        await self.until_found()
        await self.whole.nodes.settle()
        domain, pod = yaml.safe_load_all(
            (example_directory("imex-minimal") / "compute-domain.yaml").read_text()
        )
        domain["metadata"]["namespace"] = "default"
        template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
        spec = {"parallelism": TRAYS, "completions": TRAYS, "template": template}
        await self.whole.api.create(COMPUTE_DOMAIN, domain)
        await self.whole.api.create(JOB, {"metadata": {"name": "job", "namespace": "default"}, "spec": spec})

        async def at_work() -> bool:
            pods = (await self.whole.api.list(POD, "default")).items
            return sum(pod["status"].get("phase") == "Running" for pod in pods) == TRAYS

        await until(at_work)

    @property
    def tray(self) -> list[FabricGpu]:
        """The GPUs of one tray of the job's partition."""
        (partition,) = [partition for partition in self.fabric.partitions.values() if partition.guids]
        first = self.fabric.gpus[partition.guids[0]]
        return [gpu for gpu in self.fabric.gpus.values() if (gpu.chassis_serial, gpu.slot) == _at(first)]


def _at(gpu: FabricGpu) -> tuple[str, int]:
    return gpu.chassis_serial, gpu.slot


async def healthy(ward: Ward) -> None:
    await ward.until_found()
    snapshot = await ward.snapshot()
    at_work = [
        gpu_chain
        for gpu_chain in gpu_chains(snapshot)
        if gpu_chain.compute_domain is not None or gpu_chain.wanted is not None
    ]
    assert len(at_work) == 4 * TRAYS
    for chain in at_work:
        assert chain.conflicts == ()
        layers = (chain.machine, chain.fabric, chain.partition, chain.logical, chain.node, chain.device)
        assert None not in layers
        assert chain.nics
    assert snapshot.simulated == (Layer.FABRIC, Layer.SITE, Layer.CLUSTER)
    assert {node.runtime for node in snapshot.nodes} == {"containerd://2.0.0"}
    real = msgspec.structs.replace(snapshot, simulated=())
    outcomes = {result.id: result.outcome for result in acceptance(real).results}
    assert {outcomes[id_] for id_ in ("CNP03-01", "SDN13", "SDN15", "SDN16", "SDN21", "SDN25")} == {
        AcceptanceOutcome.PASS
    }


async def foreign_partition(ward: Ward) -> None:
    free = next(guid for guid, gpu in ward.fabric.gpus.items() if ward.fabric.partition_of(guid) == 0 and gpu)
    ward.fabric.put(FabricPartition(id=77, name="by-hand", guids=(free,), multicast_groups=0))
    ward.read_again()
    await until(lambda: _with(ward, Check.PARTITION_OWNED, "by-hand"))
    ward.fabric.delete(77)
    ward.read_again()
    await ward.until_found()


async def _with(ward: Ward, check: str, subject: str) -> Finding | None:
    found = await ward.findings()
    return next((finding for finding in found if finding.check == check and subject in finding.subject), None)


async def silent_controller(ward: Ward) -> None:
    await ward.server.go_away()
    ward.read_again()
    (found,) = await ward.until_found(Check.CONTROLLER)
    assert found.state is CheckState.UNKNOWN
    assert found.since is not None
    await ward.server.come_back()
    ward.read_again()
    await ward.until_found()


async def sick_gpu(ward: Ward) -> None:
    gpu = ward.tray[0]
    ward.fabric.set_health(gpu.guid, GpuHealth.NO_NVLINK)
    ward.read_again()
    await until(lambda: _with(ward, Check.GPU_HEALTH, f"/slot-{gpu.slot}/gpu-{gpu.module_id - 1}"))
    ward.fabric.set_health(gpu.guid, GpuHealth.HEALTHY)
    ward.read_again()
    await ward.until_found()


async def dead_link(ward: Ward) -> None:
    name = next(node.name for node in ward.whole.nodes)
    node = ward.whole.nodes[name]
    node.nics.down = frozenset({"mlx5_0"})
    await ward.whole.nodes.look(name)
    found = await until(lambda: _with(ward, Check.NIC_LINK, "/nic-"))
    assert f"node {name}" in found.where
    node.nics.down = frozenset()
    await ward.whole.nodes.look(name)
    await ward.until_found()


async def second_writer(ward: Ward) -> None:
    """Another writer changes the clique label of a node that runs a pod."""
    pods = (await ward.whole.api.list(POD, "default")).items
    name = pods[0]["spec"]["nodeName"]
    before = (await ward.whole.api.get(NODE, name))["metadata"]["labels"][GPU_CLIQUE_LABEL]
    await _label(ward, name, f"{before.rpartition('.')[0]}.32766")
    found = await until(lambda: _with(ward, Check.CLIQUE_LABEL, f"node {name}"))
    assert "32766" in found.message
    await _label(ward, name, before)
    await ward.until_found()


async def _label(ward: Ward, node: str, clique: str) -> None:
    await ward.whole.api.patch(NODE, node, None, {"metadata": {"labels": {GPU_CLIQUE_LABEL: clique}}})


async def lost_node(ward: Ward) -> None:
    pods = (await ward.whole.api.list(POD, "default")).items
    name = pods[0]["spec"]["nodeName"]
    await ward.whole.nodes.lose(name)
    await until(lambda: _with(ward, Check.NODE_READY, f"node {name}"))
    await ward.whole.nodes.heal(name)
    await ward.until_found()


STEPS = (healthy, foreign_partition, silent_controller, sick_gpu, dead_link, second_writer, lost_node)


@pytest.mark.slow
def test_a_healthy_rack_and_its_faults(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_twin(Home(tmp_path), port=0, racks=1, profile="gb200-nvl72") as whole:
            await whole.nodes.up.wait()
            ward = Ward(tmp_path, whole)
            await ward.until_found()
            await ward.work()
            for step in STEPS:
                await step(ward)

    asyncio.run(run())
