"""Uninstalling from real nodes: held while a job runs, then complete. It is the last, as nothing is left."""

import asyncio
import subprocess
import sys

from tests.cluster.uninstalled import is_admitted, remains
from tests.node.installation import words_to_uninstall
from tests.node.nodes import NodeCluster
from tests.node.workloads import claiming, compute_domain, pod, until_gone, until_running

from rackloom.claim.kube.client import connect

NAMES = ("leaving-0", "leaving-1")


def test_uninstalling_waits_for_the_job_and_then_leaves_nothing(installed: NodeCluster) -> None:
    workers = [
        claiming(pod(name, node=node.name), "leaving-channel")
        for name, node in zip(NAMES, installed.nodes, strict=True)
    ]
    installed.apply(compute_domain("leaving", "leaving-channel"), *workers)
    until_running(installed, *NAMES)
    held = _uninstall(installed, "--yes", "--timeout", "10")
    assert held.returncode == 1, held.stdout
    assert all(name in held.stdout for name in NAMES), held.stdout
    installed.kubectl("delete", "pod", *NAMES, "--wait=false")
    until_gone(installed, *NAMES)
    done = _uninstall(installed, "--yes", "--timeout", "60")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert asyncio.run(_left(installed)) == ([], True)


def _uninstall(cluster: NodeCluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "rackloom.cli.main",
        "uninstall",
        "--kubeconfig",
        str(cluster.plane.admin),
    ]
    command += words_to_uninstall()
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)


async def _left(cluster: NodeCluster) -> tuple[list[str], bool]:
    async with connect(cluster.plane.admin) as api:
        return await remains(api), await is_admitted(api, "default")
