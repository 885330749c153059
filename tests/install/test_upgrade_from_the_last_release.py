"""The newest release of an earlier minor version runs a site and is killed. This version continues it.

Until there is such a release, the test is skipped. RACKLOOM_UPGRADE_FROM names a commit instead.
Packages come from the configured index: `make test-install` sets RACKLOOM_TEST_INSTALL.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ASKED_BY = "RACKLOOM_TEST_INSTALL"
FROM = "RACKLOOM_UPGRADE_FROM"
pytestmark = pytest.mark.skipif(
    ASKED_BY not in os.environ, reason=f"NO UPGRADE: `make test-install` makes it ({ASKED_BY})"
)
UV = Path(sys.executable).with_name("uv")
PATIENCE = 240.0


def earlier_release() -> str:
    """The tag of the newest patch of the newest earlier minor version."""
    if named := os.environ.get(FROM):
        return named
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    own = tuple(map(int, here.split(".")[:2]))
    command = ["git", "-C", ROOT, "tag", "--list", "v*"]
    tags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    numbers = [
        tuple(map(int, found.groups()))
        for tag in tags
        if (found := re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", tag))
    ]
    earlier = [number for number in numbers if number[:2] < own]
    if not earlier:
        pytest.skip(f"NO RELEASE BEFORE {here}: there is nothing to upgrade from yet; {FROM} names a commit")
    return "v" + ".".join(map(str, max(earlier)))


def installed(commit: str, folder: Path) -> Path:
    """The program of a commit, in its own environment."""
    source = folder / "source"
    source.mkdir(parents=True)
    files = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=files, check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    subprocess.run([UV, "pip", "install", "--quiet", "--python", python, wheel], check=True)
    return folder / "venv/bin/rackloom"


@contextmanager
def site(program: Path, home: Path, port: int) -> Iterator["Tenant"]:
    """A running site, which is killed at the end."""
    log = (home.parent / f"{program.parents[2].name}.log").open("w")
    command = [program, "up", "--home", home, "--port", str(port)]
    running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        words = ["token", "--home", home, "--org", "demo", "--role", "TENANT_ADMIN"]
        until(lambda: answers(port, running), f"{program} serves")
        token = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout.strip()
        yield Tenant(f"http://127.0.0.1:{port}/v2/org/demo/nico", token)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
        log.close()


def answers(port: int, running: subprocess.Popen[bytes]) -> bool:
    assert running.poll() is None, "it ended"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(0.5)


class Tenant:
    """A tenant of a site, over REST."""

    def __init__(self, api: str, token: str) -> None:
        self._api, self._token = api, token

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._api}/{path}", data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    def carve(self) -> str:
        """Order two machines whose GPUs share memory. Returns their VPC."""
        where = self.ask("GET", "site")[0]["id"]
        kind = self.ask("GET", "instance/type")[0]["id"]
        partition = self.ask("POST", "nvlink-logical-partition", {"name": "training", "siteId": where})
        asked = {"name": "net", "siteId": where, "nvLinkLogicalPartitionId": partition["id"]}
        vpc: str = self.ask("POST", "vpc", asked)["id"]
        pair = {
            "namePrefix": "job",
            "count": 2,
            "vpcId": vpc,
            "instanceTypeId": kind,
            "topologyOptimized": True,
        }
        self.ask("POST", "instance/batch", pair)
        return vpc

    def seats(self, vpc: str) -> dict[str, tuple[str, list[tuple[str, int]]]]:
        """Each instance with its status and the GPUs that it has, by domain and number."""
        found = {}
        for instance in self.ask("GET", f"instance?vpcId={vpc}"):
            interfaces = self.ask("GET", f"instance/{instance['id']}/nvlink-interface")
            gpus = sorted((each["nvLinkDomainId"], each["deviceInstance"]) for each in interfaces)
            found[instance["id"]] = (instance["status"], gpus)
        return found

    def are_ready(self, vpc: str) -> bool:
        return {status for status, _ in self.seats(vpc).values()} == {"Ready"}


def test_a_site_of_the_last_release_goes_on_under_this_one(tmp_path: Path) -> None:
    commit = earlier_release()
    home = tmp_path / "home"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with site(installed(commit, tmp_path / "earlier"), home, port) as tenant:
        vpc = tenant.carve()
        until(lambda: tenant.are_ready(vpc), "the instances are ready")
        before = tenant.seats(vpc)
    assert sum(len(gpus) for _, gpus in before.values()) == 8
    program = installed("HEAD", tmp_path / "later")
    with site(program, home, port) as tenant:
        until(lambda: tenant.are_ready(vpc), "the instances are ready again")
        assert tenant.seats(vpc) == before
        done = subprocess.run(
            [program, "doctor", "--home", home], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
