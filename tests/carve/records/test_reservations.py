"""Reserved trays on both databases: one organisation for a tray, and an end without a write."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.values import Rejected
from rackloom.carve.tenancy import placement, reservations
from rackloom.carve.tenancy.reservations import ReservationRequest
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.place.instance_trays import TrayRequest


def provider(site: Any) -> str:
    return str(site.read(lambda conn: conn.execute(sa.select(schema.provider.c.id)).scalar_one()))


def reserve(site: Any, *machines: str, seconds: float = 100.0, tenant: Any = None) -> str:
    request = ReservationRequest(
        tenant_id=(tenant or site.tenant).id, until=site.now + seconds, machine_ids=machines
    )
    order = OperatorOrder("op", "a job", site.now)
    return str(site.run(reservations.create_reservation, provider(site), request, order, site.ids))


def place(site: Any, tenant: Any, trays: int, **options: bool) -> tuple[str, ...]:
    request = TrayRequest(trays, one_domain=False, tenant=tenant.id, **options)
    chosen: tuple[str, ...] = site.read(
        placement.place_instances, request, type_id=site.type_id, logical_partitions=(), now=site.now
    ).trays
    return chosen


def test_sick_and_foreign_reserved_trays_are_nobodys_either(small_site: Any) -> None:
    rival = small_site.other_tenant()
    first = next(iter(small_site.partitions))
    small_site.health[small_site.guid(first, 0, 0)] = GpuHealth.DEGRADED
    small_site.partitions[first]["theirs"] = frozenset({small_site.guid(first, 1, 0)})
    small_site.observe_all()
    reserve(small_site, "chassis0-0", "chassis0-1", "chassis1-2")
    own = place(small_site, small_site.tenant, 4, allow_sick=True)
    assert set(own) >= {"chassis0-0", "chassis1-2"}
    assert "chassis0-1" not in own
    assert set(place(small_site, rival, 3, allow_sick=True)) == {"chassis0-2", "chassis1-0", "chassis1-1"}
    with pytest.raises(Rejected, match="requested 4, available 3; 2 more machines are not available now"):
        place(small_site, rival, 4, allow_sick=True)


def test_placement_is_as_before_once_reservations_have_ended(small_site: Any) -> None:
    small_site.observe_all()
    rival = small_site.other_tenant()
    before = [place(small_site, rival, trays) for trays in range(1, 7)]
    reserve(small_site, "chassis0-0", seconds=50.0)
    reserve(small_site, "chassis1-1", "chassis1-0", seconds=100.0)
    assert "chassis0-0" not in place(small_site, rival, 3)
    rows = small_site.read(lambda conn: conn.execute(sa.select(schema.tray_reservation)).all())
    small_site.tick(100.0)
    assert [place(small_site, rival, trays) for trays in range(1, 7)] == before
    assert small_site.read(lambda conn: conn.execute(sa.select(schema.tray_reservation)).all()) == rows
    assert small_site.read(placement.reserved_trays, small_site.now, None) == {}


def test_of_two_reservations_side_by_side_one_gets_the_tray(small_site: Any) -> None:
    small_site.observe_all()
    rival = small_site.other_tenant()
    by = provider(small_site)

    async def both() -> list[Any]:
        requests = [
            ReservationRequest(tenant_id=tenant.id, until=small_site.now + 9.0, machine_ids=("chassis0-0",))
            for tenant in (small_site.tenant, rival)
        ]
        order = OperatorOrder("op", "a job", small_site.now)
        work = (
            small_site.store.run(reservations.create_reservation, by, request, order, small_site.ids)
            for request in requests
        )
        return await asyncio.gather(*work, return_exceptions=True)

    assert {type(outcome) for outcome in small_site.runner.run(both())} == {str, Rejected}
    assert len(small_site.read(placement.reserved_trays, small_site.now, None)) == 1
