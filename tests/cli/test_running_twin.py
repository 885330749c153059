"""`rackloom twin` on a site that runs, and `rackloom up` whose trays are guests of another cluster."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest
import structlog
from tests.waiting import PATIENCE

from rackloom.claim.kube.client import connect
from rackloom.cli.main import app
from rackloom.core.cluster.objects import LEASE, NODE, RESOURCE_SLICE
from rackloom.errors import Refused
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE
from rackloom.testing import start_site

pytestmark = pytest.mark.slow

LOST = """
title = "A GPU falls off the bus"
seen = "a test"

[[step]]
do = "gpu-lost"
gpu = "rack-01/slot-1/gpu-0"

[[step]]
expect = "devices"
driver = "gpu.nvidia.com"
tray = "rack-01/slot-1"
count = 1
tainted = true
within = 60
"""


@pytest.fixture
def rackloom(capsys):
    def run(*arguments):
        code = app([*map(str, arguments)])
        return code, capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def site():
    # `rackloom serve` in an earlier test of this process may have configured structlog. The site leaves such
    # settings of its host alone, and its warnings would stand in the output of the commands.
    structlog.reset_defaults()
    with start_site(seed="7", in_process=True) as running:
        yield running


def properties(output):
    return dict(line.split("=", 1) for line in output.splitlines())


def test_status(rackloom, site):
    code, output = rackloom("twin", "status", "--home", site.home, "--wait", "60")
    assert code in (None, 0)
    assert properties(output) == {
        "url": site.url,
        "kubeconfig": str(site.kubeconfig),
        "profile": "gb200-nvl72",
        "racks": "1",
        "seed": "7",
        "nodes_up": "true",
    }
    shown = json.loads(rackloom("twin", "status", "--home", site.home, "--json")[1])
    assert [tray["node"] for tray in shown["trays"]] == [tray.node for tray in site.trays]


def test_a_file_is_played_on_the_site_that_runs(rackloom, site, tmp_path):
    file = tmp_path / "lost.toml"
    file.write_text(LOST)
    code, output = rackloom("twin", "play", file, "--on", site.home)
    assert code == 0
    assert "lost: 1 of 1 expectations observed" in output
    site.clear()
    file.write_text(LOST.replace("count = 1", "count = 3").replace("within = 60", "within = 0.1"))
    code, output = rackloom("twin", "play", file, "--on", site.home, "--json")
    assert code == 1
    assert json.loads(output)["observed"] == 0
    site.clear()


def test_what_cannot_be_is_refused_with_the_fix(rackloom, site, tmp_path):
    with pytest.raises(Refused, match=r"no site runs in .*control\.json.*rackloom up --home"):
        rackloom("twin", "status", "--home", tmp_path)
    with pytest.raises(Refused, match=r"its own home and clock.*leave --home and --speed out"):
        rackloom("twin", "play", "switch-dark", "--on", site.home, "--speed", "virtual")
    with pytest.raises(Refused, match=r"--context.*give --kubeconfig"):
        rackloom("up", "--context", "mine")


def test_trays_join_the_cluster_of_a_kubeconfig_and_leave_it(rackloom, site, tmp_path):
    async def everything():
        async with connect(site.kubeconfig) as api:
            leases = await api.list(LEASE, LEASE_NAMESPACE)
            lists = [await api.list(NODE), await api.list(RESOURCE_SLICE), leases]
        return {
            (number, item["metadata"]["name"]) for number, found in enumerate(lists) for item in found.items
        }

    site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-17", count=4)
    before, home, file = asyncio.run(everything()), tmp_path / "guest", tmp_path / "lost.toml"
    file.write_text(LOST)
    command = [sys.executable, "-m", "rackloom.cli.main", "up", "--home", str(home), "--port", "0"]
    guest = subprocess.Popen(
        [*command, "--racks", "1", "--kubeconfig", str(site.kubeconfig)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        shown = json.loads(rackloom("twin", "status", "--home", home, "--wait", PATIENCE, "--json")[1])
        assert shown["kubeconfig"] == str(site.kubeconfig)
        assert {tray["node"] for tray in shown["trays"]} <= {name for _, name in asyncio.run(everything())}
        assert rackloom("twin", "play", file, "--on", home)[0] == 0
        with pytest.raises(Refused, match="api-server-down needs the simulated API server"):
            rackloom("twin", "play", _with(file, 'do = "api-server-down"'), "--on", home)
    finally:
        guest.send_signal(signal.SIGTERM)
        output, _ = guest.communicate(timeout=PATIENCE)
    assert guest.returncode == 0, output
    assert f"its trays join the cluster of {site.kubeconfig}" in output
    assert " stays" not in output
    assert asyncio.run(everything()) == before


def _with(file, step):
    file.write_text(f'{LOST}\n[[step]]\n{step}\n\n[[step]]\nexpect = "invariants"\nwithin = 1\n')
    return file
