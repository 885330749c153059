"""A tenant with 32 writers does not keep another waiting: whole service on disk, HTTP on a socket.

Milliseconds depend on the load of the machine. So this counts how many requests of the busy tenant are
answered while one of the quiet tenant is under way: without turns, as many as it has writers.
"""

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from tests.carve.conftest import DOMAINS, PROFILE, TOPOLOGY

from rackloom.app.config import LimitsConfig, TenantLimitsConfig
from rackloom.app.listeners import serve_http
from rackloom.app.site.service import caller_limits
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer, Role
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.store.database import Store

WRITERS, REQUESTS, NOW = 32, 60, 1_000_000.0


class _Site:
    """A service, and a client of each tenant."""

    def __init__(self, url: str, issuer: LocalIssuer, site_id: str) -> None:
        self._url, self._issuer, self._site_id = url, issuer, site_id
        self._names = itertools.count()
        self.answered_busy = 0

    def client(self, org: str) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self._issuer.mint(org, [Role.TENANT_ADMIN], NOW, 3600.0)}"}
        return httpx2.AsyncClient(base_url=f"{self._url}/v2/org/{org}/nico/", headers=headers, timeout=60.0)

    async def write(self, client: httpx2.AsyncClient) -> None:
        body = {"siteId": self._site_id, "name": f"partition {next(self._names)}"}
        (await client.post("nvlink-logical-partition", json=body)).raise_for_status()

    async def write_all_the_time(self) -> None:
        async with self.client("busy") as client:
            while True:
                await self.write(client)
                self.answered_busy += 1

    async def overtaken(self) -> list[int]:
        """How many requests of the busy tenant were answered while each of the quiet one was under way."""
        counts = []
        async with self.client("quiet") as client:
            await self.write(client)
            for _ in range(REQUESTS):
                before = self.answered_busy
                await self.write(client)
                counts.append(self.answered_busy - before)
        return sorted(counts)


@asynccontextmanager
async def _site(home: Path, config: LimitsConfig | None) -> AsyncIterator[_Site]:
    numbers = itertools.count(1)

    def new_id() -> str:
        return f"00000000-0000-4000-8000-{next(numbers):012}"

    store, issuer = Store.open(home), LocalIssuer(home / "keys")
    try:
        urls = {domain: f"http://switch/{domain}" for domain in DOMAINS}
        await store.run(seed_embedded_site, TOPOLOGY, PROFILE, urls, now=NOW, ids=new_id)
        deps = ApiDeps(
            store=store,
            clock=lambda: NOW,
            ids=new_id,
            wake=lambda _domains, _org: None,
            verifier=issuer.verifier(lambda: NOW),
            auto_tenant=True,
        )
        limits = None if config is None else caller_limits(config, lambda _: None)
        site_id = await store.read(lambda conn: conn.exec_driver_sql("SELECT id FROM site").scalar_one())
        async with serve_http(create_app(deps, limits), "127.0.0.1:0") as port:
            yield _Site(f"http://127.0.0.1:{port}", issuer, site_id)
    finally:
        await store.close()


def _overtaken(home: Path, config: LimitsConfig | None) -> list[int]:
    async def story() -> list[int]:
        async with _site(home, config) as site:
            writers = [asyncio.create_task(site.write_all_the_time()) for _ in range(WRITERS)]
            try:
                while site.answered_busy < WRITERS:
                    await asyncio.sleep(0.01)
                return await site.overtaken()
            finally:
                for writer in writers:
                    writer.cancel()
                await asyncio.gather(*writers, return_exceptions=True)

    return asyncio.run(story())


@pytest.mark.slow
def test_a_quiet_tenant_does_not_wait_behind_32_writers_of_another(tmp_path: Path) -> None:
    counts = _overtaken(tmp_path, LimitsConfig())
    assert statistics.median(counts) <= 2
    assert counts[int(0.95 * REQUESTS)] <= 4


@pytest.mark.slow
def test_places_suffice_where_the_rate_is_no_limit(tmp_path: Path) -> None:
    fast = TenantLimitsConfig(requests_per_second=1e6, burst=1_000_000)
    counts = _overtaken(tmp_path, LimitsConfig(tenant=fast))
    assert statistics.median(counts) <= 2
    assert counts[int(0.95 * REQUESTS)] <= 4


@pytest.mark.slow
def test_without_turns_it_waits_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure does show the problem that the other tests guard against."""
    monkeypatch.setattr(Store, "on_behalf_of", lambda store, _org: store)
    assert statistics.median(_overtaken(tmp_path, None)) >= WRITERS / 4
