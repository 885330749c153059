"""kubectl of this machine, as the administrator of the control plane under test."""

import os
import shutil
import subprocess

import pytest
from tests.cluster.control_plane import ControlPlane

LEAVE = ("--wait=false", "--ignore-not-found")
"""For `delete` at the end: objects that are already being collected do no harm."""


def kubectl(cluster: ControlPlane, *words: str, given: str | None = None) -> str:
    """The output of kubectl. `given` is its input."""
    done = tried(cluster, *words, given=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def typed(cluster: ControlPlane, command: str) -> subprocess.CompletedProcess[str]:
    """The result of a shell line in which kubectl talks to the control plane."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on the PATH")
    known = {**os.environ, "KUBECONFIG": str(cluster.admin), "HOME": str(cluster.logs.parent)}
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=300, env=known, check=False
    )


def tried(cluster: ControlPlane, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """The result, also of a failure, because a test may want a refusal."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")
    # kubectl caches discovery by the server's address, and a server of another run may have had that address.
    remembered = f"--cache-dir={cluster.logs.parent / 'kubectl'}"
    command = [program, "--kubeconfig", str(cluster.admin), remembered, *words]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
