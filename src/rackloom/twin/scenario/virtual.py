"""The carve part of a site in virtual time: the same service and driver, without sockets or threads."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rackloom.carve.api.auth import Role
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.carve.site.seed import seed_embedded_site
from rackloom.carve.site.store import Store
from rackloom.carve.site.store.sqlite import SqliteBackend
from rackloom.claim.kube.api import KubeApi
from rackloom.prove.doctor.findings import Finding
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile, Site
from rackloom.twin.scenario.nmxm_plane import NmxmPlane, speak_nmxm
from rackloom.twin.scenario.site_actions import NetworkBad
from rackloom.twin.scenario.stage import Answer, Json
from rackloom.twin.scenario.values import Scenario
from rackloom.twin.switches.fabric import FabricLimits, SimulatedFabric
from rackloom.twin.switches.faults import Faults
from rackloom.twin.virtual.life import Life
from rackloom.twin.virtual.plane import EPOCH, NOBODY_THERE, SimPlane, application
from rackloom.twin.virtual.wire import Trip
from rackloom.twin.virtual.world import SimNetwork, SimRack, SimWorld

INTERVAL = 60.0
"""Seconds between two passes over a domain where nothing happens, as in a real service."""
OPERATOR = "operator"
ACCEPTED = 202
"""Answered with a word, not with JSON."""
LATE = 12.0
"""Seconds; the driver gives up after 10."""
SLOW = 2.0
"""Mean seconds that a slow network adds to each way."""
LOST_NOTICES = 0.9

Diagnose = Callable[[Store, float, KubeApi | None], Awaitable[Sequence[Finding]]]
"""What the doctor finds in the records and the cluster of a site at a time (seconds since the epoch)."""


class VirtualSwitch:
    """A controller behind a wire without sockets."""

    def __init__(self, rack: SimRack) -> None:
        self._rack = rack

    @property
    def fabric(self) -> SimulatedFabric:
        """As it truly is."""
        return self._rack.fabric

    @property
    def faults(self) -> Faults:
        """Of coming calls."""
        return self._rack.faults

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._rack.url

    @property
    def network(self) -> SimNetwork:
        """In front of it."""
        return self._rack.network

    async def stand_by(self) -> str:
        """One that will lead at a URL of its own."""
        return self._rack.stand_by()

    async def move(self) -> None:
        """It leads."""
        self._rack.move()

    async def old_leader_returns(self) -> str:
        """It answers with what it knew."""
        return self._rack.old_leader_returns()

    async def old_leader_yields(self) -> None:
        """It lists no GPU."""
        self._rack.old_leader_yields()

    async def go_away(self) -> None:
        """Calls are refused from now on."""
        self._rack.network.down = True
        self._rack.switch.break_streams()

    async def come_back(self) -> None:
        """Calls arrive again."""
        self._rack.network.down = False


class VirtualTrays(msgspec.Struct, frozen=True):
    """The racks of a plane, as a cluster whose nodes are their trays needs them."""

    site: Site
    profile: RackProfile
    seed: str
    fabrics: tuple[SimulatedFabric, ...]


class VirtualSite:
    """A plane in virtual time."""

    def __init__(
        self,
        world: SimWorld,
        plane: SimPlane,
        records: Store,
        issuer: LocalIssuer,
        diagnose: Diagnose,
        work: "asyncio.Task[None]",
    ) -> None:
        self.switches = [VirtualSwitch(rack) for rack in world.racks]
        self.api: KubeApi | None = None
        """The cluster's API server as a user asks it; None: there is no cluster."""
        self.work = work
        """Ends only when something is wrong."""
        fabrics = tuple(rack.fabric for rack in world.racks)
        self.trays = VirtualTrays(world.site, world.profile, "nodes", fabrics)
        self._plane = plane
        self._issuer = issuer
        self._diagnose = diagnose
        self._tokens: dict[str, str] = {}
        self._records = records
        self._fuses: list[tuple[int, list[tuple[Life, int]]]] = []
        """For each death that was asked for: the point, and which lives end at which of theirs."""

    async def rest(self, tenant: str, method: str, path: str, body: Json | None = None) -> Answer | None:
        """Straight into the application of the process that lives."""
        return await self._ask(tenant, Role.TENANT_ADMIN, method, path, body)

    async def operate(self, method: str, path: str, body: Json | None = None) -> Answer | None:
        """The same as the operator."""
        return await self._ask(OPERATOR, Role.PROVIDER_ADMIN, method, path, body)

    async def _ask(self, org: str, role: Role, method: str, path: str, body: Json | None) -> Answer | None:
        raw = None if body is None else msgspec.json.encode(body)
        whole = f"/v2/org/{org}/nico/{path}"
        answer = await self._plane.call(method, whole, self._token(org, role), raw)
        if answer is None:
            return None
        status, content = answer
        is_text = status == ACCEPTED or not content
        return Answer(status, None if is_text else msgspec.json.decode(content))

    async def kill(self, down: float) -> None:
        """The process gets no further; another starts on the same records."""
        self._plane.downtime = down
        for life in self._plane.living:
            life.kill()
        await asyncio.sleep(down)
        await self._plane.is_open.wait()

    def kill_at(self, point: int) -> None:
        """The process is killed at its so-and-so-many-th next write or call."""
        lives = [(life, life.points + point) for life in self._plane.living]
        for life, fuse in lives:
            life.fuse = fuse
        self._fuses.append((point, lives))

    def set_clock(self, by: float) -> None:
        """What the machine believes."""
        self._plane.skew += by

    def spoil(self, switch: int, how: NetworkBad) -> None:
        """The next change, or every call from now on."""
        network = self.switches[switch].network
        if (trip := _TRIPS.get(how.how)) is not None:
            network.next_mutations.append(trip)
        elif how.how == "dark":
            network.dark = True
        elif how.how == "slow":
            network.slow = SLOW
        else:
            network.notice_loss = LOST_NOTICES

    def untaken(self) -> Sequence[str]:
        """Changes to come, and points that no life reached."""
        trips = [len(one.network.next_mutations) for one in self.switches]
        points = [point for point, lives in self._fuses if not any(_burnt(*one) for one in lives)]
        changes = [f"{count} changes of rack {rack}" for rack, count in enumerate(trips, 1) if count]
        return changes + [f"the service's death at its point {point}" for point in points]

    def mend(self) -> None:
        """As good as at the start."""
        self._plane.skew = 0.0
        for switch in self.switches:
            switch.network.heal()

    async def findings(self) -> Sequence[Finding]:
        """From the records, and the cluster where there is one."""
        return await self._diagnose(self._records, self._plane.wall(), self.api)

    def _token(self, org: str, role: Role) -> str:
        if org not in self._tokens:
            self._tokens[org] = self._issuer.mint(org, [role], EPOCH - 1e8, 1e9)
        return self._tokens[org]


def _burnt(life: Life, fuse: int) -> bool:
    """Whether a life came to the point that was set for it, and to no other since."""
    return life.fuse == fuse and life.points >= fuse


_TRIPS = {
    "applied-late": Trip(there=LATE),
    "applied-twice": Trip(copies=2),
    "accepted-only": Trip(copies=0),
}


def virtual_wall() -> float:
    """Seconds since the epoch, as whoever has a true clock says."""
    return EPOCH + asyncio.get_running_loop().time()


@asynccontextmanager
async def virtual_site(
    scenario: Scenario, keys: Path, seed: int, diagnose: Diagnose
) -> AsyncIterator[VirtualSite]:
    """A fresh site for `scenario`, its records in memory; to be entered in a `event_loop.SimLoop`."""
    rng = random.Random(seed)  # noqa: S311 (reproducible on purpose)
    profile, room = profiles.load_rack(scenario.profile), FabricLimits().max_partitions
    world = SimWorld(profile, scenario.racks, rng, strangers=False, room=room)
    make = SimPlane
    if scenario.controller == "nmx-m":
        speak_nmxm(world)
        make = NmxmPlane
    issuer, backend = LocalIssuer(keys), SqliteBackend.inline(None)
    records = Store(backend)
    apps = [application(records, issuer) for _ in range(scenario.processes)]
    plane = make(world, apps, backend, rng, INTERVAL)
    await records.run(
        seed_embedded_site, world.site, profile, world.endpoints, now=EPOCH, ids=plane.ids, org=OPERATOR
    )
    serving = asyncio.create_task(plane.serve())
    try:
        await _all_open(plane)
        yield VirtualSite(world, plane, records, issuer, diagnose, serving)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        await records.close()


async def _all_open(plane: SimPlane) -> None:
    """Each process has read the domains that are its to carve."""
    while not all(one.is_open for one in plane.processes):  # noqa: ASYNC110 (a plane tells of the first only)
        await asyncio.sleep(NOBODY_THERE)
