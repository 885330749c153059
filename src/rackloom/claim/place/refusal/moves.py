"""Running jobs as things that can move: what one owner holds in one clique goes to another clique whole."""

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Group, Hold, Site


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

    def told(self) -> str:
        """In words, with the cost."""
        return (
            f"move {self.owner} from {listed(self.from_trays)} to {listed(self.to_trays)}"
            f" ({self.gpus} GPUs restart)"
        )


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
    """The unit in a clique where it fits beside what is there, on none of the trays `avoid`."""
    if not all(hold.movable for hold in unit.holds):
        return None
    rest = closed_to(without(site, [unit]), avoid, "to be emptied")
    plan = try_gang(rest, _as_gang(unit), effort)
    if plan is None:
        return None
    like = unit.holds[0]
    holds = tuple(
        msgspec.structs.replace(like, tray=seat.tray, gpus=int(seat.group.partition(" ")[0]))
        for seat in plan.seats
    )
    now = Site(site.trays, (*without(site, [unit]).holds, *holds))
    return now, Move(unit.owner, unit.trays, plan.trays, unit.gpus)


def closed_to(site: Site, trays: Collection[str], why: str) -> Site:
    """The site with nothing new on `trays`."""
    return Site(
        tuple(
            msgspec.structs.replace(tray, shut=tray.shut or why) if tray.name in trays else tray
            for tray in site.trays
        ),
        site.holds,
    )


def listed(names: Collection[str], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _as_gang(unit: Unit) -> Gang:
    """Members that look like the holds: that is all that is known of a running job."""
    sizes = Counter(hold.gpus for hold in unit.holds)
    groups = tuple(
        Group(name=f"{gpus} GPUs", members=members, gpus=gpus) for gpus, members in sorted(sizes.items())
    )
    # Its own name would have the other holds of the job overlooked.
    return Gang(name=f"{unit.owner}, moving", groups=groups)
