"""Trays as nodes: the reports of their GPUs follow from the switches, in names unknown to the site."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.prepare import PluginMetrics
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE, Object
from rackloom.errors import Retry
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import DraManager
from rackloom.lab.nodes.gpus import clique_label, fabric_slots_of, gpus_of_tray
from rackloom.lab.nodes.host_files import TrayHostFiles, declared_inventory, tray_machine
from rackloom.lab.nodes.kubelets import SimulatedKubelets
from rackloom.lab.nodes.trays import TrayEnvironment, TrayNodes, tray_nodes
from rackloom.lab.switches.fabric import SeededNames, SimulatedFabric, fabrics_of
from rackloom.lab.virtual.event_loop import loop_wall_time
from rackloom.topology.profiles import load_rack
from rackloom.topology.rack import RackSite, build_site

PROFILE = load_rack("gb200-nvl72")
GPU, NIC, IMEX = "gpu.nvidia.com", "dra.net", "compute-domain.nvidia.com"


def site_of(seed: str) -> tuple[RackSite, SimulatedFabric]:
    site = build_site(PROFILE, 1, SeededNames(seed))
    (fabric,) = fabrics_of(site, seed)
    return site, fabric


class Rack:
    """One rack of nodes in a cluster without controllers."""

    def __init__(self, folder: Path) -> None:
        self.site, self.fabric = site_of("seed")
        self.api = DirectApi(FakeKube(), "test")
        machine = tray_machine(PROFILE)
        around = TrayEnvironment(
            plugins=self.api,
            labels=self.api,
            root=folder / "nodes",
            host=TrayHostFiles(folder / "host", machine),
            gpus=declared_inventory(machine),
            namespace="rackloom-imex",
            wall=loop_wall_time,
            metrics=PluginMetrics("simulated", "simulated", ()),
        )
        names = SeededNames("seed")
        made = {node.name: node for node in tray_nodes(self.site, names, around)}
        kubelets = SimulatedKubelets(
            self.api, loop_wall_time, random.Random(1), devices=DraManager(made.__getitem__)
        )
        self.nodes = TrayNodes(made.values(), kubelets, [self.fabric], names, self.api)
        first = self.site.domains[0].trays[0]
        self.first = next(node.name for node in self.nodes if node.tray == first)

    def guids(self, slot: int) -> list[int]:
        return sorted(
            (gpu.guid for gpu in self.fabric.gpus.values() if gpu.slot == slot),
            key=lambda guid: self.fabric.gpus[guid].module_id,
        )

    async def label(self, name: str = "") -> str | None:
        node = await self.api.get(NODE, name or self.first)
        clique: str | None = node["metadata"]["labels"].get(GPU_CLIQUE_LABEL)
        return clique

    async def devices(self, driver: str) -> dict[str, Object]:
        fields = f"spec.driver={driver},spec.nodeName={self.first}"
        found = (await self.api.list(RESOURCE_SLICE, fields=fields)).items
        return {device["name"]: device for slice_ in found for device in slice_["spec"]["devices"]}


@asynccontextmanager
async def rack(folder: Path) -> AsyncIterator[Rack]:
    found = Rack(folder)
    running = asyncio.create_task(found.nodes.run())
    try:
        async with asyncio.timeout(60):
            await found.nodes.settle()
            yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@given(st.data())
def test_a_tray_is_labelled_exactly_when_one_partition_has_all_its_gpus(data: st.DataObject) -> None:
    site, fabric = site_of("s")
    tray, domain = site.domains[0].trays[3], site.domains[0].uuid
    mine = [gpu.guid for gpu in fabric.gpus.values() if gpu.slot == tray.slot]
    fabric.delete(next(iter(fabric.partitions)))
    taken = {guid: data.draw(st.integers(0, 2), label=f"partition of {guid}") for guid in mine}
    for number in (1, 2):
        fabric.create(
            f"p{number}",
            [guid for guid, where in taken.items() if where == number] or [_other(fabric, number)],
        )
    seen = gpus_of_tray(domain, tray, fabric_slots_of(fabric.snapshot()), SeededNames("s"))
    wanted = set(taken.values())
    assert clique_label(seen) == (
        f"{domain}.{wanted.pop()}" if len(wanted) == 1 and 0 not in wanted else None
    )


def _other(fabric: SimulatedFabric, slot: int) -> int:
    """A GPU of another tray, since a partition cannot be empty."""
    return next(gpu.guid for gpu in fabric.gpus.values() if gpu.slot == 10 + slot)


def test_names_of_the_cluster_say_nothing_of_the_site() -> None:
    site, fabric = site_of("s")
    names, again = SeededNames("s"), SeededNames("s")
    trays = site.domains[0].trays
    nodes = [names.node(tray.chassis_serial, tray.slot) for tray in trays]
    assert nodes == [again.node(tray.chassis_serial, tray.slot) for tray in trays]
    assert len(set(nodes)) == len(trays)
    shown = "".join(nodes) + "".join(names.gpu_uuid(guid) for guid in fabric.gpus)
    assert trays[0].chassis_serial.lower() not in shown.lower()
    assert not any(f"{guid:x}" in shown or str(guid) in shown for guid in fabric.gpus)


def test_a_node_follows_its_partition(tmp_path: Path) -> None:
    async def run() -> None:
        async with rack(tmp_path) as found:
            domain, default = found.fabric.domain, next(iter(found.fabric.partitions))
            assert await found.label() == f"{domain}.{default}"
            assert len(await found.devices(GPU)) == PROFILE.gpus_per_tray
            found.fabric.delete(default)
            ours = found.fabric.create("ours", found.guids(0))
            await found.nodes.settle()
            assert await found.label() == f"{domain}.{ours}"
            channel = (await found.devices(IMEX))["channel-0"]
            assert channel["attributes"]["clique"] == {"string": f"{domain}.{ours}"}
            found.fabric.remove(ours, found.guids(0)[:2])
            found.fabric.create("split", found.guids(0)[:2])
            await found.nodes.settle()
            assert await found.label() is None

    asyncio.run(run())


def test_what_breaks_on_a_tray_is_published(tmp_path: Path) -> None:
    async def run() -> None:
        async with rack(tmp_path) as found:
            node = found.nodes[found.first]
            node.gpus.lose(2)
            node.gpus.strike(1, 79)
            node.nics.down = frozenset({"mlx5_0"})
            await found.nodes.look(found.first)
            gpus, nics = await found.devices(GPU), await found.devices(NIC)
            taint = gpus["gpu-0"]["taints"][0]
            assert taint.pop("timeAdded")
            assert taint == {
                "key": "gpu.nvidia.com/xid",
                "value": "79",
                "effect": "NoSchedule",
            }
            assert gpus["gpu-1"]["taints"][0]["key"] == "gpu.nvidia.com/gpu-lost"
            assert nics["pci-0000-03-00-0"]["attributes"]["rdmaState"] == {"string": "down"}
            node.gpus.find(2)
            await found.nodes.look(found.first)
            assert not (await found.devices(GPU))["gpu-1"].get("taints")

    asyncio.run(run())


def test_a_pod_goes_from_a_tray_although_its_plugin_was_never_there(tmp_path: Path) -> None:
    async def run() -> None:
        found = Rack(tmp_path)
        devices = DraManager(lambda node: found.nodes[node])
        pod: Object = {"metadata": {"name": "a", "namespace": "n", "uid": "uid-a"}}
        results = [{"driver": "gpu.test", "request": "r", "pool": "p", "device": "d"}]
        claim: Object = {
            "metadata": {"name": "c", "namespace": "n", "uid": "uid-c"},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": "a", "uid": "uid-a"}],
            },
        }
        with pytest.raises(Retry, match=r"DRA driver gpu\.test is not registered"):
            await devices.prepare(found.first, pod, [claim])
        await devices.unprepare(found.first, pod, [claim])

    asyncio.run(run())


def test_a_node_that_comes_back_has_another_boot(tmp_path: Path) -> None:
    async def run() -> None:
        async with rack(tmp_path) as found:
            before = (await found.api.get(NODE, found.first))["status"]["nodeInfo"]["bootID"]
            await found.nodes.lose(found.first)
            default = next(iter(found.fabric.partitions))
            found.fabric.delete(default)
            await found.nodes.settle()
            assert await found.label(), "a node without power tells nothing"
            await found.nodes.heal(found.first)
            assert await found.label() is None
            after = (await found.api.get(NODE, found.first))["status"]["nodeInfo"]["bootID"]
            assert before != after

    asyncio.run(run())


def test_every_profile_of_racks_has_a_tray(tmp_path: Path) -> None:
    for number, name in enumerate(("gb300-nvl72", "gb200-nvl36x2", "vera-rubin-nvl72")):
        profile = load_rack(name)
        host = TrayHostFiles(tmp_path / str(number), tray_machine(profile))
        assert len(host.machine.gpus) == profile.gpus_per_tray
        assert len({gpu.pci_address for gpu in host.machine.gpus}) == profile.gpus_per_tray
        assert random.Random(0).choice(host.machine.gpus).uuid is None or profile.tray_machine
