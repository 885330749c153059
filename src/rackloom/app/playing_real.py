"""The site of a scenario in real time: switches and service on loopback, as `rackloom up` runs them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2

from rackloom.app.embedded import Embedded, ground, service
from rackloom.app.home import Home
from rackloom.app.picture.look import site_picture
from rackloom.app.twin_site import TwinSite
from rackloom.carve.api.auth import Role
from rackloom.carve.site.seed import DEMO_ORG
from rackloom.carve.site.store import Store
from rackloom.claim.kube.api import KubeApi
from rackloom.errors import Refused
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Finding
from rackloom.twin.scenario.site_actions import NetworkBad
from rackloom.twin.scenario.stage import Answer, Json
from rackloom.twin.switches.nmxc_server import NmxcServer

TOKEN_SECONDS = 86_400.0
PATIENCE = 30.0
"""Seconds for one REST request."""
_VIRTUAL = "play it with --speed virtual"


@asynccontextmanager
async def real_site(home: Home, *, racks: int, profile: str) -> "AsyncIterator[RealSite]":
    """A site that answers while the context is entered."""
    async with (
        ground(home, racks=racks, profile=profile) as (store, twin),
        httpx2.AsyncClient(timeout=PATIENCE) as http,
        RealSite(home, store, twin, http) as site,
    ):
        yield site


class RealSite:
    """The embedded site on sockets, whose service can be ended and started again while its racks go on."""

    def __init__(self, home: Home, store: Store, twin: TwinSite, http: httpx2.AsyncClient) -> None:
        self.switches: list[NmxcServer] = [twin.servers[domain.uuid] for domain in twin.site.domains]
        self._home = home
        self._store = store
        self.twin = twin
        self.api: KubeApi | None = None
        """The cluster's API server as a user asks it; None: there is no cluster."""
        self._http = http
        self._running = AsyncExitStack()
        self._service: Embedded | None = None

    async def __aenter__(self) -> "RealSite":
        self._service = await self._running.enter_async_context(
            service(self._home, self._store, self.twin, 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service = None
        await self._running.aclose()

    async def rest(self, tenant: str, method: str, path: str, body: Json | None = None) -> Answer | None:
        """Over the socket."""
        return await self._ask(tenant, Role.TENANT_ADMIN, method, path, body)

    async def operate(self, method: str, path: str, body: Json | None = None) -> Answer | None:
        """The same as the operator."""
        return await self._ask(DEMO_ORG, Role.PROVIDER_ADMIN, method, path, body)

    async def _ask(self, org: str, role: Role, method: str, path: str, body: Json | None) -> Answer | None:
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
        return Answer(answer.status_code, answer.json() if is_json and answer.content else None)

    async def kill(self, down: float) -> None:
        """End the service's tasks where they stand; transactions that have begun end as in a real process."""
        await self.__aexit__()
        await asyncio.sleep(down)
        await self.__aenter__()

    def kill_at(self, point: int) -> None:
        """Only in virtual time is it known what the next write or call is."""
        raise Refused("no process dies at a given point in real time", nearest_fix=_VIRTUAL)

    def set_clock(self, by: float) -> None:
        """The machine's clock is not ours."""
        raise Refused("a real clock is not set", nearest_fix=_VIRTUAL)

    def spoil(self, switch: int, how: NetworkBad) -> None:
        """Real sockets on loopback lose and double nothing."""
        raise Refused("a real network is not spoiled", nearest_fix=_VIRTUAL)

    def untaken(self) -> list[str]:
        """Nothing of this can be asked for."""
        return []

    def mend(self) -> None:
        """Neither network nor clock can be bad."""

    async def findings(self) -> Sequence[Finding]:
        """From the records of the service, and the cluster where there is one."""
        picture = await site_picture(time.time(), records=self._store, cluster=self.api)
        return examine(picture)
