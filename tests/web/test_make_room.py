"""The places in which a job of whole trays fits, and the obstacles in the others."""

import msgspec
import pytest
from tests.web.snapshots import snapshot
from tests.web.test_pages_served import sign_in, visit
from tests.web.test_what_tenants_see import MINE, THEIRS, seen_by

from rackloom.web.make_room import room_plan
from rackloom.web.model import SiteReading, site_map

TWO_RACKS = (MINE, THEIRS, THEIRS, None, MINE, None, None, None)
"""Four trays each: one is free in the first, three in the second."""


def whole(holders=TWO_RACKS, **change):
    seen = snapshot(2, 4, holders)
    if change:
        machines = tuple(msgspec.structs.replace(machine, **change) for machine in seen.machines)
        seen = msgspec.structs.replace(seen, machines=machines)
    return site_map(SiteReading(snapshot=seen))


# A new user makes room for 18 trays: type the number, read the rack and the trays that are taken.
@pytest.mark.parametrize(
    ("trays", "fits", "racks"),
    [
        (1, True, ["rack-00", "rack-01"]),
        (2, True, ["rack-01"]),
        (4, False, ["rack-01", "rack-00"]),
        (5, False, []),
    ],
)
def test_it_fits_where_least_room_is_left_over_or_nearly_where_most_is_free(trays, fits, racks):
    plan = room_plan(whole(), trays)
    assert (plan.fits, [domain.racks[0] for domain in plan.domains]) == (fits, racks)
    assert plan.largest == 4


def test_operators_read_who_is_in_the_way_and_tenants_only_what_is_their_own():
    ways = [domain.in_the_way for domain in room_plan(whole(), 4).domains]
    assert ways == [((f"by tenant {MINE}", 1),), ((f"by tenant {THEIRS}", 2), (f"by tenant {MINE}", 1))]
    mine = [domain.in_the_way for domain in room_plan(seen_by(whole(), MINE), 4).domains]
    assert mine == [(("by you", 1),), (("not available to you", 2), ("by you", 1))]


def test_what_is_cordoned_or_reserved_is_in_the_way_too():
    free = (None,) * 8
    (first, _) = room_plan(whole(free, cordoned=True), 4).domains
    assert (first.free, first.in_the_way) == (0, (("cordoned, sick or not ready", 4),))
    reserved = whole((*free[:7], THEIRS), reserved_for=f"{THEIRS}-id", reservation="r")
    (first, second) = room_plan(reserved, 4).domains
    assert first.in_the_way == ((f"reserved for {THEIRS}", 4),)
    assert second.in_the_way == ((f"reserved for {THEIRS}", 3), (f"by tenant {THEIRS}", 1))
    mine = room_plan(seen_by(reserved, MINE), 4).domains
    assert [domain.in_the_way for domain in mine] == [(("not available to you", 4),)] * 2


@pytest.mark.parametrize("asked", ["0", "-1", "x", "1e3", "99999", "1" * 6, "٣"])
def test_what_is_no_number_of_trays_asks_nothing(asked):
    async def scenario(client, _):
        await sign_in(client)
        return (await client.get("/", params={"trays": asked})).text

    page = visit(scenario)
    assert 'id="make-room"' in page
    assert "trays free," not in page


def test_the_page_says_it_to_each_viewer():
    seen = snapshot(1, 4, ("acme", "blue", "blue", None))

    async def scenario(client, _):
        pages = []
        for who in ({}, {"org": "acme", "token": "acme-token"}):
            await sign_in(client, **who)
            pages.append((await client.get("/?trays=3")).text.partition('id="make-room"')[2])
        return pages

    operators, tenants = visit(scenario, SiteReading(snapshot=seen))
    assert "rack-00: 1 of 4 trays free, 2 missing; taken: 2 by tenant blue, 1 by tenant acme" in operators
    assert "rackloom admin reservation create --tenant ORG " in operators
    assert " --rack rack-00 --count 1</code>" in operators
    assert "rack-00: 1 of 4 trays free, 2 missing; taken: 2 not available to you, 1 by you" in tenants
    assert "blue" not in tenants
    assert "rackloom admin" not in tenants
