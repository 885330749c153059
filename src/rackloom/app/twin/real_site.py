"""The embedded site in real time, for the steps of scenarios.

`RealSite` is the embedded site on loopback. Its service can be killed and started again on the same port
while its switches go on. `fails` ends only when a service ended without being killed. `on_start` is called
with each life of the service: the rack map of a new life has to be given the cluster again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import httpx2

from rackloom.app.home import Home
from rackloom.app.process import LogSetup, log_to_file
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.twin.site import EmbeddedSite, TwinSite, embedded_service, open_embedded_home
from rackloom.carve.api.auth import Role
from rackloom.carve.inventory.enrolment import DEMO_ORG
from rackloom.carve.store.database import Store
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.lab.scenario.rest_client import Json, RestAnswer
from rackloom.lab.scenario.stage import SiteControl
from rackloom.lab.switches.servers import NmxcServer
from rackloom.runtime.traces import NO_TRACES, Traces

TOKEN_SECONDS = 86_400.0
REQUEST_SECONDS = 30.0
"""Seconds for one REST request."""
ServiceListener = Callable[[EmbeddedSite], None]


@asynccontextmanager
async def real_site(
    home: Home,
    *,
    racks: int,
    profile: str,
    port: int = 0,
    seed: str | None = None,
    log: LogSetup = log_to_file,
    traces: Traces = NO_TRACES,
) -> "AsyncIterator[RealSite]":
    """A site that answers while the context is entered. `seed` as in `open_embedded_home`."""
    async with (
        open_embedded_home(home, racks=racks, profile=profile, seed=seed, log=log) as (store, twin),
        httpx2.AsyncClient(timeout=REQUEST_SECONDS, trust_env=False) as http,
        RealSite(home, store, twin, http, port, traces) as site,
    ):
        yield site


class RealSite(SiteControl):
    """The embedded site on sockets. Its service can be ended and started again while its racks go on."""

    def __init__(
        self,
        home: Home,
        store: Store,
        twin: TwinSite,
        http: httpx2.AsyncClient,
        port: int = 0,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.site = twin.site
        self.switches: list[NmxcServer] = [twin.servers[domain.uuid] for domain in twin.site.domains]
        self._home = home
        self._store = store
        self.twin = twin
        self._http = http
        self._port = port
        self._traces = traces
        self._running = AsyncExitStack()
        self._service: EmbeddedSite | None = None
        self._newest: EmbeddedSite | None = None
        self._started = asyncio.Event()
        self._on_start: list[ServiceListener] = []

    async def __aenter__(self) -> "RealSite":
        service = await self._running.enter_async_context(
            embedded_service(self._home, self._store, self.twin, self._port, self._traces)
        )
        # The next life answers where this one did.
        self._port = urlsplit(service.url).port or 0
        self._service = self._newest = service
        for notify in self._on_start:
            notify(service)
        self._started.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service = None
        self._started.clear()
        await self._running.aclose()

    @property
    def service(self) -> EmbeddedSite:
        """The service of the newest life, which may have ended."""
        assert self._newest is not None  # noqa: S101 (the context is entered)
        return self._newest

    def on_start(self, notify: ServiceListener) -> None:
        """Call `notify` with the present service, and with that of each later life."""
        self._on_start.append(notify)
        notify(self.service)

    async def fails(self) -> None:
        """Wait until a service ends without being killed. Raises its error."""
        while True:
            await self._started.wait()
            service = self.service
            await asyncio.wait((service.reconciling,))
            if self._service is service:
                service.reconciling.result()
                raise RuntimeError("the reconciler ended without an error")

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
        """End the service's tasks where they stand. Transactions that have begun end as in a real process."""
        await self.__aexit__()
        self.ended += 1
        await asyncio.sleep(down)
        await self.__aenter__()

    async def findings(self) -> tuple[Finding, ...]:
        """All that `rackloom doctor` finds in the home of the site, and in its cluster if there is one."""
        snapshot = await site_snapshot(
            time.time(), records=self._store, cluster=self.api, transfers=self._home.path / "transfers"
        )
        return examine(snapshot)
