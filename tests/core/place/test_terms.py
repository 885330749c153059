"""The terms of members for their tray and for each other are kept exactly, and nothing more is refused."""

from random import Random

import pytest
from msgspec.structs import replace
from tests.core.place.place_brute import best_ways, can_carry

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import (
    ClaimCapacity,
    Gang,
    GangGroup,
    GangPlan,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
)
from rackloom.core.place.gang_fixes import find_fixes, plan_gang
from rackloom.core.place.gang_planner import try_gang, with_plan_reserved
from rackloom.core.place.search.site_view import capacity_for
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

CASES = 100


@pytest.mark.parametrize("seed", range(12))
def test_a_gang_with_terms_is_planned_as_well_as_brute_force_can(seed: int) -> None:
    chance = Random(seed)
    for number in range(CASES):
        where, gang = random_site(chance), random_gang(chance)
        best, plan = best_ways(where, gang), try_gang(where, gang, SearchBudget())
        label = f"case {number} of seed {seed}"
        assert (plan is None) == (best is None), label
        if plan is not None and best is not None:
            assert unable(where, gang, plan) == [], label
            assert len(plan.cliques) == best[0], label


def test_members_that_keep_apart_have_a_tray_each() -> None:
    alone = PlacementTerms(likeness="w", apart=("w",))
    plan = plan_gang(trays(4), Gang(name="g", groups=(GangGroup(name="w", members=4, gpus=1, terms=alone),)))
    assert plan.trays == ("n0", "n1", "n2", "n3")
    with pytest.raises(Refused, match="room for 4 of 5 w"):
        plan_gang(trays(4), Gang(name="g", groups=(GangGroup(name="w", members=5, gpus=1, terms=alone),)))


def test_a_tray_where_the_channel_is_in_use_is_told_by_that_and_is_free_when_its_job_ends() -> None:
    gang = Gang(
        name="g", groups=(GangGroup(name="w", members=2, gpus=2, terms=PlacementTerms(channel=True)),)
    )
    busy = PlacementSite(trays(2).trays, (TrayHold(owner="old", tray="n0", gpus=2, channel=True),))
    with pytest.raises(Refused, match=r"room for 1 of 2 w: n0 \(its IMEX channel is in use by old\)"):
        plan_gang(busy, gang)
    found = find_fixes(capacity_for(busy, gang), gang, SearchBudget())
    assert [fix.text for fix in found] == ["ask for 1 w instead of 2", "wait until old ends (2 GPUs)"]


def test_a_placed_gang_keeps_the_channels_of_its_trays() -> None:
    gang = Gang(
        name="g", groups=(GangGroup(name="w", members=1, gpus=0, terms=PlacementTerms(channel=True)),)
    )
    site = trays(2)
    for tray in ("n0", "n1"):
        plan = plan_gang(site, gang)
        assert plan.trays == (tray,)
        site = with_plan_reserved(site, replace(gang, name=f"g-{tray}"), plan)
    with pytest.raises(Refused, match="its IMEX channel is in use by g-n0"):
        plan_gang(site, gang)
    counted = Gang(name="c", groups=(GangGroup(name="w", members=2, gpus=4),))
    assert plan_gang(site, counted).trays == ("n0", "n1")


def test_a_movable_job_takes_a_channel_where_it_goes() -> None:
    cliques = tuple(PlacementTray(name=f"n{at}", clique=f"c{at}", gpus=4) for at in range(3))
    old = TrayHold(owner="old", tray="n0", gpus=2, channel=True, movable=True)
    linked = TrayHold(owner="other", tray="n1", gpus=0, channel=True)
    pair = Gang(name="g", groups=(GangGroup(name="w", members=1, gpus=4),))
    full = TrayHold(owner="full", tray="n1", gpus=1)
    with pytest.raises(Refused) as no:
        plan_gang(PlacementSite(cliques[:2], (old, linked, full)), pair)
    assert "move" not in (no.value.nearest_fix or "")
    third = TrayHold(owner="third", tray="n2", gpus=1)
    with pytest.raises(Refused) as no:
        plan_gang(PlacementSite(cliques, (old, linked, full, third)), pair)
    assert no.value.nearest_fix == "move old from n0 to n2 (2 GPUs restart)"


def trays(count: int) -> PlacementSite:
    return PlacementSite(tuple(PlacementTray(name=f"n{at}", clique="c", gpus=4) for at in range(count)))


def random_site(chance: Random) -> PlacementSite:
    """Up to 2 cliques of up to 4 trays, some closed to members with the terms "a" or "b", some linked."""
    found, holds = [], []
    for clique in range(chance.randint(1, 2)):
        for number in range(chance.randint(1, 4)):
            name = f"n{clique}-{number}"
            closed = {where: "no" for where in "ab" if chance.random() < 0.3}
            rooms = {"nic": ClaimCapacity(chance.randint(0, 2), 2)}
            found.append(PlacementTray(name=name, clique=f"c{clique}", gpus=4, closed=closed, rooms=rooms))
            used, linked = chance.choice((0, 0, 0, 1, 2, 4)), chance.random() < 0.2
            holds += [TrayHold(owner="other", tray=name, gpus=used, channel=linked)] if used or linked else []
    return PlacementSite(tuple(found), tuple(holds))


def random_gang(chance: Random) -> Gang:
    """Up to 3 groups. If one group keeps apart from another, the other does so too."""
    count = chance.randint(1, 3)
    foes = {(a, b) for b in range(count) for a in range(b + 1) if chance.random() < 0.3}
    groups = tuple(random_group(chance, number, foes) for number in range(count))
    return Gang(name="job", groups=groups, spares=chance.choice((0, 0, 0, 1)))


def random_group(chance: Random, number: int, foes: set[tuple[int, int]]) -> GangGroup:
    apart = tuple(sorted({str(a + b - number) for a, b in foes if number in (a, b)}))
    terms = PlacementTerms(
        where=chance.choice(("", "", "a", "b")),
        channel=chance.random() < 0.3,
        likeness=str(number),
        apart=apart,
    )
    devices = chance.choice((None, None, "nic"))
    least = 0 if terms.channel or devices else 1
    return GangGroup(
        name=f"g{number}",
        members=chance.randint(1, 3),
        gpus=chance.choice([gpus for gpus in (0, 1, 2, 4) if gpus >= least]),
        devices=devices,
        terms=terms,
    )


def unable(site: PlacementSite, gang: Gang, plan: GangPlan) -> list[str]:
    """Trays with a load that they cannot carry."""
    loads = {
        tray: [
            (group, sum((seat.group, seat.tray) == (group.name, tray) for seat in plan.seats))
            for group in gang.groups
        ]
        for tray in plan.trays
    }
    by_name = {tray.name: tray for tray in site.trays}
    return [tray for tray, load in loads.items() if not can_carry(site, gang, by_name[tray], load)]
