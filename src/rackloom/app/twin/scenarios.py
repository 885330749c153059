"""`rackloom twin play`: a scenario on the production code, in real or in virtual time.

Before anything starts, a scenario with a step that cannot be played at the chosen speed is refused by the
numbers of those steps.

In real time the site is that of `real_site`. Faults of the network and of the clock exist in virtual time
only. In virtual time the same service runs on an event loop with a clock that jumps to the next timer. One
seed fixes the order of simultaneous events and all delays, so that each run is the same.

A scenario that has a layer `cluster` also gets the cluster of the site's trays, with two elected replicas
if it requests them. The doctor that a scenario consults is the production examination of the same
snapshot.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rackloom.app.home import Home
from rackloom.app.process import keep_files_private, log_to_file
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.twin.cluster import twin_cluster
from rackloom.app.twin.real_site import RealSite, real_site
from rackloom.carve.store.database import Store
from rackloom.claim.kube.api import KubeApi
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.errors import Refused
from rackloom.lab.scenario.controllers import ClockAndRandom, real_clock_and_random
from rackloom.lab.scenario.model import Scenario
from rackloom.lab.scenario.played import PlayedScenario, PlayedStep, Speed
from rackloom.lab.scenario.playing import play_steps, play_while_running
from rackloom.lab.scenario.stage import SimulatedRacks, Stage
from rackloom.lab.scenario.virtual_site import VirtualSite, virtual_site, virtual_wall
from rackloom.lab.virtual import event_loop

VIRTUAL_SEED = 8
"""Fixes the order of simultaneous events and the delays of the network in virtual time."""
ANSWER_SECONDS = (0.002, 0.02)
"""Shortest and longest time in which the API server answers in virtual time."""

LineListener = Callable[[PlayedStep], None]


def play_scenario(
    scenario: Scenario, *, speed: Speed, home: Path | None, report: LineListener
) -> PlayedScenario:
    """Play a scenario. Refused, before anything starts, if not every step can be played.

    `home` is kept. Without one there is a home for this scenario alone, which is gone afterwards.
    """
    require_playable(scenario, speed)
    keep_files_private()
    fresh = tempfile.TemporaryDirectory(prefix="rackloom-play-") if home is None else nullcontext(str(home))
    with fresh as directory:
        kept = Home(Path(directory))
        if speed == "virtual":
            kept.create()
            log_to_file(kept.log)
            return event_loop.run_simulation(VIRTUAL_SEED, lambda: _play_virtual(scenario, kept, report))
        import uvloop

        return uvloop.run(_play_real(scenario, kept, report))


def require_playable(scenario: Scenario, speed: Speed) -> None:
    """Raise Refused, with the numbers of the steps, if not all can be played at this speed."""
    if speed in scenario.speeds:
        return
    steps = [
        str(number) for number, step in enumerate(scenario.steps, 1) if speed not in step.step_kind.speeds
    ]
    why = f"steps {', '.join(steps)}" if steps else "what stands above its steps"
    raise Refused(
        f"{scenario.name} cannot be played in {speed} time: {why}",
        nearest_fix=f"play it with --speed {next(iter(scenario.speeds))}",
    )


async def _play_real(scenario: Scenario, home: Home, report: LineListener) -> PlayedScenario:
    async with real_site(home, racks=scenario.racks, profile=scenario.profile) as site:
        return await _play(scenario, "real", site, site.twin, home, report, real_clock_and_random())


async def _play_virtual(scenario: Scenario, home: Home, report: LineListener) -> PlayedScenario:
    async with virtual_site(scenario, home.keys, VIRTUAL_SEED, _diagnose) as site:
        chance = ClockAndRandom(virtual_wall, random.Random(VIRTUAL_SEED))  # noqa: S311 (reproducible on purpose)
        playing = _play(scenario, "virtual", site, site.racks, home, report, chance)
        return await play_while_running(site.work, playing)


async def _play(
    scenario: Scenario,
    speed: Speed,
    site: RealSite | VirtualSite,
    racks: SimulatedRacks,
    home: Home,
    report: LineListener,
    chance: ClockAndRandom,
) -> PlayedScenario:
    if "cluster" not in scenario.layers:
        return await play_steps(scenario, speed, Stage(site), report)
    elected = scenario.candidates > 1
    async with twin_cluster(racks, home.twin / "cluster", chance, elected=elected) as cluster:
        if speed == "virtual":
            cluster.kube.faults.delay(*ANSWER_SECONDS)
        site.api = cluster.api
        # The invariants are checked from here on, while the nodes come up one after another.
        stage = Stage(site, cluster)

        async def once_up() -> PlayedScenario:
            await cluster.nodes.up.wait()
            return await play_steps(scenario, speed, stage, report)

        return await play_while_running(cluster.work, once_up())


async def _diagnose(store: Store, now: float, cluster: KubeApi | None) -> Sequence[Finding]:
    return examine(await site_snapshot(now, records=store, cluster=cluster))
