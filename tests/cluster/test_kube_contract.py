"""What tests/claim/kube demands of an API server holds for a real one, so the fake is held to the same."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.control_plane import ControlPlane

SUITE = Path(__file__).parents[1] / "claim" / "kube"


def test_a_real_server_keeps_the_contract(cluster: ControlPlane) -> None:
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-k", "real", "-p", "no:cacheprovider"]
    environment = {**os.environ, "RACKLOOM_TEST_KUBECONFIG": str(cluster.admin)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
