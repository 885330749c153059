"""examples/slurm-topology on a real API server: blocks and annotations with no more rights than it names."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import as_account
from tests.cluster.kubectl import LEAVE, kubectl
from tests.waiting import until

from rackloom.claim.cluster.slurm_controller import (
    SPEC_ANNOTATION,
    SlinkyTopology,
    SlurmCaches,
    SlurmController,
    SlurmRule,
)
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import CONFIG_MAP, NAMESPACE, NODE, Object
from rackloom.core.place.slurm_topology import SLURM_TAINT

pytestmark = pytest.mark.anyio
MANIFEST = Path(__file__).parents[2] / "examples/slurm-topology/slurm-topology.yaml"
SLURM = "slurm"


@pytest.fixture
async def own(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[KubeApi]:
    """The API server as the keeper's account sees it."""
    await add_nodes(1)  # for its pod
    await api.create(NAMESPACE, {"metadata": {"name": SLURM}})
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", str(MANIFEST))
    async with as_account(api, cluster, "rackloom-slurm", namespace=SLURM) as found:
        yield found
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", str(MANIFEST), *LEAVE)
    await api.delete(NAMESPACE, SLURM)
    await until(lambda: has_no_namespace(api), "the namespace is gone")


async def has_no_namespace(api: KubeApi) -> bool:
    """A deleted namespace lingers, and the next test makes it again."""
    return all(item["metadata"]["name"] != SLURM for item in (await api.list(NAMESPACE)).items)


async def test_blocks_follow_the_nodes_of_slurm(own: KubeApi, api: KubeApi) -> None:
    for name, clique in {"s0": "u.1", "s1": "u.1", "s2": "u.2"}.items():
        taints = [{"key": SLURM_TAINT, "effect": "NoExecute"}]
        await api.create(NODE, node(name, clique, taints))
    await api.create(NODE, node("k0", "u.1", []))
    rng = random.Random(1)
    caches = SlurmCaches(own, rng, with_pods=True)
    publish = SlinkyTopology(own, caches, SLURM, "rackloom-topology").publish
    task = asyncio.create_task(SlurmController(own, caches, SlurmRule(), publish, time.time, rng).run())
    try:
        await until(lambda: has_blocks(api, "u-1", "u-2"), "there are two blocks")
        await until(lambda: names_block(api, "s2", "u-2"), "the node names its block")
        await api.patch(NODE, "s2", None, {"metadata": {"labels": {GPU_CLIQUE_LABEL: "u.1"}}})
        await until(lambda: names_block(api, "s2", "u-1"), "the node has moved")
        await until(lambda: has_blocks(api, "u-1"), "the empty block is gone")
        assert await names_block(api, "k0", None)
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for name in ("s0", "s1", "s2", "k0"):
            await api.delete(NODE, name)


async def test_the_account_may_do_nothing_else(own: KubeApi, api: KubeApi) -> None:
    await api.create(NODE, node("s0", "u.1", []))
    probes = itertools.count()
    # A policy takes effect a moment after it was written. Each probe is another change.
    await until(lambda: is_denied(own, {"metadata": {"labels": {"probe": str(next(probes))}}}), "it counts")
    assert await is_denied(own, {"spec": {"unschedulable": True}})
    assert await is_denied(own, {"metadata": {"annotations": {"mine": "yes"}}})
    await own.patch(NODE, "s0", None, {"metadata": {"annotations": {SPEC_ANNOTATION: "nvlink:b"}}})
    other: Object = {"metadata": {"name": "other", "namespace": "default"}, "data": {}}
    with pytest.raises(Rejected):
        await own.create(CONFIG_MAP, other)
    await api.delete(NODE, "s0")


async def is_denied(own: KubeApi, change: Object) -> bool:
    try:
        await own.patch(NODE, "s0", None, change)
    except KubeError as error:
        return "topology.slinky.slurm.net/spec alone" in error.message
    return False


def node(name: str, clique: str, taints: list[Object]) -> Object:
    return {"metadata": {"name": name, "labels": {GPU_CLIQUE_LABEL: clique}}, "spec": {"taints": taints}}


async def has_blocks(api: KubeApi, *names: str) -> bool:
    try:
        found = await api.get(CONFIG_MAP, "rackloom-topology", SLURM)
    except NotFound:
        return False
    (topology,) = yaml.safe_load(found["data"]["topology.yaml"])
    return [block["block"] for block in topology["block"]["blocks"]] == list(names)


async def names_block(api: KubeApi, name: str, block: str | None) -> bool:
    annotations = (await api.get(NODE, name))["metadata"].get("annotations") or {}
    found: str | None = annotations.get(SPEC_ANNOTATION)
    return found == (None if block is None else f"nvlink:{block}")
