"""One rack and its site, whole: gRPC to the controller, records on disk, REST and events over HTTP."""

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from rackloom.app.listeners import serve_http
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer, Role
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory.enrolment import DEMO_ORG, seed_embedded_site
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.database import Store
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.topology import profiles
from rackloom.topology.rack import RackSite, build_site

PROFILE = profiles.load_rack("gb200-nvl72")
SITE: RackSite = build_site(PROFILE, 1, SeededNames("served"))
NEVER = 36000.0
"""Interval of the timer, so long that only wake-ups start passes in a test."""
_numbers = itertools.count(1)


def make_fabric() -> Any:
    (fabric,) = fabrics_of(SITE, "served")
    return fabric


class Tenant:
    """REST and events of one organization."""

    def __init__(self, base: str, org: str, issuer: LocalIssuer, role: Role = Role.TENANT_ADMIN) -> None:
        headers = {"Authorization": f"Bearer {issuer.mint(org, [role], time.time(), 3600)}"}
        self.http = httpx2.AsyncClient(base_url=f"{base}/v2/org/{org}/nico/", headers=headers, timeout=60)
        self.events: list[tuple[float, dict[str, Any]]] = []
        """The events of the stream with their times (seconds of `time.monotonic`)."""

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def new(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def instance(self) -> str:
        """A new instance with GPUs that shall join a new logical partition."""
        number = next(_numbers)
        place, kind = (await self.get("site"))[0]["id"], (await self.get("instance/type"))[0]["id"]
        partition = await self.new("nvlink-logical-partition", name=f"lp{number}", siteId=place)
        vpc = await self.new(
            "vpc", name=f"net{number}", siteId=place, nvLinkLogicalPartitionId=partition["id"]
        )
        made = await self.new("instance", name=f"i{number}", vpcId=vpc["id"], instanceTypeId=kind)
        return str(made["id"])

    async def status(self, instance: str) -> str:
        """Its status, or Unknown if the API gives the time since when."""
        shown = await self.get(f"instance/{instance}")
        return "Unknown" if shown["unknownSince"] else str(shown["status"])

    async def until(self, instance: str, status: str, within: float = 60.0) -> float:
        """Wait until the instance has `status`. Returns the time of `time.monotonic`."""
        async with asyncio.timeout(within):
            while await self.status(instance) != status:
                await asyncio.sleep(0.02)
        return time.monotonic()

    async def until_told(self, instance: str, status: str, within: float = 60.0) -> float:
        """Wait for an event. Returns the time when it came."""
        async with asyncio.timeout(within):
            while True:
                for at, event in self.events:
                    if (event["id"], event["status"]) == (instance, status):
                        return at
                await asyncio.sleep(0.01)

    async def listen(self) -> None:
        """Follow the event stream until cancelled."""
        async with self.http.stream("GET", "event") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.events.append((time.monotonic(), json.loads(line.removeprefix("data: "))))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.listen())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class ServedRack:
    """A site of one rack. `tenant` opens clients."""

    def __init__(self, store: Store, reconciler: Reconciler, base: str, issuer: LocalIssuer) -> None:
        self.store = store
        self.reconciler = reconciler
        self._base, self._issuer = base, issuer

    @asynccontextmanager
    async def tenant(self, org: str) -> AsyncIterator[Tenant]:
        tenant = Tenant(self._base, org, self._issuer)
        async with tenant.http:
            yield tenant

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Tenant]:
        """REST of the site's operator."""
        operator = Tenant(self._base, DEMO_ORG, self._issuer, Role.PROVIDER_ADMIN)
        async with operator.http:
            yield operator


@asynccontextmanager
async def served_rack(
    url: str, home: Path, *, interval: float = NEVER, **driver: Any
) -> AsyncIterator[ServedRack]:
    """Serve the site of the rack that has its controller at `url`."""
    store, issuer = Store.open(home), LocalIssuer(home)
    domain = SITE.domains[0].uuid
    await store.run(
        seed_embedded_site, SITE, PROFILE, {domain: url}, now=time.time(), ids=lambda: str(uuid.uuid4())
    )
    reconciler = Reconciler(
        store, lambda endpoint: NmxcDriver(endpoint.url, clock=time.time, **driver), time.time, interval
    )
    deps = ApiDeps(
        store=store,
        clock=time.time,
        ids=lambda: str(uuid.uuid4()),
        wake=reconciler.wake,
        verifier=issuer.verifier(),
        auto_tenant=True,
    )
    running = asyncio.create_task(reconciler.run())
    try:
        await reconciler.first_passes()
        async with serve_http(create_app(deps), "127.0.0.1:0") as port:
            yield ServedRack(store, reconciler, f"http://127.0.0.1:{port}", issuer)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()
