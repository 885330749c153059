"""The site of a scenario in virtual time: production service and driver, without sockets or threads.

`virtual_site` builds racks and service for a scenario from a seed, with NMX-C or NMX-M controllers and
one or two replicas on one in-memory store, and waits until each replica has made its first pass.
`VirtualSite` implements `SiteControl`: REST goes straight into the application of a living replica,
kills end processes at once or at a crash point, and network faults become fates of coming calls.
`untaken` names the requested faults that have not struck.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rackloom.carve.api.auth import LOCAL_LIFETIME, LocalIssuer, Role
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.store.database import SqliteBackend, Store
from rackloom.claim.kube.api import KubeApi
from rackloom.core.diagnosis.findings import Finding
from rackloom.lab.faults import NetworkFault, spoil_network
from rackloom.lab.scenario.model import Scenario
from rackloom.lab.scenario.rest_client import Json, RestAnswer
from rackloom.lab.scenario.stage import SimulatedRacks, SiteControl
from rackloom.lab.switches.fabric import FabricLimits
from rackloom.lab.virtual.network import CONNECT_FAILURE_SECONDS
from rackloom.lab.virtual.process import Process
from rackloom.lab.virtual.racks import SimRack, SimSite
from rackloom.lab.virtual.service import (
    SERVICE_EPOCH,
    SimulatedService,
    SimulatedServiceOverNmxm,
    rest_application,
    use_nmxm,
)
from rackloom.topology import profiles

INTERVAL_SECONDS = 60.0
"""Seconds between two passes over a domain without changes, as in a real service."""
OPERATOR_ORG = "operator"
ACCEPTED_STATUS = 202
"""Its body is plain text, not JSON."""

Diagnose = Callable[[Store, float, KubeApi | None], Awaitable[Sequence[Finding]]]
"""The doctor's findings in the records and the cluster of a site at a time (seconds since the epoch)."""


class VirtualSite(SiteControl):
    """A site service in virtual time."""

    def __init__(
        self,
        racks: SimSite,
        service: SimulatedService,
        records: Store,
        issuer: LocalIssuer,
        diagnose: Diagnose,
        work: "asyncio.Task[None]",
    ) -> None:
        self.site = racks.site
        self.switches: Sequence[SimRack] = racks.racks
        self.work = work
        """Ends only when something is wrong."""
        fabrics = tuple(rack.fabric for rack in racks.racks)
        self.racks = SimulatedRacks(site=racks.site, profile=racks.profile, seed="nodes", fabrics=fabrics)
        """The racks, in the form that a cluster with their trays as nodes needs."""
        self._service = service
        self._issuer = issuer
        self._diagnose = diagnose
        self._tokens: dict[str, str] = {}
        self._records = records
        self._fuses: list[tuple[int, list[tuple[Process, int]]]] = []
        """For each `kill_at`: the point, and the processes with the crash point at which each is to end."""

    async def rest(
        self, tenant: str | None, method: str, path: str, body: Json | None = None
    ) -> RestAnswer | None:
        """One request to the application of a living process."""
        org, role = (tenant, Role.TENANT_ADMIN) if tenant else (OPERATOR_ORG, Role.PROVIDER_ADMIN)
        raw = None if body is None else msgspec.json.encode(body)
        url_path = f"/v2/org/{org}/nico/{path}"
        answer = await self._service.call(method, url_path, self._token(org, role), raw)
        if answer is None:
            return None
        status, content = answer
        is_text = status == ACCEPTED_STATUS or not content
        return RestAnswer(status, None if is_text else msgspec.json.decode(content))

    async def kill(self, down: float) -> None:
        """Kill all replicas. New ones start on the same records."""
        self._service.kill(down)
        await asyncio.sleep(down)
        await self._service.is_open.wait()

    @property
    def ended(self) -> int:  # type: ignore[override]
        """Lives that have ended: killed at once, killed at a point, or without a kill."""
        return sum(replica.ended for replica in self._service.replicas)

    def kill_at(self, point: int) -> None:
        """Set a fuse on each replica, `point` writes or calls from here."""
        lives = [(life, life.points + point) for life in self._service.living]
        for life, fuse in lives:
            life.fuse = fuse
        self._fuses.append((point, lives))

    def set_clock(self, by: float) -> None:
        """Move the service's wall clock."""
        self._service.skew += by

    def spoil(self, switch: int, how: NetworkFault) -> None:
        """The next change, or every call from now on."""
        spoil_network(self.switches[switch].network, how)

    def untaken(self) -> Sequence[str]:
        """Fates of changes that have not come yet, and crash points that no process reached."""
        trips = [len(switch.network.next_mutations) for switch in self.switches]
        points = [point for point, lives in self._fuses if not any(_reached_fuse(*live) for live in lives)]
        changes = [f"{count} changes of rack-{rack:02}" for rack, count in enumerate(trips, 1) if count]
        return changes + [f"the service's death at its point {point}" for point in points]

    def mend(self) -> None:
        """Reset the clock and the networks."""
        self._service.skew = 0.0
        for switch in self.switches:
            switch.network.heal()

    async def findings(self) -> Sequence[Finding]:
        """From the records, and the cluster where there is one."""
        return await self._diagnose(self._records, self._service.wall(), self.api)

    def _token(self, org: str, role: Role) -> str:
        if org not in self._tokens:
            self._tokens[org] = self._issuer.mint(org, [role], SERVICE_EPOCH, LOCAL_LIFETIME)
        return self._tokens[org]


def _reached_fuse(life: Process, fuse: int) -> bool:
    """Whether a process ended at this fuse. A later fuse replaces an earlier one, which never strikes."""
    return life.fuse == fuse and life.reached_fuse


def virtual_wall() -> float:
    """Seconds since the epoch by a clock without skew."""
    return SERVICE_EPOCH + asyncio.get_running_loop().time()


@asynccontextmanager
async def virtual_site(
    scenario: Scenario, keys: Path, seed: int, diagnose: Diagnose
) -> AsyncIterator[VirtualSite]:
    """A fresh site for `scenario`, with its records in memory. Enter it in an `event_loop.SimLoop`."""
    rng = random.Random(seed)  # noqa: S311 (reproducible on purpose)
    profile, room = profiles.load_rack(scenario.profile), FabricLimits().max_partitions
    racks = SimSite(profile, scenario.racks, rng, unmanaged_tray=False, room=room)
    make = SimulatedService
    if scenario.controller == "nmx-m":
        use_nmxm(racks)
        make = SimulatedServiceOverNmxm
    issuer, backend = LocalIssuer(keys), SqliteBackend.inline(None)
    records = Store(backend)
    apps = [rest_application(records, issuer) for _ in range(scenario.processes)]
    service = make(racks, apps, backend, rng, INTERVAL_SECONDS)
    await records.run(
        seed_embedded_site,
        racks.site,
        profile,
        racks.endpoints,
        now=SERVICE_EPOCH,
        ids=service.ids,
        org=OPERATOR_ORG,
    )
    serving = asyncio.create_task(service.serve())
    try:
        # Wait until each replica has made its first pass over its domains.
        while not all(process.is_open for process in service.replicas):  # noqa: ASYNC110 (there is one event for all)
            await asyncio.sleep(CONNECT_FAILURE_SECONDS)
        yield VirtualSite(racks, service, records, issuer, diagnose, serving)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        await records.close()
