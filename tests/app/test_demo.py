"""The demonstration as a user runs it, and its message when a check fails."""

import asyncio
import json
import subprocess
import sys
from contextlib import suppress

import pytest
from tests.app.embedded_site import embedded_site
from tests.proxies import with_dead_proxies
from tests.waiting import until

from rackloom.app.demo import run
from rackloom.app.demo.job import LostGpu, RackJob
from rackloom.app.demo.running import check_demo_racks
from rackloom.app.demo.story import DEGRADED, DemoReport, DemoStep, DemoStory, NotObserved, step_mark
from rackloom.app.demo.tenants import DemoTenant
from rackloom.app.doctor import DoctorSources, diagnose
from rackloom.app.home import Home
from rackloom.app.twin.up import running_twin
from rackloom.cli.main import app as main_app
from rackloom.core.diagnosis.report import render_findings
from rackloom.errors import Refused

STEPS = [
    "two tenants' logical partitions created",
    "instances batch-created",
    "partitions observed in the fabric",
    "NVLink domain of every GPU",
    "whole-rack job placed before it exists",
    "whole-rack MPIJob running with its own channel",
    "doctor: all layers agree",
    "a GPU lost under the job",
    "doctor: found, with both sides and the fix",
    "healed, and the doctor agrees",
    "job ended, nothing of it left",
    "claims allocated",
    "transfer run",
    "everything released, fabric empty",
]


@pytest.mark.slow
def test_the_whole_story_holds():
    command = [sys.executable, "-m", "rackloom.cli.main", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert [step["name"] for step in report["steps"]] == STEPS
    assert all(step["ok"] for step in report["steps"]), report
    assert report["ok"] is True
    assert done.returncode == 0
    fabric, domains = (report["steps"][number]["evidence"] for number in (2, 3))
    assert {org: fabric[org]["gpus"] for org in ("blue", "green")} == {"blue": 72, "green": 24}
    assert all(
        domains[org]["gpusPerDomain"] == {fabric[org]["domain"]: fabric[org]["gpus"]} for org in domains
    )
    assert report["steps"][5]["evidence"]["namespace"].endswith("rackloom.dev/org=blue")
    found = report["steps"][8]["evidence"]
    lost = report["steps"][7]["evidence"]["lost"]
    assert list(found) == ["doctor", "device untainted"]
    assert found["doctor"].startswith("1 finding: 1 ")
    assert report["steps"][9]["evidence"]["doctor"] == report["doctor"] == "all holds"
    assert found["device untainted"]["what"].split("/")[0].removeprefix("device ") in lost


def story_of(act):
    story = DemoStory(lambda _: None)
    asyncio.run(story.step("a step", act))
    return story.report("all holds")


async def _unseen():
    raise NotObserved("nothing was there", seen=0)


async def _broken():
    raise OSError("no such device")


@pytest.mark.parametrize(
    ("act", "reason"), [(_unseen, "nothing was there"), (_broken, "OSError: no such device")]
)
def test_a_step_that_was_not_seen_is_not_ok(act, reason):
    report = story_of(act)
    assert report.ok is False
    assert report.steps[0].evidence["reason"] == reason


def test_what_stands_on_a_failed_step_is_not_attempted():
    async def tell_it():
        story = DemoStory(lambda _: None)
        await story.step("first", _unseen)
        await story.step_if_holding("second", _broken)
        return story.report("all holds")

    second = asyncio.run(tell_it()).steps[1]
    assert second.evidence["reason"] == "not attempted: an earlier step failed"


def test_a_claim_that_got_the_wrong_nics_fails_the_step(monkeypatch):
    wrong = dict(zip(run.EXPECTED, reversed(run.EXPECTED.values()), strict=True))
    monkeypatch.setattr(run, "EXPECTED", wrong)
    report = story_of(run.allocate_templates)
    assert report.ok is False
    assert set(report.steps[0].evidence["claims"]) == set(wrong)


async def _less():
    return {DEGRADED: "no NIXL here", "label": "sockets"}


def test_a_step_that_shows_less_is_verified_and_degraded():
    report = story_of(_less)
    assert (report.ok, report.degraded) == (True, True)
    step = report.steps[0]
    assert (step.degraded, step.evidence) == ("no NIXL here", {"label": "sockets"})
    assert step_mark(step) == "degraded"


def test_the_last_line_names_what_is_degraded():
    whole, less = DemoStep("carve", True, None, 1.0, {}), DemoStep("transfer run", True, "no NIXL", 2.0, {})
    healthy = run.report_summary(DemoReport(True, False, (whole,), "all holds")).splitlines()
    assert healthy == [
        "A site that keeps running, with all of this on it: rackloom up --demo",
        "1 of 1 steps verified by observation in 1.0 s",
        "doctor: all holds",
    ]
    degraded = run.report_summary(DemoReport(True, True, (whole, less), "2 findings: 2 unknown")).splitlines()
    assert degraded[-2:] == [
        "2 of 2 steps verified by observation in 3.0 s; degraded: transfer run: no NIXL",
        "doctor: 2 findings: 2 unknown",
    ]


@pytest.mark.slow
def test_what_the_demo_prints_of_the_doctor_is_what_the_doctor_prints(tmp_path):
    """With a transfer record that cannot be read, which only one of the two used to look at."""
    home = Home(tmp_path)

    async def scenario():
        async with running_twin(home, port=0, racks=1, profile="gb200-nvl72") as twin:
            await twin.nodes.up.wait()
            await twin.nodes.settle()
            (tmp_path / "transfers").mkdir()
            (tmp_path / "transfers" / "broken.json").write_text("{")
            printed = await LostGpu(twin).doctor_says()
            found = await asyncio.to_thread(diagnose, DoctorSources(home=tmp_path))
            return printed, found

    printed, found = asyncio.run(scenario())
    assert printed == render_findings(found.snapshot, found.findings).splitlines()[-1]
    assert "unknown" in printed


@pytest.mark.parametrize(("racks", "profile"), [(1, "gb200-nvl72"), (2, "gb200-nvl4")])
def test_racks_without_room_for_the_demo_are_refused(racks, profile):
    with pytest.raises(Refused):
        check_demo_racks(racks, profile)


@pytest.mark.parametrize("profile", ["gb200-nvl72", "gb300-nvl72"])
def test_racks_with_room_for_the_demo_are_accepted(profile):
    check_demo_racks(2, profile)


@pytest.mark.slow
def test_without_nixl_the_step_degrades_and_says_so(monkeypatch):
    monkeypatch.setattr(run, "nixl_missing_reason", lambda: "no wheel")
    report = story_of(run.run_transfer)
    assert (report.ok, report.degraded) == (True, True)
    assert report.steps[0].degraded == "plain TCP socket, not NIXL: no wheel"
    assert report.steps[0].evidence["dataVerified"] is True


@pytest.mark.slow
def test_a_fabric_that_keeps_a_partition_fails_the_release(monkeypatch):
    async def nothing_deleted(self, path):
        return None

    async def as_if_gone(self):
        return True

    monkeypatch.setattr(DemoTenant, "_delete", nothing_deleted)
    monkeypatch.setattr(DemoTenant, "_gone", as_if_gone)
    monkeypatch.setattr(DemoTenant, "_partition_gone", as_if_gone)
    report = run.run_demo(lambda _: None)
    assert report.ok is False
    last = report.steps[-1]
    assert last.ok is False
    assert last.evidence["reason"] == "the fabric still holds partitions"


@pytest.mark.slow
def test_a_job_without_a_partition_is_refused_with_what_helps(tmp_path):
    home = Home(tmp_path)

    def tenant(*words):
        main_app([*words, "--home", str(tmp_path)])

    async def scenario():
        async with running_twin(home, port=0, racks=1, profile="gb200-nvl72") as whole:
            job = RackJob(whole, "demo")
            with pytest.raises(NotObserved, match="no NVLink partition holds these trays") as refused:
                await job.place()
            advice = refused.value.evidence["fix"]
            assert "rackloom partition create, vpc create, instance create." in advice
            await asyncio.to_thread(tenant, "partition", "create", "train")
            await asyncio.to_thread(tenant, "vpc", "create", "net", "--partition", "train")
            order = ("instance", "create", "job", "--vpc", "net", "--count", str(job.workers), "--wait")
            await asyncio.to_thread(tenant, *order)
            return await wait_until_placed(job)

    async def wait_until_placed(job):
        """The nodes carry their clique a moment after the instances are ready."""

        async def placed():
            with suppress(NotObserved):
                return await job.place()

        return await until(placed, "the job is placed")

    assert asyncio.run(scenario())["workers"] == 18


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_not_asked_for_the_own_site(tmp_path, monkeypatch):
    with_dead_proxies(monkeypatch)

    async def create():
        async with embedded_site(Home(tmp_path), port=0, racks=1, profile="gb200-nvl72") as site:
            tenant = DemoTenant(site, "blue", 1)
            async with tenant.http:
                return await tenant.create_partition()

    assert asyncio.run(create())["status"] == "Ready"
