"""`rackloom twin play`: a scenario on the embedded site in real time, or on the same service in virtual."""

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rackloom.app.home import Home
from rackloom.app.logs import log_to
from rackloom.app.picture.look import site_picture
from rackloom.app.playing_real import RealSite, real_site
from rackloom.app.whole.cluster import Cluster, twin_cluster
from rackloom.app.whole.ground import Chance
from rackloom.app.whole.site import USER
from rackloom.carve.site.store import Store
from rackloom.claim.kube.api import KubeApi
from rackloom.errors import Refused
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Finding
from rackloom.twin.kube import DirectApi
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.hands import both, carve_hands, cluster_hands
from rackloom.twin.scenario.player import Line, Played, play, while_working
from rackloom.twin.scenario.values import Scenario, Speed
from rackloom.twin.scenario.virtual import VirtualSite, virtual_site, virtual_wall
from rackloom.twin.virtual import event_loop

SEED = 8
"""Of virtual time: the order of what is due together, and the delays of the network."""
ANSWER_SECONDS = (0.002, 0.02)
"""The shortest and the longest that a virtual API server takes for a call."""

Tell = Callable[[Line], None]


def play_scenario(scenario: Scenario, *, speed: Speed, home: Path | None, tell: Tell) -> Played:
    """Play a scenario. Refused, before anything starts, where not every step can be played.

    `home` is kept; without one there is a home for this scenario alone, which is gone afterwards.
    """
    _require_playable(scenario, speed)
    fresh = tempfile.TemporaryDirectory(prefix="rackloom-play-") if home is None else nullcontext(str(home))
    with fresh as directory:
        place = Home(Path(directory))
        if speed == "virtual":
            place.create()
            log_to(place.log)
            return event_loop.run(SEED, lambda: _play_virtual(scenario, place, tell))
        import uvloop

        return uvloop.run(_play_real(scenario, place, tell))


def _require_playable(scenario: Scenario, speed: Speed) -> None:
    if speed in scenario.speeds:
        return
    steps = [str(number) for number, step in enumerate(scenario.steps, 1) if speed not in step.speeds]
    why = f"steps {', '.join(steps)}" if steps else "what stands above its steps"
    raise Refused(
        f"{scenario.name} cannot be played in {speed} time: {why}",
        nearest_fix=f"play it with --speed {next(iter(scenario.speeds))}",
    )


async def _play_real(scenario: Scenario, home: Home, tell: Tell) -> Played:
    async with real_site(home, racks=scenario.racks, profile=scenario.profile) as site:
        if "cluster" not in scenario.layers:
            return await play(scenario, "real", carve_hands(site), tell)
        elected = scenario.candidates > 1
        async with twin_cluster(site.twin, _files(home), elected=elected) as cluster:
            return await _play_with(scenario, "real", site, cluster, tell)


async def _play_virtual(scenario: Scenario, home: Home, tell: Tell) -> Played:
    async with virtual_site(scenario, home.keys, SEED, _diagnose) as site:
        if "cluster" not in scenario.layers:
            return await while_working(site.work, play(scenario, "virtual", carve_hands(site), tell))
        chance = Chance(virtual_wall, random.Random(SEED))  # noqa: S311 (reproducible on purpose)
        elected = scenario.candidates > 1
        async with twin_cluster(site.trays, _files(home), chance, elected=elected) as cluster:
            cluster.kube.faults.delay(*ANSWER_SECONDS)
            return await while_working(site.work, _play_with(scenario, "virtual", site, cluster, tell))


async def _play_with(
    scenario: Scenario, speed: Speed, site: RealSite | VirtualSite, cluster: Cluster, tell: Tell
) -> Played:
    site.api = DirectApi(cluster.kube, USER)
    hands = both(carve_hands(site), cluster_hands(ClusterGround(cluster, site.api, site.switches)))

    async def once_up() -> Played:
        await cluster.nodes.up.wait()
        return await play(scenario, speed, hands, tell)

    return await while_working(cluster.work, once_up())


def _files(home: Home) -> Path:
    """Where the nodes of a cluster keep theirs."""
    return home.twin / "cluster"


async def _diagnose(store: Store, now: float, cluster: KubeApi | None) -> Sequence[Finding]:
    return examine(await site_picture(now, records=store, cluster=cluster))
