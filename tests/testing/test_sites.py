"""`rackloom.testing`: sites in a child process and in a thread, their faults, steps, waits and ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise

import httpx2
import pytest
from tests.waiting import PATIENCE

from rackloom.errors import Refused
from rackloom.testing import SiteFailed, StepNotObserved, TimedOut, start_site, start_site_async
from rackloom.testing.child_process import END_SECONDS

SCENARIO = """
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

SUBMITS = """
title = "Something is made"
seen = "a test"

[[step]]
do = "submit"
manifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: hers}}"

[[step]]
expect = "object"
kind = "ConfigMap"
name = "hers"
path = ["metadata", "name"]
equals = "hers"
within = 60
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module", params=[False, True], ids=["child", "thread"])
def site(request, tmp_path_factory):
    with start_site(seed="7", in_process=request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(request):
    yield
    if "site" in request.fixturenames:
        request.getfixturevalue("site").clear()


@pytest.mark.slow
def test_it_answers_rest_with_its_tokens(site):
    bearer = {"Authorization": f"Bearer {site.token('red')}"}
    answer = httpx2.get(f"{site.api('red')}/site", headers=bearer, timeout=PATIENCE)
    refused = httpx2.get(f"{site.api('red')}/site", timeout=PATIENCE)
    assert (answer.status_code, refused.status_code) == (200, 401)
    operator = {"Authorization": f"Bearer {site.token(role='PROVIDER_ADMIN')}"}
    shown = httpx2.get(f"{site.api()}/machine?pageSize=100", headers=operator, timeout=PATIENCE).json()
    assert {machine["id"] for machine in shown} == {tray.machine for tray in site.trays}


@pytest.mark.slow
def test_trays_are_those_of_steps(site):
    for slot in (0, 1, 17):
        tray = f"rack-01/slot-{slot}"
        assert site.trays[slot].name == tray
        assert site.do("node-reboots", tray=tray).startswith(site.node(tray))
        assert site.inject("tray-pulled", instance=tray).endswith(
            f"machine {site.trays[slot].machine} are gone"
        )


@pytest.mark.slow
def test_a_fault_is_observed_and_cleared(site):
    site.inject("gpu-lost", gpu="rack-01/slot-2/gpu-0")
    assert "publishes 1 tainted devices" in site.expect(
        "devices", driver="gpu.nvidia.com", tray="rack-01/slot-2", count=1, tainted=True
    )
    site.inject({"do": "switch-mistreats", "rpc": "CreatePartition", "how": "refuses"})
    site.clear()  # This fault never struck, which is no reason to fail here.
    site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-2", count=0, tainted=True)
    assert json.loads(site.kubeconfig.read_text())["current-context"] == "rackloom-twin"


@pytest.mark.slow
def test_what_is_not_so_fails_with_what_was_seen(site):
    with pytest.raises(StepNotObserved, match=r"expect node within 0\.2.*: Ready of node-\w+ is True"):
        site.expect("node", tray="rack-01/slot-0", ready=False, within=0.2)
    with pytest.raises(AssertionError):
        site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-0", count=1, within=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "keys", "why"),
    [
        ("gpu-lots", {"gpu": "rack-01/slot-0/gpu-0"}, "do = 'gpu-lots' is not known.*gpu-lost"),
        (
            "node-lost",
            {"tray": "rack-01/slot-18"},
            "tray = 'rack-01/slot-18' is not there.*slot-0 to .*slot-17",
        ),
        ("gpu-lost", {"gpu": "rack-01/slot-0/gpu-4"}, "is not there.*gpu-0 to .*gpu-3"),
        ("gpu-lost", {}, "it lacks the key `gpu`"),
        ("gpu-lost", {"gpu": 1}, "gpu is a GPU, such as .rack-01/slot-2/gpu-0"),
        ("heal", {"at": -1}, ""),
        ("make-vpc", {"name": "x"}, "make-vpc breaks nothing"),
        ("tray-pulled", {"instance": "job/1"}, "no instance 'job/1' yet"),
        ("clock-set", {"by": 5.0}, "in virtual time only"),
        ("leader-killed", {}, "nobody is elected"),
    ],
)
def test_what_cannot_be_injected_is_refused_with_the_fix(site, fault, keys, why):
    if fault == "heal":
        site.inject(fault)
        return
    with pytest.raises(Refused, match=why):
        site.inject(fault, **keys)


@pytest.mark.slow
def test_a_file_is_played_on_it(site, tmp_path):
    file = tmp_path / "lost.toml"
    file.write_text(SCENARIO)
    seen = []
    assert site.play(file, seen.append).observed == 1
    assert [step.what.split()[0] for step in seen] == ["gpu-lost", "expect"]
    site.clear()
    file.write_text(SCENARIO.replace("count = 1", "count = 0").replace("within = 60", "within = 0.1"))
    with pytest.raises(StepNotObserved, match=r"publishes 1 tainted devices(.|\n)*NOT as it must be"):
        site.play(file)


@pytest.mark.slow
def test_a_later_step_may_name_what_an_earlier_file_made(site, tmp_path):
    file = tmp_path / "submits.toml"
    file.write_text(SUBMITS)
    assert site.play(file).observed == 1
    site.do("delete-object", kind="ConfigMap", name="hers")
    site.expect("gone", kind="ConfigMap", name="hers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "why"),
    [
        ('profile = "gb300-nvl72"', "is about gb300-nvl72, and this site has gb200-nvl72.*--profile"),
        ("racks = 2", "needs 2 racks, and this site has 1.*--racks 2"),
        ("candidates = 2", "are not elected"),
        ("processes = 2", "cannot be played in real time"),
        ('controller = "nmx-m"', "cannot be played in real time"),
        ("colour = 1", "unknown key `colour`"),
        ("title", "is not TOML"),
    ],
)
def test_a_file_about_another_site_is_refused(site, tmp_path, head, why):
    file = tmp_path / "other.toml"
    file.write_text(f"{head}\n{SCENARIO}")
    with pytest.raises(Refused, match=why):
        site.play(file)


@pytest.mark.slow
def test_a_service_that_is_killed_comes_back_at_its_address(site):
    site.inject("service-killed", down=0.2)
    answer = httpx2.get(f"{site.url}/openapi.json", timeout=PATIENCE)
    assert answer.status_code == 200


@pytest.mark.slow
def test_without_an_api_server_an_expectation_ends_and_all_can_be_repaired():
    with start_site(in_process=True) as running:
        running.inject("api-server-down")
        running.do("make-logical-partition", name="training")
        running.do("make-vpc", name="net", logical_partition="training")
        running.do("make-instances", group="job", vpc="net", count=18)
        running.expect("instances", group="job", status="Ready")
        with pytest.raises(StepNotObserved):
            running.expect("clique-label", tray="rack-01/slot-0", within=0.5)
        running.clear()
        running.expect("clique-label", tray="rack-01/slot-0")


@pytest.mark.slow
def test_waiting(site):
    counted = iter(range(5))
    assert site.wait_until(lambda: next(counted) == 3, what="three") is True
    with pytest.raises(TimedOut, match=r"not within 0\.1 s: the moon"):
        site.wait_until(lambda: False, within=0.1, what="the moon")


@pytest.mark.slow
def test_names_follow_the_seed_and_sites_do_not_meet(tmp_path):
    with start_site(seed="a") as first, start_site(seed="a") as second, start_site(seed="b") as third:
        assert first.trays == second.trays
        assert {tray.node for tray in first.trays}.isdisjoint(tray.node for tray in third.trays)
        assert len({first.url, second.url, third.url}) == 3
        first.inject("node-lost", tray="rack-01/slot-0")
        second.expect("node", tray="rack-01/slot-0", within=0)


@pytest.mark.slow
def test_it_ends_with_its_context_also_after_an_exception():
    with pytest.raises(ZeroDivisionError), start_site(faults=["switch-stops"]) as running:  # noqa: PT012
        pid = json.loads((running.home / "control.json").read_bytes())["pid"]
        assert is_running(pid)
        _ = 1 / 0
    assert not is_running(pid)
    assert not running.home.exists()


@pytest.mark.slow
def test_a_site_that_ends_by_itself_is_an_error():
    ended = pytest.raises(SiteFailed, match=r"the site ended by itself \(-9\)")
    with ended, start_site() as running:
        pid = json.loads((running.home / "control.json").read_bytes())["pid"]
        os.kill(pid, signal.SIGKILL)
        # Wait until all of its threads have ended. The first is a zombie before that.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Refused, match="does not answer"):
            running.inject("switch-stops")


@pytest.mark.slow
def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    program = textwrap.dedent("""
        import sys, time
        from rackloom.testing import start_site
        with start_site() as site:
            print((site.home / "control.json").read_text(), flush=True)
            time.sleep(600)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    pid = json.loads(parent.stdout.readline())["pid"]
    parent.kill()
    parent.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_child_ends_although_a_process_that_was_forked_meanwhile_goes_on():
    program = textwrap.dedent("""
        import json, os, signal, time
        from rackloom.testing import start_site
        with start_site() as site:
            child = json.loads((site.home / "control.json").read_text())["pid"]
            forked = os.fork()
            if not forked:
                time.sleep(600)
            # Ctrl-C at a terminal goes to a whole group of processes.
            print(os.getpgid(child) == os.getpgid(0), flush=True)
            ending = time.monotonic()
        print(time.monotonic() - ending)
        os.kill(forked, signal.SIGKILL)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=5 * PATIENCE
    )
    is_in_our_group, seconds = done.stdout.split()
    assert is_in_our_group == "False"
    assert float(seconds) < END_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("options", "why"),
    [({"profile": "gb200-nvl27"}, "gb200-nvl72"), ({"racks": 0}, "rack"), ({"racks": 129}, "up to 128")],
)
def test_what_cannot_be_started_is_refused(options, why, in_process):
    with pytest.raises(Refused, match=why), start_site(in_process=in_process, **options):
        pass


@pytest.mark.slow
def test_a_fault_that_there_is_not_ends_the_site_too():
    with pytest.raises(Refused, match="not known"), start_site(in_process=True, faults=["switch-dances"]):
        pass


@pytest.mark.slow
def test_for_asyncio():
    async def run():
        ticks = []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.05)

        ticking = asyncio.create_task(tick())
        begun_at = time.monotonic()
        async with start_site_async(seed="7") as running:
            started_at, begun = time.monotonic(), len(ticks)
            await running.inject("gpu-lost", gpu="rack-01/slot-0/gpu-0")
            await running.expect(
                "devices", driver="gpu.nvidia.com", tray="rack-01/slot-0", count=1, tainted=True
            )
            await running.clear()

            async def later():
                return len(ticks) > begun + 2

            assert await running.wait_until(later)
            home = running.site.home
        ticking.cancel()
        # The loop was free during the start: a start that blocks it leaves a gap as long as itself.
        gaps = [second - first for first, second in pairwise([begun_at, *ticks[:begun], started_at])]
        assert max(gaps) < (started_at - begun_at) / 2
        return home

    assert not asyncio.run(run()).exists()


def test_importing_it_imports_nothing_of_a_site():
    program = "import rackloom.testing, rackloom.pytest_plugin, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("rackloom")}
    assert loaded == {
        "rackloom",
        "rackloom.testing",
        "rackloom.testing.failures",
        "rackloom.testing.sites",
        "rackloom.testing.temporary_home",
        "rackloom.pytest_plugin",
    }
    assert not {"httpx2", "msgspec", "fastapi"} & set(done.stdout.split())
