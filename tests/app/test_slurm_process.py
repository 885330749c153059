"""`rackloom topology slurm` as a process that follows a cluster."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import until, until_seen

from rackloom.claim.cluster.slurm_controller import SPEC_ANNOTATION
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.objects import CONFIG_MAP, NODE
from rackloom.core.place.slurm_topology import SLURM_TAINT, SlurmTopology, read_topology
from rackloom.testing import Site, start_site

pytestmark = pytest.mark.anyio
TRAYS = 18


CLIQUE = "test.example.com/clique"
"""Its own label: the trays of a new site are in no partition, so their clique label is not there yet."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with start_site(racks=2) as found:
        asyncio.run(label_racks(found))
        yield found


async def label_racks(site: Site) -> None:
    async with connect(site.kubeconfig) as api:
        for tray in site.trays:
            labels = {
                "metadata": {
                    "labels": {CLIQUE: f"rack.{int(tray.name.partition('/')[0].removeprefix('rack-'))}"}
                }
            }
            await api.patch(NODE, tray.node, None, labels)


@contextlib.contextmanager
def kept(site: Site, log: Path, *options: str) -> Iterator[None]:
    """The process, which ends by SIGTERM without an error."""
    words = [sys.executable, "-m", "rackloom.cli.main", "topology", "slurm"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--kubeconfig", str(site.kubeconfig), "--clique-label", CLIQUE, *options],
            stdout=output,
            stderr=output,
        )
        try:
            yield
            assert process.poll() is None, log.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def topology_at(path: Path) -> Callable[[], SlurmTopology | None]:
    return lambda: read_topology(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_a_file_has_a_block_for_each_clique_of_the_cluster(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    with kept(site, tmp_path / "log", "--to", str(path), "--all-nodes", "--hook", "true"):
        found = until_seen(topology_at(path), "the file is written", within=60)
        assert found is not None
        assert {name: len(nodes) for name, nodes in found.blocks.items()} == {
            "rack-1": TRAYS,
            "rack-2": TRAYS,
        }
        assert found.block_of.keys() == {tray.node for tray in site.trays}
        log = tmp_path / "log"
        until_seen(lambda: "slurm.hook_done" in log.read_text(), "the hook has run")


@pytest.mark.slow
async def test_a_config_map_and_annotations_follow_the_taint(site: Site, tmp_path: Path) -> None:
    node = site.node("rack-01/slot-0")
    async with connect(site.kubeconfig) as api:
        taints = {"spec": {"taints": [{"key": SLURM_TAINT, "effect": "NoExecute"}]}}
        await api.patch(NODE, node, None, taints)

        async def spec() -> str | None:
            annotations = (await api.get(NODE, node))["metadata"].get("annotations") or {}
            found: str | None = annotations.get(SPEC_ANNOTATION)
            return found

        with kept(site, tmp_path / "log", "--config-map", "default/blocks"):
            assert await until(spec, "the node names its block", within=60) == "nvlink:rack-1"
            written = await api.get(CONFIG_MAP, "blocks", "default")
            topology = read_topology(written["data"]["topology.yaml"])
            assert topology == SlurmTopology(blocks={"rack-1": ()}, block_size=1)
        await api.patch(NODE, node, None, {"spec": {"taints": None}})
