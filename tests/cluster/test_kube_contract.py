"""The contract of tests/claim/kube holds for a real API server, so the fake has to fulfil it too.

Other clients write to that server all the time, as they do to every real one. A property that holds only
for a single client is no contract.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.other_clients import KINDS, beside_other_clients
from tests.waiting import until_so

from rackloom.claim.kube.api import KubeApi

SUITE = Path(__file__).parents[1] / "claim" / "kube"
WITHIN = 1800.0
"""Seconds: it ends a hang, and measures nothing."""
pytestmark = pytest.mark.anyio


def suite(cluster: ControlPlane, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-k", "real", "-p", "no:cacheprovider"]
    command.append(f"--basetemp={folder / 'suite'}")
    environment = {**os.environ, "RACKLOOM_TEST_KUBECONFIG": str(cluster.admin)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN)


async def test_a_real_server_keeps_the_contract(cluster: ControlPlane, api: KubeApi, tmp_path: Path) -> None:
    async with beside_other_clients(api) as lives:
        done = await asyncio.to_thread(suite, cluster, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
    assert lives.keys() == {kind.kind for kind in KINDS}, "others wrote objects of every kind meanwhile"


async def test_other_clients_leave_nothing_that_the_next_test_could_meet(api: KubeApi) -> None:
    async with beside_other_clients(api) as lives:
        await until_so(lambda: lives.total() > len(KINDS), "others write")
    kinds = [kind for kind in KINDS if not kind.namespaced]
    names = [item["metadata"]["name"] for kind in kinds for item in (await api.list(kind)).items]
    assert [name for name in names if name.startswith("other-")] == []
