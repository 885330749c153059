"""The operator of a map's site, and the operations that its timeline shows."""

import asyncio

import msgspec
import pytest
import sqlalchemy as sa
from tests.core.diagnosis.healthy import healthy

from rackloom.app.site.rack_map import TIMELINE_PER_ORG, SiteSource, authenticator_of
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.carve.api.auth import Caller, Role
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import endpoint, operation, provider, site
from rackloom.web.live import LiveMap

NOW = 1_800_000_000.0
TIMES = {"created": NOW, "updated": NOW}
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def store():
    store = Store.inline()
    await store.run(_provided, "demo")
    yield store
    await store.close()


def _provided(conn, org):
    conn.execute(sa.insert(provider).values(id=org, org=org, **TIMES))
    row = {"provider_id": org, "name": org, "status": "Registered", "capabilities": {}, **TIMES}
    conn.execute(sa.insert(site).values(id=f"site-{org}", default_partition="keep", **row))


def _operations(conn, *orgs):
    conn.execute(sa.insert(endpoint).values(id="e", url="http://127.0.0.1:9", **TIMES))
    row = {
        "endpoint_id": "e",
        "domain": "d",
        "kind": "create-partition",
        "partition_name": "p",
        "reason": "r",
    }
    row |= {"detail": {}, "state": "done", "observed_at": NOW, "started": NOW}
    conn.execute(sa.insert(operation), [{**row, "asked_by": org} for org in orgs])


class Verifier:
    """Accepts every token."""

    def verify(self, header, org):
        return Caller("somebody", org, frozenset({Role.PROVIDER_VIEWER}), NOW + 60)


async def is_operator(store, org):
    source = SiteSource(store, lambda: NOW)
    viewer = await authenticator_of(Verifier(), source.is_operated_by)("token", org)
    return viewer.operator


async def test_a_providers_role_counts_only_in_the_organisation_of_the_site(store):
    assert await is_operator(store, "demo")
    assert not await is_operator(store, "acme")


async def test_nobody_operates_the_sites_of_another_provider(store):
    await store.run(_provided, "other")
    assert not await is_operator(store, "demo")


async def test_what_others_do_leaves_a_tenant_its_timeline(store):
    await store.run(_operations, "acme", *["blue"] * (2 * TIMELINE_PER_ORG))
    entries = (await SiteSource(store, lambda: NOW).read()).happenings
    assert [entry.tenant for entry in entries] == [*["blue"] * TIMELINE_PER_ORG, "acme"]


async def test_an_operation_says_what_it_was_asked_of_and_how_long_it_took(store):
    await store.run(_operations, "acme", "blue")
    await store.run(lambda conn: conn.execute(sa.update(operation).values(finished=NOW + 3).where(_BLUES)))
    blue, acme = (await SiteSource(store, lambda: NOW).read()).happenings
    assert (blue.at, blue.seconds, acme.at, acme.seconds) == (NOW + 3, 3, NOW, None)
    assert blue.places == ("partition d/p", "domain d")


_BLUES = operation.c.asked_by == "blue"


async def test_the_map_calls_readings_old_when_it_is_told_to(store, monkeypatch):
    seen = []

    async def look(now, *, stale, **rest):
        seen.append(stale.seconds)
        return await site_snapshot(now, stale=stale, **rest)

    monkeypatch.setattr("rackloom.app.site.rack_map.site_snapshot", look)
    await SiteSource(store, lambda: NOW, stale_seconds=30.0).read()
    assert seen == [30.0]


async def test_a_finding_leaves_the_map_within_a_second_of_what_heals_it(store, monkeypatch):
    well = healthy(racks=2, trays=2)
    gpus = (msgspec.structs.replace(well.fabric_gpus[0], healthy=False), *well.fabric_gpus[1:])
    shown = [msgspec.structs.replace(well, fabric_gpus=gpus)]
    clock = asyncio.get_running_loop().time

    async def look(now, **_):
        return msgspec.structs.replace(shown[-1], at=now)

    monkeypatch.setattr("rackloom.app.site.rack_map.site_snapshot", look)
    source = SiteSource(store, clock)
    source.cluster_version = lambda: len(shown)
    live = LiveMap(source, clock)
    async with live.watched():
        reading = await live.after(0)
        assert reading.whole.findings
        shown.append(well)
        healed = clock()
        while reading.whole.findings:
            reading = await asyncio.wait_for(live.after(reading.number), 60)
        assert clock() - healed < 1.0
        assert reading.whole.examined_at >= healed
