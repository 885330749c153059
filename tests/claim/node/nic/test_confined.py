"""The plugin's work on links, with just the capabilities and mounts that its manifest gives it.

The tests that move links, address them, take programs off and look for RDMA devices run again in a process
that is confined as its container is. Only the seccomp profile is missing, which needs a runtime.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from tests.claim.node.nic.confined import NUMBERS
from tests.claim.node.nic.nic_kit import needs_root

from rackloom.claim.node.nic.links import _SYSCTL_OF_HOST

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
MANIFEST = ROOT / "deploy" / "kubernetes" / "base" / "node-nic.yaml"
AGAIN = ("test_moving.py", "test_addressing.py", "test_programs.py", "test_rdma.py", "test_kinds_of_links.py")
pytestmark = needs_root


def container() -> dict:
    (daemon_set,) = yaml.safe_load_all(MANIFEST.read_text())
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return container


def run_again(capabilities: set[str], *options: str, sysctl: bool = True) -> tuple[int, str]:
    # In the folder that all runs share, pytest may fail when another run tidies up at the same time.
    with tempfile.TemporaryDirectory(prefix="rl") as folder:
        done = subprocess.run(
            [
                *(sys.executable, str(HERE / "confined.py"), ",".join(sorted(capabilities))),
                *(["--sysctl"] if sysctl else []),
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
                f"--basetemp={folder}/again",
                *(str(HERE / name) for name in AGAIN),
                *options,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
    return done.returncode, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_manifest_gives_these_capabilities_and_no_others():
    security = container()["securityContext"]
    assert set(security["capabilities"]["add"]) == NUMBERS.keys()
    assert security["capabilities"]["drop"] == ["ALL"]
    assert not security.get("privileged")
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert not mounts[str(_SYSCTL_OF_HOST)].get("readOnly")


@pytest.mark.slow
def test_links_are_moved_addressed_and_given_back():
    code, printed = run_again(set(NUMBERS))
    assert code == 0, printed
    assert int(re.findall(r"(\d+) passed", printed)[-1]) > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "what"),
    [
        ("NET_RAW", "test_a_server_gives_the_address_and_routes_and_the_pod_has_them"),
        ("the host's /proc/sys/net", "test_ipv6_settings_are_the_pods_and_the_hosts_come_back"),
    ],
)
def test_nothing_of_it_is_superfluous(without, what):
    """Without the other two capabilities no namespace could be entered, and no link moved: not even here."""
    code, printed = run_again(set(NUMBERS) - {without}, "-k", what, sysctl=without in NUMBERS)
    assert code == 1, printed
    assert "Operation not permitted" in printed or "Read-only file system" in printed, printed
