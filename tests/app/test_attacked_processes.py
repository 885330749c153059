"""Whole processes under attack before authentication: others are answered, in bounded memory."""

import asyncio
import re
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial

import httpx2
import pytest
from tests import attacks
from tests.app.test_serve import Operator

from rackloom.app.process import allow_open_files
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.claim.kube.connection import http_client

pytestmark = pytest.mark.slow

RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]
HEADERS = 600 << 20
"""Bytes of header fields on one connection."""
HALF_SENT, SILENT = 1050, 1100
MOST_SECONDS = 15.0
"""For an answer to another client during an attack, on a shared machine."""
ATTACK_SECONDS = 4.0
"""Longer than a handshake may take."""
MOST_GROWTH = 200.0
"""MiB over all attacks on one listener."""


@contextmanager
def process(*words):
    """The process, and the line with its addresses. Nothing that strangers do is an error of it."""
    allow_open_files(4 * SILENT)
    with tempfile.TemporaryFile("w+") as errors:
        started = subprocess.Popen([*RACKLOOM, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield started, started.stdout.readline()
        finally:
            started.terminate()
            started.communicate(timeout=60)
        errors.seek(0)
        printed = errors.read()
    assert "Traceback" not in printed, printed[:2000]


class Attacked:
    """A listener of a process, and a client of it that is no stranger."""

    def __init__(self, pid, port, ask, tls):
        self.pid, self.port, self.ask, self.tls = pid, port, ask, tls
        self.slowest = 0.0

    def endures(self, *attacked):
        """Every attack: answers come in time, and memory stays bounded. Prints the measurements."""
        before = attacks.resident(self.pid)
        for attack in attacked:
            attack(self)
        growth = attacks.resident(self.pid, "VmHWM") - before
        sys.stderr.write(
            f"\nport {self.port}: slowest answer {self.slowest:.2f} s,"
            f" {growth:.0f} MiB more than {before:.0f}\n"
        )
        assert self.slowest < MOST_SECONDS
        assert growth < MOST_GROWTH

    def check(self):
        began = time.monotonic()
        assert asyncio.run(self.ask())
        self.slowest = max(self.slowest, time.monotonic() - began)

    def connected(self):
        raw = attacks.connected(self.port)
        return attacks.encrypted(raw) if self.tls else raw


def endless_headers(attacked):
    for kind in (attacks.endless_fields, attacks.endless_field):
        assert kind(attacked.connected(), HEADERS) < HEADERS
        attacked.check()


def half_sent(attacked):
    crowd(attacked, HALF_SENT, attacks.HALF_A_REQUEST)


def silent(attacked):
    crowd(attacked, SILENT, b"")


def crowd(attacked, count, say):
    with attacks.crowd(attacked.port, count, say):
        until = time.monotonic() + ATTACK_SECONDS
        while time.monotonic() < until:
            attacked.check()
            time.sleep(0.1)


async def gets(url, tls=None):
    async with httpx2.AsyncClient(verify=tls or ssl.create_default_context(), timeout=MOST_SECONDS) as http:
        return (await http.get(url)).status_code < 500


def test_a_site_is_attacked(ground):
    with process("serve", "--config", str(ground.config())) as (served, line):
        rest, admin, metrics = map(int, re.findall(r"on port (\d+)", line))
        tls = ssl.create_default_context(cafile=str(ground.ca))
        page = f"https://localhost:{rest}/openapi.json"
        Attacked(served.pid, rest, partial(gets, page, tls), True).endures(endless_headers, half_sent, silent)
        page = f"http://localhost:{metrics}/healthz"
        Attacked(served.pid, metrics, partial(gets, page), False).endures(endless_headers, half_sent, silent)

        async def ask():
            async with Operator(ground, admin) as operator:
                return await operator.forge.Version(pb.VersionRequest())

        Attacked(served.pid, admin, ask, False).endures(silent, half_sent)


def test_a_process_that_may_open_too_few_files_does_not_start(ground):
    command = ["bash", "-c", 'ulimit -n 700 && exec "$@"', "bash", *RACKLOOM, "serve"]
    ended = subprocess.run(
        [*command, "--config", str(ground.config())], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "this process may have 700 files open" in ended.stderr
    assert "fix: raise the hard limit of open files to" in ended.stderr


def test_a_twin_is_attacked(tmp_path):
    home = tmp_path / "home"
    with process("up", "--port", "0", "--home", str(home)) as (twin, line):
        port = int(re.search(r":(\d+),", line)[1])
        Attacked(twin.pid, port, partial(gets, f"http://localhost:{port}/openapi.json"), False).endures(
            endless_headers, half_sent, silent
        )
        kubeconfig = home / "kubeconfig"

        async def ask_cluster():
            async with http_client(kubeconfig, None) as http:
                return (await http.get("/version")).status_code == 200

        server = re.search(r"https://localhost:(\d+)", kubeconfig.read_text())
        Attacked(twin.pid, int(server[1]), ask_cluster, True).endures(endless_headers, half_sent, silent)
