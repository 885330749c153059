"""Running jobs as things that can move: what one owner holds in one clique goes to another clique whole."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Group, Hold, Hole, Site, Terms

_APART = "each on a tray of its own"


class Unit(msgspec.Struct, frozen=True):
    """The part of a job that shares memory."""

    owner: str
    holds: tuple[Hold, ...]

    @property
    def gpus(self) -> int:
        """The cost of moving it: GPUs whose members restart."""
        return sum(hold.gpus for hold in self.holds)

    @property
    def trays(self) -> tuple[str, ...]:
        """Where it is."""
        return tuple(dict.fromkeys(hold.tray for hold in self.holds))


class Move(msgspec.Struct, frozen=True):
    """A unit from its trays to others."""

    owner: str
    from_trays: tuple[str, ...]
    to_trays: tuple[str, ...]
    gpus: int
    holes: tuple[Hole, ...] = ()
    """What it opens of each size, and what it closes."""

    def told(self) -> str:
        """In words, with the cost."""
        return (
            f"move {self.owner} from {listed(self.from_trays)} to {listed(self.to_trays)}"
            f" ({self.gpus} GPUs restart)"
        )

    def gain(self) -> str:
        """In words, the holes before and after it; empty where there are as many."""
        return ", ".join(f"holes of {one.trays} trays {one.before} -> {one.after}" for one in self.holes)


def units_of(site: Site) -> list[Unit]:
    """What is in use, cheapest to move first."""
    clique = {tray.name: tray.sharing for tray in site.trays}
    found: dict[tuple[str, str], list[Hold]] = {}
    for hold in site.holds:
        if hold.tray in clique:
            found.setdefault((hold.owner, clique[hold.tray]), []).append(hold)
    units = [Unit(owner, tuple(holds)) for (owner, _), holds in found.items()]
    return sorted(units, key=lambda unit: (unit.gpus, unit.owner))


def without(site: Site, units: Iterable[Unit]) -> Site:
    """The site when what the units hold is free."""
    gone = {hold for unit in units for hold in unit.holds}
    return Site(site.trays, tuple(hold for hold in site.holds if hold not in gone))


def moved(site: Site, unit: Unit, avoid: Collection[str], effort: Effort) -> tuple[Site, Move] | None:
    """The unit in a clique where it fits beside what is there, on no tray to `avoid` or it is kept off."""
    if not all(hold.movable for hold in unit.holds):
        return None
    emptied = without(site, [unit])
    barred = frozenset(avoid).union(*(hold.kept_off for hold in unit.holds), _beside_foes(emptied, unit))
    rest = closed_to(emptied, barred, "to be emptied, or not to be used by it")
    gang = _as_gang(unit)
    plan = try_gang(rest, gang, effort)
    if plan is None:
        return None
    like, groups = unit.holds[0], {group.name: group for group in gang.groups}
    holds = tuple(
        replace(like, tray=seat.tray, gpus=group.gpus, channel=group.has_channel)
        for seat in plan.seats
        for group in [groups[seat.group]]
    )
    now = Site(site.trays, (*emptied.holds, *holds))
    return now, Move(unit.owner, unit.trays, plan.trays, unit.gpus)


def _beside_foes(site: Site, unit: Unit) -> Iterator[str]:
    """Trays where those are by now that it is never beside."""
    foes = frozenset[str]().union(*(hold.apart for hold in unit.holds))
    return (hold.tray for hold in site.holds if hold.owner in foes)


def closed_to(site: Site, trays: Collection[str], why: str) -> Site:
    """The site with nothing new on `trays`."""
    return Site(
        tuple(replace(tray, shut=tray.shut or why) if tray.name in trays else tray for tray in site.trays),
        site.holds,
    )


def _members(unit: Unit) -> Iterator[tuple[int, bool]]:
    """GPUs of each hold, and whether it has a channel: all on a tray that has one go where one is."""
    linked = {hold.tray for hold in unit.holds if hold.channel}
    yield from ((hold.gpus, False) for hold in unit.holds if hold.tray not in linked)
    for tray in linked:
        yield sum(hold.gpus for hold in unit.holds if hold.tray == tray), True


def listed(names: Collection[str], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _as_gang(unit: Unit) -> Gang:
    """Members that look like the holds: that is all that is known of a running job."""
    is_apart = any(hold.owner in hold.apart for hold in unit.holds)
    groups = tuple(
        Group(
            name=f"{gpus} GPUs{' and a channel' * linked}",
            members=members,
            gpus=gpus,
            terms=_terms(linked, is_apart),
        )
        for (gpus, linked), members in sorted(Counter(_members(unit)).items())
    )
    # Its own name would have the other holds of the job overlooked.
    return Gang(name=f"{unit.owner}, moving", groups=groups)


def _terms(linked: bool, is_apart: bool) -> Terms | None:
    if is_apart:
        return Terms(channel=linked, likeness=_APART, apart=(_APART,))
    return Terms(channel=True) if linked else None
