"""`rackloom twin play`: a scenario on the production code, in real or in virtual time.

Before anything starts, a scenario with a step that cannot be played at the chosen speed is refused by the
numbers of those steps.

In real time, `RealSite` is the embedded site on loopback: its service can be killed and started again
while its switches go on. Faults of the network and of the clock exist in virtual time only. In virtual
time the same service runs on an event loop whose clock jumps to the next timer; one seed fixes the order
of simultaneous events and all delays, so that each run is the same.

A scenario that has a layer `cluster` also gets the cluster of the site's trays, with two elected replicas
where it asks for them. The doctor that a scenario consults is the production examination of the same
snapshot.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import httpx2

from rackloom.app.home import Home
from rackloom.app.process import log_to_file
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.twin.cluster import twin_cluster
from rackloom.app.twin.site import EmbeddedSite, TwinSite, embedded_service, open_embedded_home
from rackloom.carve.api.auth import Role
from rackloom.carve.inventory.enrolment import DEMO_ORG
from rackloom.carve.store.database import Store
from rackloom.claim.kube.api import KubeApi
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.errors import Refused
from rackloom.lab.scenario.controllers import ClockAndRandom, real_clock_and_random
from rackloom.lab.scenario.model import Scenario, Speed
from rackloom.lab.scenario.playing import PlayedScenario, PlayedStep, play_steps, play_while_running
from rackloom.lab.scenario.rest_client import Json, RestAnswer
from rackloom.lab.scenario.stage import SimulatedRacks, SiteControl, Stage
from rackloom.lab.scenario.virtual_site import VirtualSite, virtual_site, virtual_wall
from rackloom.lab.switches.servers import NmxcServer
from rackloom.lab.virtual import event_loop

# The site of a scenario in real time.


TOKEN_SECONDS = 86_400.0
REQUEST_SECONDS = 30.0
"""Seconds for one REST request."""


@asynccontextmanager
async def real_site(home: Home, *, racks: int, profile: str) -> "AsyncIterator[RealSite]":
    """A site that answers while the context is entered."""
    async with (
        open_embedded_home(home, racks=racks, profile=profile) as (store, twin),
        httpx2.AsyncClient(timeout=REQUEST_SECONDS) as http,
        RealSite(home, store, twin, http) as site,
    ):
        yield site


class RealSite(SiteControl):
    """The embedded site on sockets, whose service can be ended and started again while its racks go on."""

    def __init__(self, home: Home, store: Store, twin: TwinSite, http: httpx2.AsyncClient) -> None:
        self.switches: list[NmxcServer] = [twin.servers[domain.uuid] for domain in twin.site.domains]
        self._home = home
        self._store = store
        self.twin = twin
        self._http = http
        self._running = AsyncExitStack()
        self._service: EmbeddedSite | None = None

    async def __aenter__(self) -> "RealSite":
        self._service = await self._running.enter_async_context(
            embedded_service(self._home, self._store, self.twin, 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service = None
        await self._running.aclose()

    async def rest(
        self, tenant: str | None, method: str, path: str, body: Json | None = None
    ) -> RestAnswer | None:
        """One request over the socket."""
        org, role = (tenant, Role.TENANT_ADMIN) if tenant else (DEMO_ORG, Role.PROVIDER_ADMIN)
        if self._service is None:
            return None
        token = self._service.issuer.mint(org, [role], now=time.time(), ttl=TOKEN_SECONDS)
        try:
            answer = await self._http.request(
                method,
                f"{self._service.url}/v2/org/{org}/nico/{path}",
                json=body,
                headers={"Authorization": f"Bearer {token}"},
            )
        except httpx2.TransportError:
            return None
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return RestAnswer(answer.status_code, answer.json() if is_json and answer.content else None)

    async def kill(self, down: float) -> None:
        """End the service's tasks where they stand; transactions that have begun end as in a real process."""
        await self.__aexit__()
        self.ended += 1
        await asyncio.sleep(down)
        await self.__aenter__()

    async def findings(self) -> Sequence[Finding]:
        """From the records of the service, and the cluster where there is one."""
        snapshot = await site_snapshot(time.time(), records=self._store, cluster=self.api)
        return examine(snapshot)


# Playing.


VIRTUAL_SEED = 8
"""Fixes the order of simultaneous events and the delays of the network in virtual time."""
ANSWER_SECONDS = (0.002, 0.02)
"""Shortest and longest time in which the API server answers in virtual time."""

LineListener = Callable[[PlayedStep], None]


def play_scenario(
    scenario: Scenario, *, speed: Speed, home: Path | None, report: LineListener
) -> PlayedScenario:
    """Play a scenario. Refused, before anything starts, where not every step can be played.

    `home` is kept; without one there is a home for this scenario alone, which is gone afterwards.
    """
    _require_playable(scenario, speed)
    fresh = tempfile.TemporaryDirectory(prefix="rackloom-play-") if home is None else nullcontext(str(home))
    with fresh as directory:
        kept = Home(Path(directory))
        if speed == "virtual":
            kept.create()
            log_to_file(kept.log)
            return event_loop.run_simulation(VIRTUAL_SEED, lambda: _play_virtual(scenario, kept, report))
        import uvloop

        return uvloop.run(_play_real(scenario, kept, report))


def _require_playable(scenario: Scenario, speed: Speed) -> None:
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
