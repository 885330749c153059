"""Small sites and gangs for the tests of the planner."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang, GangGroup, GangPlan, PlacementSite, PlacementTray
from rackloom.errors import Refused

T = TypeVar("T")


def outcome_of(call: Callable[[], T]) -> T | Refused:
    """The result of a call, or its refusal."""
    try:
        return call()
    except Refused as refused:
        return refused


def site(cliques: int, trays: int = 18, *holds: TrayHold, gpus: int = 4) -> PlacementSite:
    """Cliques c0, c1, ... of trays n0-0, n0-1, ..."""
    return PlacementSite(
        tuple(
            PlacementTray(name=f"n{clique}-{tray}", clique=f"c{clique}", gpus=gpus)
            for clique in range(cliques)
            for tray in range(trays)
        ),
        holds,
    )


def workers(members: int, gpus: int = 4, **more: object) -> Gang:
    """A gang of one group."""
    return Gang(name="job", groups=(GangGroup(name="worker", members=members, gpus=gpus),), **more)  # type: ignore[arg-type]


def held(tray: str, owner: str, gpus: int = 4, **more: object) -> TrayHold:
    """GPUs of a tray that are in use."""
    return TrayHold(owner=owner, tray=tray, gpus=gpus, **more)  # type: ignore[arg-type]


@st.composite
def busy_sites(draw: st.DrawFn, cliques: int = 4, trays: int = 6) -> PlacementSite:
    """4 domains of up to 6 trays, partly in use, some trays shut."""
    found, holds = [], []
    for clique in range(draw(st.integers(1, cliques))):
        for number in range(draw(st.integers(1, trays))):
            name = f"n{clique}-{number}"
            shut = "cordoned" if draw(st.integers(0, 9)) == 0 else None
            found.append(PlacementTray(name=name, clique=f"c{clique}", gpus=4, shut=shut))
            used = draw(st.sampled_from((0, 0, 0, 1, 2, 4)))
            if used:
                holds.append(
                    TrayHold(
                        owner=f"job-{draw(st.integers(0, 3))}",
                        tray=name,
                        gpus=used,
                        priority=draw(st.integers(0, 2)),
                        movable=draw(st.booleans()),
                    )
                )
    return PlacementSite(tuple(found), tuple(holds))


@st.composite
def gangs(draw: st.DrawFn) -> Gang:
    """One group, or two that may be apart, with a launcher or without."""
    groups = [
        GangGroup(name="worker", members=draw(st.integers(1, 7)), gpus=draw(st.sampled_from((1, 2, 4))))
    ]
    if draw(st.booleans()):
        share = draw(st.sampled_from(("", "decode")))
        follows = not share and draw(st.booleans())
        members = draw(st.integers(1, 4))
        groups.append(GangGroup(name="decode", members=members, gpus=4, share=share, follows=follows))
    if draw(st.booleans()):
        groups.insert(0, GangGroup(name="launcher", members=1, gpus=0))
    return Gang(
        name="job",
        groups=tuple(groups),
        priority=draw(st.integers(0, 2)),
        segment=draw(st.sampled_from((None, None, 1, 2, 3))),
        spares=draw(st.sampled_from((0, 0, 1))),
        exclusive=draw(st.booleans()),
    )


def faults(site: PlacementSite, gang: Gang, plan: GangPlan) -> list[str]:
    """The faults of a plan, computed from the site alone."""
    trays = {tray.name: tray for tray in site.trays}
    used = Counter[str]()
    for hold in site.holds:
        used[hold.tray] += hold.gpus
    others = dict(used)
    groups = {group.name: group for group in gang.groups}
    found = []
    for seat in plan.seats:
        used[seat.tray] += groups[seat.group].gpus
    for name in plan.trays:
        if trays[name].shut or used[name] > trays[name].gpus:
            found.append(f"{name} is shut or overfull")
        if gang.exclusive and others.get(name):
            found.append(f"{name} is not empty")
    expected = [(group.name, member) for group in gang.groups for member in range(group.members)]
    if [(seat.group, seat.member) for seat in plan.seats] != expected:
        found.append("seats are missing, or out of order")
    return found + _apart(site, gang, plan) + _unspared(site, gang, plan)


def _apart(site: PlacementSite, gang: Gang, plan: GangPlan) -> list[str]:
    clique = {tray.name: tray.clique for tray in site.trays}
    together: dict[object, set[str | None]] = {}
    first: dict[str, tuple[str, int]] = {}
    """For each group, the first group of its ranks, and the rank of its first member there."""
    run, rank = "", 0
    for group in gang.groups:
        if group.is_helper:
            continue
        if not group.follows or not run:
            run, rank = group.name, 0
        first[group.name] = run, rank
        rank += group.members
    for seat in plan.seats:
        group = next(group for group in gang.groups if group.name == seat.group)
        if not group.is_helper:
            run, rank = first[group.name]
            block = (run, (rank + seat.member) // gang.segment) if gang.segment else group.share
            together.setdefault(block, set()).add(clique[seat.tray])
    return [f"{block} is spread" for block, cliques in together.items() if len(cliques) > 1]


def _unspared(site: PlacementSite, gang: Gang, plan: GangPlan) -> list[str]:
    clique = {tray.name: tray.clique for tray in site.trays}
    kept = Counter(clique[name] for name in plan.spares)
    wrong = [f"{clique} keeps {kept[clique]} spares" for clique in plan.cliques if kept[clique] < gang.spares]
    return wrong + [f"{name} is no spare" for name in plan.spares if name in plan.trays]
