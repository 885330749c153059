"""The chart on real nodes as a reader of the pages meets it: their commands in order, from an empty home.

Helm, kubectl and rackloom are found by PATH. `REGISTRY/` is left out, since the nodes have the image
already. How long the commands take is printed: `run.py --all -s tests/node/test_chart_reader.py`.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.build import HELM, made
from tests.docs.markdown import section_lines
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster, seconds_until
from tests.node.workloads import claiming, compute_domain, phase, pod, until_gone, until_running
from tests.waiting import until_seen

EXAMPLE = "imex-minimal"


class Reader:
    """A user with a kubeconfig, a checkout and an empty home, who types the commands of the pages."""

    def __init__(self, cluster: NodeCluster, home: Path) -> None:
        programs = (cluster.binaries, made(HELM), Path(sys.executable).parent)
        self._environment = {
            "HOME": str(home),
            "KUBECONFIG": str(cluster.plane.admin),
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        }
        self.seconds: dict[str, float] = {}

    def follow(self, page: str, heading: str, *, first: int | None = None) -> str:
        """Run the commands below a heading, or only the `first` ones. Returns the output of the last."""
        typed = [re.sub(r"\s+#.*$", "", line) for line in section_lines(page, heading)]
        commands = [line for line in typed if line.startswith(("helm ", "kubectl ", "rackloom "))]
        assert commands, f"{page} shows no command below {heading!r}"
        printed = ""
        for command in commands[:first]:
            begun = time.monotonic()
            done = subprocess.run(
                shlex.split(command.replace("REGISTRY/", "")),
                cwd=ROOT,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            self.seconds[command] = time.monotonic() - begun
            assert done.returncode == 0, f"{page}: {command}: {done.stdout}{done.stderr}"
            printed = done.stdout
        return printed


@pytest.fixture
def reader(nodes: NodeCluster, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(nodes, tmp_path)
    yield reader
    for command, seconds in reader.seconds.items():
        sys.stdout.write(f"{seconds:6.1f} s  {command}\n")


@only_all
def test_the_chart_is_installed_verified_upgraded_and_removed(nodes: NodeCluster, reader: Reader) -> None:
    reader.follow("docs/install.md", "### Install with Helm", first=1)
    reader.follow("docs/install.md", "## Verify")
    until = seconds_until(lambda: phase(nodes, EXAMPLE) == "Succeeded", "the example's pod has ended", 120)
    reader.seconds["until the example's pod has ended"] = until
    assert "channel0" in nodes.kubectl("logs", EXAMPLE)
    job = claiming(pod("job"), "job-channel")
    nodes.apply(compute_domain("job", "job-channel"), job)
    until_running(nodes, "job")
    before = nodes.get("pod", "job")
    reader.follow("docs/install.md", "### Upgrade with Helm")
    after = nodes.get("pod", "job")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    nodes.kubectl("delete", "pod", "job", "--wait=false")
    until_gone(nodes, "job")
    nodes.kubectl("delete", "computedomain", "job", "--timeout=60s")
    nodes.kubectl("delete", "-f", str(ROOT / f"examples/{EXAMPLE}/compute-domain.yaml"), "--timeout=60s")
    reader.follow("docs/install.md", "### Uninstall with Helm")
    until_seen(lambda: not nodes.get("deviceclasses")["items"], "no class is left", 60)
