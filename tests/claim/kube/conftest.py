"""The API servers that the contract suite runs on."""

import os
from pathlib import Path

import pytest
from tests.claim.kube.world import KUBECONFIG, Play, direct, on_fake, on_real, over_http

REAL = "RACKLOOM_TEST_KUBECONFIG"


@pytest.fixture(params=["direct", "lightkube", "real"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scenario: `play(scenario)`."""
    if request.param == "direct":
        return on_fake(1, direct)
    if request.param == "lightkube":
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG)
        return on_fake(2, over_http(kubeconfig))
    if REAL not in os.environ:
        pytest.skip(f"no real Kubernetes API server: set {REAL} to a kubeconfig (make test-cluster does)")
    return on_real(Path(os.environ[REAL]))
