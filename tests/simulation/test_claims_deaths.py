"""ComputeDomains with dying processes: a sample of the stories that `run_claims.py` plays completely.

RACKLOOM_EVERY_DEATH=1 takes every step instead (as `python tests/simulation/run_claims.py` does).
"""

import os

import msgspec
import pytest
from tests.simulation.compute_domains.cluster import STOP_DISRUPTIONS, Disruption, StoryKind
from tests.simulation.compute_domains.story import play_story
from tests.simulation.planted.claims import BUGS, known_first
from tests.simulation.run_claims import classes, quiet

from rackloom.claim.imex.daemon import DaemonReporter
from rackloom.claim.node import cdi, storage
from rackloom.claim.node.imex.labels import ComputeDomainLabel
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.prepare import ClaimPreparer
from rackloom.claim.node.storage import Checkpoint
from rackloom.runtime.log_settings import structlog_configured

EVERY = bool(os.environ.get("RACKLOOM_EVERY_DEATH"))
SAMPLE = (0.15, 0.4, 0.65)
"""Points in the story: while it begins, while it runs, while it ends."""
FEWER = (0.3, 0.55)
"""The same for gangs and for processes that are stopped."""


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    with structlog_configured():
        quiet()
        yield


@pytest.fixture(scope="module")
def steps():
    """Steps of an undisturbed story, in each mode."""
    results = {plot: play_story(classes(), plot) for plot in StoryKind}
    assert all(result.broken == () and result.checks for result in results.values())
    return {plot: result.steps for plot, result in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("plot", StoryKind)
@pytest.mark.parametrize("death", Disruption)
def test_whoever_dies_nothing_is_stuck_or_left_behind(plot, death, steps):
    count = steps[plot]
    parts = FEWER if plot is StoryKind.GANG or death in STOP_DISRUPTIONS else SAMPLE
    taken = range(1, count + 1) if EVERY else [int(count * part) for part in parts]
    for at in taken:
        result = play_story(classes(), plot, death, at)
        assert result.died
        assert result.broken == (), (plot, death, at)


@pytest.mark.slow
def test_the_steps_are_of_every_kind(steps):
    """Fewer would mean that some part of the story is no longer played."""
    assert steps[StoryKind.DOMAIN] > 150
    assert steps[StoryKind.CHANNEL] > 200
    assert steps[StoryKind.GANG] > 200


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    sought = BUGS[bug]
    stories = (play_story(classes(), sought.plot, sought.death, at) for at in sought.order)
    assert any(sought.violation in violation for result in stories for violation in result.broken)


@pytest.mark.slow
class TestPlanted:
    """Bugs that the stories must find, or finding nothing would mean nothing."""

    def found(self, plot, death=None, steps=(0,)):
        return (violation for at in steps for violation in play_story(classes(), plot, death, at).broken)

    def test_one_channel_for_all(self, monkeypatch):
        whole = ImexPlugin._channels

        def first(self, wanted):
            return whole(self, msgspec.structs.replace(wanted, channel=1))

        monkeypatch.setattr(ImexPlugin, "_channels", first)
        assert any(violation.startswith("S8") for violation in self.found(StoryKind.CHANNEL))

    def test_a_channel_without_a_type(self, monkeypatch):
        def encoded(kind, devices):
            return spec(kind, devices).replace(b'"type":"c",', b"")

        spec = cdi.cdi_spec
        monkeypatch.setattr(cdi, "cdi_spec", encoded)
        assert any(
            "failed to stat CDI host device" in violation for violation in self.found(StoryKind.DOMAIN)
        )

    def test_a_label_that_stays(self, monkeypatch):
        async def leave(self, uid):
            return None

        monkeypatch.setattr(ComputeDomainLabel, "release", leave)
        monkeypatch.setattr("rackloom.core.domains.owned._unlabelling", lambda snapshot: ())
        assert any(
            "label resource.nvidia.com/computeDomain" in result for result in self.found(StoryKind.DOMAIN)
        )

    def test_a_claim_forgotten_before_it_is_undone(self, monkeypatch):
        async def unprepare(self, uid):
            entry = self.checkpoint.claims.get(uid)
            if entry is not None and entry.state is PrepareState.COMPLETED:
                self.checkpoint.drop(uid)
                await self.plugin.unprepare(entry, self._others(uid))
                self.cdi.remove(uid)

        monkeypatch.setattr(ClaimPreparer, "unprepare", unprepare)
        monkeypatch.setattr(ClaimPreparer, "sweep_specs", lambda self: None)
        found = self.found(StoryKind.DOMAIN, Disruption.PLUGIN, known_first(range(100, 220, 3), 136))
        assert any("cdi/" in violation or "label" in violation for violation in found)

    def test_a_checkpoint_that_is_not_written(self, monkeypatch):
        def write(self, claims):
            self._claims = claims

        monkeypatch.setattr(Checkpoint, "_write", write)
        found = self.found(StoryKind.DOMAIN, Disruption.PLUGIN, known_first(range(40, 160, 4), 76))
        assert any("CDI spec" in violation for violation in found)

    def test_a_record_lost_after_a_reboot(self, monkeypatch):
        """The plugin then gives the claim back without knowing which ComputeDomain's label the node has."""
        begun = storage.as_started

        def forget(entry):
            return msgspec.structs.replace(begun(entry), record={})

        monkeypatch.setattr(storage, "as_started", forget)
        found = self.found(StoryKind.DOMAIN, Disruption.REBOOT, known_first(range(70, 120, 3), 82))
        assert any("only the jobs' nodes are labelled" in violation for violation in found)

    def test_a_daemon_that_ends_with_the_api_server(self, monkeypatch):
        async def write_report(self, report):
            """Without the `except` of the original."""
            await self.report(None, report.error)
            self._reported = report
            return True

        monkeypatch.setattr(DaemonReporter, "_write_report", write_report)
        found = self.found(StoryKind.DOMAIN, Disruption.SERVER, known_first(range(60, 180, 4), 124))
        assert any(violation.startswith("daemon on") for violation in found)
