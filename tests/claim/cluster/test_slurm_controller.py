"""Blocks of Slurm for Slinky: a ConfigMap and annotations that follow the nodes, on the fake API server."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import yaml
from structlog.testing import capture_logs

from rackloom.claim.cluster.slurm_controller import (
    SPEC_ANNOTATION,
    SlinkyTopology,
    SlurmCaches,
    SlurmController,
    SlurmRule,
    with_block,
)
from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import CONFIG_MAP, NODE, POD, Object
from rackloom.core.place.slurm_topology import SLURM_TAINT
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual.event_loop import loop_wall_time, run_simulation

TAINT = {"key": SLURM_TAINT, "effect": "NoExecute"}


class SlurmSite:
    """Nodes, and the controller that follows them."""

    def __init__(self) -> None:
        self.kube = FakeKube(namespaces=("slurm", "default"))
        self.user = DirectApi(self.kube, "user")
        api = DirectApi(self.kube, "slurm")
        rng = random.Random(1)
        caches = SlurmCaches(api, rng, with_pods=True)
        publisher = SlinkyTopology(api, caches, "slurm", "rackloom-topology")
        self.controller = SlurmController(api, caches, SlurmRule(), publisher.publish, loop_wall_time, rng)

    async def add(self, name: str, clique: str, *, tainted: bool = True, spec: str | None = None) -> None:
        meta = {"name": name, "labels": {GPU_CLIQUE_LABEL: clique}}
        if spec is not None:
            meta["annotations"] = {SPEC_ANNOTATION: spec}
        await self.user.create(NODE, {"metadata": meta, "spec": {"taints": [TAINT] if tainted else []}})

    async def move(self, name: str, clique: str | None) -> None:
        labels = {"metadata": {"labels": {GPU_CLIQUE_LABEL: clique}}}
        await self.user.patch(NODE, name, None, labels)

    async def run_job(self, node: str) -> None:
        """The slurmd pod of a node, as slurm-operator reports a job there."""
        condition = {"type": "SlurmNodeStateAllocated", "status": "True"}
        pod = {
            "metadata": {
                "name": f"slurmd-{node}",
                "namespace": "slurm",
                "labels": {"app.kubernetes.io/name": "slurmd"},
            },
            "spec": {"nodeName": node, "containers": [{"name": "slurmd"}]},
        }
        await self.user.create(POD, pod)
        status = {"status": {"conditions": [condition]}}
        await self.user.patch(POD, f"slurmd-{node}", "slurm", status, subresource="status")

    async def end_job(self, node: str) -> None:
        await self.user.delete(POD, f"slurmd-{node}", "slurm", grace_seconds=0)

    async def blocks(self) -> list[str]:
        """The blocks of the ConfigMap."""
        try:
            found = await self.user.get(CONFIG_MAP, "rackloom-topology", "slurm")
        except NotFound:
            return []
        (topology,) = yaml.safe_load(found["data"]["topology.yaml"])
        assert all(list(block) == ["block"] for block in topology["block"]["blocks"])
        return [block["block"] for block in topology["block"]["blocks"]]

    async def spec(self, node: str) -> str | None:
        found: Object = await self.user.get(NODE, node)
        value: str | None = (found["metadata"].get("annotations") or {}).get(SPEC_ANNOTATION)
        return value

    def is_unknown(self) -> bool:
        return self.controller.unknown_since is not None

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: int = 120) -> None:
        for _ in range(seconds * 2):
            if await holds():
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"did not come true: {await self.blocks()}")

    async def until_spec(self, node: str, spec: str | None) -> None:
        async def is_so() -> bool:
            return await self.spec(node) == spec

        await self.until(is_so)

    async def until_blocks(self, *blocks: str) -> None:
        async def are_so() -> bool:
            return await self.blocks() == list(blocks)

        await self.until(are_so)


def play(story: Callable[[SlurmSite], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        site = SlurmSite()
        await site.add("a", "u.1")
        await site.add("b", "u.1")
        await site.add("k", "u.1", tainted=False)
        task = asyncio.create_task(site.controller.run())
        await story(site)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_simulation(1, main)


def test_the_nodes_of_slurm_join_their_block_and_others_do_not() -> None:
    async def story(site: SlurmSite) -> None:
        await site.until_blocks("u-1")
        await site.until_spec("a", "nvlink:u-1")
        await site.until_spec("b", "nvlink:u-1")
        assert await site.spec("k") is None
        # A tray changes hands: the taint is the only switch.
        await site.user.patch(NODE, "k", None, {"spec": {"taints": [TAINT]}})
        await site.until_spec("k", "nvlink:u-1")
        await site.user.patch(NODE, "k", None, {"spec": {"taints": []}})
        await site.until_spec("k", None)

    play(story)


def test_a_block_goes_when_no_node_names_it_and_a_busy_node_waits() -> None:
    async def story(site: SlurmSite) -> None:
        await site.until_spec("b", "nvlink:u-1")
        await site.run_job("b")
        await site.move("b", "u.2")
        with capture_logs() as logs:
            await site.until_spec("b", None)
            await site.until_blocks("u-1", "u-2")
            await asyncio.sleep(100)
            assert await site.spec("b") is None
        assert {"slurm.nodes_waiting"} <= {entry["event"] for entry in logs}
        await site.end_job("b")
        await site.until_spec("b", "nvlink:u-2")
        await site.move("a", "u.2")
        await site.until_spec("a", "nvlink:u-2")
        await site.until_blocks("u-2")

    play(story)


def test_other_topologies_of_a_node_stay() -> None:
    async def story(site: SlurmSite) -> None:
        await site.add("c", "u.1", spec="topo-switch:s2")
        await site.until_spec("c", "topo-switch:s2,nvlink:u-1")

    play(story)
    assert with_block("topo-switch:s2,nvlink:u-1", None) == "topo-switch:s2"
    assert with_block("nvlink:u-1", None) is None


def test_an_emptied_cluster_and_an_unreachable_server_keep_the_topology() -> None:
    async def story(site: SlurmSite) -> None:
        await site.until_spec("b", "nvlink:u-1")
        with capture_logs() as logs:
            for name in ("a", "b"):
                await site.move(name, None)
            await asyncio.sleep(100)
        assert await site.blocks() == ["u-1"]
        unknown = [entry for entry in logs if entry["event"] == "slurm.source_unknown"]
        assert len(unknown) == 1
        assert site.is_unknown()
        for name in ("a", "b"):
            await site.move(name, "u.1")
        await asyncio.sleep(60)
        assert not site.is_unknown()

        site.kube.faults.add(RequestFault(user="slurm"))
        with capture_logs() as logs:
            await asyncio.sleep(600)
            await site.move("b", "u.3")
            await asyncio.sleep(600)
        unknown = [entry for entry in logs if entry["event"] == "slurm.source_unknown"]
        assert len(unknown) <= 1
        assert await site.spec("b") == "nvlink:u-1"
        site.kube.faults.clear()
        await site.until_spec("b", "nvlink:u-3")
        assert not site.is_unknown()

    play(story)
