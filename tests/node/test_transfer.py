"""`rackloom transfer` between pods of two real nodes, according to examples/transfer-pods/README.md."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.markdown import lines
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster

pytestmark = only_all
EXAMPLE = "examples/transfer-pods"


@pytest.fixture
def with_transfer_image(installed: NodeCluster) -> Iterator[NodeCluster]:
    """The nodes with `rackloom-transfer`, as docs/install.md loads it."""
    archive = Path(os.environ["RACKLOOM_NODE_IMAGES"]) / "transfer/rackloom.tar"
    for node in installed.nodes:
        node.run("ctr", "-n", "k8s.io", "images", "import", archive)
    yield installed
    installed.kubectl("delete", "-k", str(ROOT / EXAMPLE), "--timeout=60s")
    installed.kubectl("delete", "secret", "rackloom-transfer")


def test_the_example_measures_between_two_nodes(with_transfer_image: NodeCluster) -> None:
    cluster = with_transfer_image
    commands = [line for line in lines(f"{EXAMPLE}/README.md") if line.startswith("kubectl ")]
    assert [command.split()[1] for command in commands] == ["create", "apply", "wait", "logs"]
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.plane.admin),
        "PATH": f"{cluster.binaries}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pods = cluster.get("pods", "-n", "default", "-l", "app in (rackloom-transfer, rackloom-transfer-target)")
    assert {item["spec"]["nodeName"] for item in pods["items"]} == {node.name for node in cluster.nodes}
    assert re.search(r"\d GB/s", done.stdout), done.stdout
