"""A site that the planner keeps between plans: the answers for each clique are computed once.

A `SiteView` is an immutable value, made from a `PlacementSite` once. `changed` gives the view after some
trays were replaced, and some holds ended or began. Its cost depends on the changes alone: all other cliques
are shared with the view before it. A view that was changed equals a new one: equal content gives equal plans.
Choosers that only count trays make a view of cliques without names (`counted`).

Three levels of sharing make a plan on a kept view cost little more than the cliques that it uses:

1. `CliqueTrays`: the trays of one clique and the holds on them.
2. `CliqueState`: these trays as a gang meets them: what each has left, by position.
3. `CliqueShape`: the same without names and positions. Cliques with equal trays share a shape, so bounds and
   fits are computed once for all of them. 5,555 racks that are half in use have 19 shapes.

`SiteCapacity` is a view as one gang meets it. Holds of the gang itself do not count. A closed tray has no
slots, and an exclusive gang sees only empty trays. All searches for a gang share it.

`CliqueStates` indexes the cliques of a view by shape, and counts its free regions. A view has two indexes,
made on first use: for gangs that share trays, and for gangs that take empty trays only. The cache of a shape
is bounded and changes no answer. A view is for one thread at a time.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import (
    REGION_SIZES,
    ClaimCapacity,
    Gang,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
)
from rackloom.core.place.search.gang_needs import (
    KEPT,
    CliqueBounds,
    MemberNeed,
    TrayState,
    TrayVacancy,
    clique_bounds,
)

T = TypeVar("T")

_MORE_THAN_ANY = 1 << 20
"""More GPUs than a tray has."""
_CACHED_STATES = 4096
"""Trays with a cached state: those of a site are mostly alike."""
_CLOSED = -1
"""Free GPUs of a tray that takes nothing, not even a member without GPUs."""
MAX_REMEMBERED = 64
"""Answers of each sort that a clique or a shape remembers. With more, it forgets all of them."""


def remembered(answers: dict[Hashable, T], key: Hashable, compute: Callable[[], T]) -> T:
    """The answer for a key, computed once while it is remembered."""
    if key in answers:
        return answers[key]
    if len(answers) >= MAX_REMEMBERED:
        answers.clear()
    answers[key] = answer = compute()
    return answer


# One clique, the same for all gangs.


class CliqueTrays:
    """The trays of one clique in filling order, and the holds on them."""

    __slots__ = ("__dict__", "holds", "trays")

    def __init__(self, trays: tuple[PlacementTray, ...], holds: tuple[TrayHold, ...]) -> None:
        self.trays = trays
        self.holds = holds

    @cached_property
    def gpus(self) -> int:
        """GPUs of all trays, in use or not."""
        return sum([tray.gpus for tray in self.trays])

    @cached_property
    def free_gpus(self) -> int:
        """GPUs of open trays, less all that are held."""
        open_gpus = sum([tray.gpus for tray in self.trays if tray.shut is None])
        return open_gpus - sum([hold.gpus for hold in self.holds])

    def states(self, owner: str, exclusive: bool) -> tuple[TrayState, ...]:
        """The state of each tray for a gang called `owner`. Its own holds do not count."""
        left = {tray.name: tray.gpus for tray in self.trays}
        with_channel = set()
        for hold in self.holds:
            if hold.owner != owner:
                # A negative number closes the tray to members without GPUs too.
                left[hold.tray] -= _MORE_THAN_ANY if hold.is_whole else hold.gpus
                if hold.channel:
                    with_channel.add(hold.tray)
        return tuple(
            [
                _tray_state(
                    tray.gpus,
                    left[tray.name],
                    tray.shut is None,
                    tray.name not in with_channel if tray.gpus or tray.clique else None,
                    exclusive,
                    frozenset(tray.closed) if tray.closed else _NOTHING,
                    frozenset(tray.rooms.items()) if tray.rooms else _NOTHING,
                )
                for tray in self.trays
            ]
        )


_NOTHING: frozenset[Any] = frozenset()


@lru_cache(_CACHED_STATES)
def _tray_state(
    gpus: int,
    left: int,
    is_open: bool,
    channel: bool | None,
    exclusive: bool,
    closed: frozenset[str],
    rooms: frozenset[tuple[str, ClaimCapacity]],
) -> TrayState:
    """`left`: GPUs without a hold. `channel`: whether the IMEX channel is free, or None if there is none."""
    untouched = left == gpus and channel is not False
    # An exclusive gang takes trays whole, so one that is in use in part is closed to it.
    free = left if left >= 0 and is_open and (untouched or not exclusive) else _CLOSED
    return TrayState(free, 0 < gpus == free and untouched, untouched, bool(channel), closed, rooms)


# One clique as a gang meets it.


class CliquePreference(NamedTuple):
    """Preference of one request among cliques with equal trays. Less is better."""

    first: tuple[int, ...] = ()
    """It counts before all else."""
    then: tuple[int, ...] = ()
    """It counts before the free regions."""


NO_PREFERENCE = CliquePreference()


class CliqueShape:
    """Common data of all cliques with equal trays."""

    def __init__(
        self, trays: frozenset[tuple[TrayState, int]], preference: "CliquePreference | None" = None
    ) -> None:
        """`trays`: each state with the number of trays that have it."""
        self.key = (trays, preference) if preference else trays
        self.preference = preference or NO_PREFERENCE
        self._states = trays
        self.trays = sum([count for _, count in trays])
        self.empty = sum([count for state, count in trays if state.is_empty])
        """Empty trays."""
        self.fits: dict[Hashable, Any] = {}
        """Of colocation groups (`clique_search`)."""
        self._bounds: dict[Hashable, CliqueBounds] = {}
        self._vacancies: dict[Hashable, tuple[tuple[TrayVacancy, int], ...]] = {}

    def bounds(self, need: MemberNeed) -> CliqueBounds:
        """The bounds of each such clique for members of one need."""
        return remembered(
            self._bounds,
            need,
            lambda: clique_bounds(
                (need.slots(state), state.is_empty, count) for state, count in self._states
            ),
        )

    def vacancies(self, needs: tuple[MemberNeed, ...]) -> tuple[tuple[TrayVacancy, int], ...]:
        """The vacancies of the trays, sorted, each with the number of trays."""

        def counted() -> tuple[tuple[TrayVacancy, int], ...]:
            found = Counter[TrayVacancy]()
            for state, count in self._states:
                found[TrayVacancy.of(state, needs)] += count
            return tuple(sorted(found.items()))

        return remembered(self._vacancies, needs, counted)


class CliqueState:
    """One clique as a gang meets it: its trays by position, and its shape."""

    __slots__ = ("_slots", "_vacancies", "shape", "states", "trays")

    def __init__(
        self, trays: tuple[PlacementTray, ...], states: tuple[TrayState, ...], shape: CliqueShape
    ) -> None:
        self.trays = trays
        self.states = states
        self.shape = shape
        self._slots: dict[Hashable, tuple[int, ...]] = {}
        self._vacancies: dict[Hashable, tuple[TrayVacancy, ...]] = {}

    def slots(self, need: MemberNeed) -> tuple[int, ...]:
        """Members that each tray can serve."""
        return remembered(self._slots, need, lambda: tuple([need.slots(state) for state in self.states]))

    def vacancies(self, needs: tuple[MemberNeed, ...]) -> tuple[TrayVacancy, ...]:
        """The vacancy of each tray."""
        return remembered(
            self._vacancies, needs, lambda: tuple([TrayVacancy.of(state, needs) for state in self.states])
        )


CACHED_CLIQUES = 4096
"""Cliques of whole trays that are remembered, with their bounds and fits: most are alike."""
_FREE_TRAY = TrayState(1, True, True, False, frozenset([KEPT]), frozenset())
_KEPT_TRAY = TrayState(1, False, True, False, frozenset(), frozenset())


@lru_cache(CACHED_CLIQUES)
def whole_trays(free: int, kept: int = 0, preference: CliquePreference = NO_PREFERENCE) -> CliqueState:
    """A clique of which only whole trays count, without names: instances, and the map's advice.

    The kept trays come first. Other tenants may not have them, so they belong to no free region.
    """
    states = (_KEPT_TRAY,) * kept + (_FREE_TRAY,) * free
    return CliqueState((), states, CliqueShape(shape_key(states), preference))


def shape_key(states: Sequence[TrayState]) -> frozenset[tuple[TrayState, int]]:
    """Each state with the number of trays that have it."""
    counts: dict[TrayState, int] = {}
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return frozenset(counts.items())


# All cliques as a gang meets them.


class ShapeMembers(NamedTuple):
    """The cliques of one shape."""

    shape: CliqueShape
    orders: Sequence[int]
    """Their positions among the cliques of the site, ascending. Never empty."""


class CliqueStates:
    """The cliques of a view, by name and by shape."""

    def __init__(
        self,
        cliques: Mapping[str, CliqueState],
        shapes: Mapping[Hashable, ShapeMembers],
        regions: tuple[int, ...],
    ) -> None:
        self.cliques = cliques
        """In the order of their first trays."""
        self.shapes = shapes
        """By key of the shape."""
        self.regions = regions
        """Free regions of each of REGION_SIZES."""

    @classmethod
    def of(cls, cliques: Mapping[str, CliqueTrays], exclusive: bool) -> "CliqueStates":
        """All cliques, computed from scratch, with the holds of all owners."""
        found: dict[str, CliqueState] = {}
        shapes: dict[Hashable, CliqueShape] = {}
        for name, inside in cliques.items():
            states = inside.states("", exclusive)
            key = shape_key(states)
            # One shape object for all equal cliques, so that its cache serves all of them.
            if (shape := shapes.get(key)) is None:
                shape = shapes[key] = CliqueShape(key)
            found[name] = CliqueState(inside.trays, states, shape)
        return cls.indexed(found)

    @classmethod
    def indexed(cls, cliques: Mapping[str, CliqueState]) -> "CliqueStates":
        """Cliques that are computed already."""
        shapes: dict[Hashable, ShapeMembers] = {}
        for order, clique in enumerate(cliques.values()):
            alike = shapes.setdefault(clique.shape.key, ShapeMembers(clique.shape, []))
            alike.orders.append(order)  # type: ignore[attr-defined]
        regions = tuple(
            sum([alike.shape.empty // size * len(alike.orders) for alike in shapes.values()])
            for size in REGION_SIZES
        )
        return cls(cliques, shapes, regions)

    def changed(
        self, cliques: Mapping[str, CliqueTrays], order: Mapping[str, int], owner: str, exclusive: bool
    ) -> "CliqueStates":
        """With some cliques as they are now. Their positions do not change."""
        found, shapes, regions = dict(self.cliques), dict(self.shapes), list(self.regions)
        for name, inside in cliques.items():
            states = inside.states(owner, exclusive)
            before, key = found[name].shape, shape_key(states)
            # A shape that other cliques have already brings its bounds and fits along.
            alike = shapes.get(key)
            shape = CliqueShape(key) if alike is None else alike.shape
            found[name] = CliqueState(inside.trays, states, shape)
            if key == before.key:
                continue
            # The clique moves from one shape to another. Other views share these lists, so they are copied.
            at = order[name]
            left = [other for other in shapes[before.key].orders if other != at]
            if left:
                shapes[before.key] = ShapeMembers(before, left)
            else:
                del shapes[before.key]
            orders = [] if alike is None else list(alike.orders)
            insort(orders, at)
            shapes[key] = ShapeMembers(shape, orders)
            for number, size in enumerate(REGION_SIZES):
                regions[number] += shape.empty // size - before.empty // size
        return CliqueStates(found, shapes, tuple(regions))


# The view.


_MAX_CHANGED = 8
"""The owners are indexed again when more than one in this number of cliques has changed."""


class _Layout:
    """The trays and cliques of a site. Views that were derived from each other share it."""

    def __init__(self, site: PlacementSite, cliques: Iterable[str]) -> None:
        self.site = site
        self.names: Sequence[str] = list(cliques)
        """The cliques by position."""

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The position of each clique."""
        return {name: at for at, name in enumerate(self.names)}

    @cached_property
    def clique_of(self) -> Mapping[str, str]:
        """The clique of each tray."""
        return {tray.name: tray.sharing for tray in self.site.trays}


class _OwnerIndex:
    """The cliques in which each owner holds something, in one view."""

    def __init__(self, cliques: Mapping[str, CliqueTrays]) -> None:
        self._cliques = cliques

    @cached_property
    def cliques_of(self) -> Mapping[str, Collection[str]]:
        """By owner."""
        found: dict[str, dict[str, None]] = {}
        for name, inside in self._cliques.items():
            for hold in inside.holds:
                found.setdefault(hold.owner, {})[name] = None
        return found


class SiteView:
    """A site that was prepared for plans."""

    def __init__(
        self,
        cliques: Mapping[str, CliqueTrays],
        layout: _Layout,
        owners: _OwnerIndex,
        since_indexed: frozenset[str] = frozenset(),
    ) -> None:
        """Use `of`. `since_indexed`: cliques that changed since the owners were indexed."""
        self.cliques = cliques
        """In the order of their first trays."""
        self._layout = layout
        self._owners = owners
        self._since_indexed = since_indexed
        self._states: dict[bool, CliqueStates] = {}

    @classmethod
    def of(cls, site: "PlacementSite | SiteView") -> "SiteView":
        """The view of a site. A view is returned as it is."""
        if isinstance(site, SiteView):
            return site
        # A tray without a clique is its own clique. The first tray of each gives the order.
        trays: dict[str, list[PlacementTray]] = {}
        clique_of = {}
        for tray in site.trays:
            clique = clique_of[tray.name] = tray.clique or tray.name
            trays.setdefault(clique, []).append(tray)
        # Holds on trays that the site does not have come under None, and into no clique.
        holds: dict[str | None, list[TrayHold]] = {}
        for hold in site.holds:
            holds.setdefault(clique_of.get(hold.tray), []).append(hold)
        cliques = {
            name: CliqueTrays(tuple(inside), tuple(holds.get(name, ()))) for name, inside in trays.items()
        }
        view = cls(cliques, _Layout(site, cliques), _OwnerIndex(cliques))
        view.__dict__["site"] = site
        return view

    @classmethod
    def counted(cls, cliques: Mapping[str, CliqueState]) -> "SiteView":
        """A view of cliques of trays without names. It serves searches, and cannot be changed."""
        view = cls({}, _Layout(PlacementSite(()), cliques), _OwnerIndex({}))
        view._states[False] = CliqueStates.indexed(cliques)
        return view

    @cached_property
    def site(self) -> PlacementSite:
        """The site as a value: trays in filling order. Holds on unknown trays are left out after a change."""
        trays = {name: iter(inside.trays) for name, inside in self.cliques.items()}
        return PlacementSite(
            tuple([next(trays[tray.sharing]) for tray in self._layout.site.trays]),
            tuple([hold for inside in self.cliques.values() for hold in inside.holds]),
        )

    def clique_named(self, order: int) -> str:
        """The clique at a position."""
        return self._layout.names[order]

    def order(self, clique: str) -> int:
        """The position of a clique."""
        return self._layout.order[clique]

    def clique_of(self, tray: str) -> str | None:
        """The clique of a tray, or None if the site has no such tray."""
        return self._layout.clique_of.get(tray)

    def trays_named(self, names: Iterable[str]) -> Iterator[PlacementTray]:
        """The trays with these names that the site has."""
        # Grouped by clique, because a clique has its trays by position, not by name.
        wanted: dict[str, set[str]] = {}
        for name in names:
            clique = self.clique_of(name)
            if clique is not None:
                wanted.setdefault(clique, set()).add(name)
        for clique, here in wanted.items():
            yield from (tray for tray in self.cliques[clique].trays if tray.name in here)

    def cliques_of(self, owner: str) -> list[str]:
        """The cliques in which an owner holds something."""
        # The index may be older than this view, so add the cliques that changed since, and verify all.
        indexed = self._owners.cliques_of.get(owner, ())
        return [
            name
            for name in dict.fromkeys((*indexed, *self._since_indexed))
            if any(hold.owner == owner for hold in self.cliques[name].holds)
        ]

    def states(self, owner: str = "", exclusive: bool = False) -> CliqueStates:
        """The cliques as a gang called `owner` meets them: its own holds do not count.

        `exclusive`: trays that others use in part count as full.
        """
        if exclusive not in self._states:
            self._states[exclusive] = CliqueStates.of(self.cliques, exclusive)
        # Most gangs hold nothing yet and share one index. Only the cliques that a gang is in differ for it.
        own = self.cliques_of(owner) if owner else ()
        shared = self._states[exclusive]
        if not own:
            return shared
        return shared.changed(
            {name: self.cliques[name] for name in own}, self._layout.order, owner, exclusive
        )

    def changed(
        self,
        *,
        trays: Iterable[PlacementTray] = (),
        freed: Iterable[TrayHold] = (),
        taken: Iterable[TrayHold] = (),
    ) -> "SiteView":
        """The view with some trays replaced by others of their names and cliques, and other holds.

        Holds equal to one of `freed` end, then `taken` begin. Holds on trays that the site does not have are
        left out. Raises ValueError for a tray that is new or in another clique.
        """
        new: dict[str, dict[str, PlacementTray]] = {}
        for tray in trays:
            if self.clique_of(tray.name) != tray.sharing:
                raise ValueError(f"tray {tray.name} was not in clique {tray.sharing}")
            new.setdefault(tray.sharing, {})[tray.name] = tray
        ended, begun = self._holds_by_clique(freed), self._holds_by_clique(taken)
        # Only the cliques that something touches are made again. The view shares all others with this one.
        now = {}
        for name in dict.fromkeys((*new, *ended, *begun)):
            before, replaced, gone = self.cliques[name], new.get(name), ended.get(name, ())
            trays_now, holds = before.trays, before.holds
            if replaced:
                trays_now = tuple([replaced.get(tray.name, tray) for tray in trays_now])
            if gone:
                holds = tuple([hold for hold in holds if hold not in gone])
            now[name] = CliqueTrays(trays_now, (*holds, *begun.get(name, ())))
        cliques = {**self.cliques, **now}
        # The owners are indexed again if looking at each of the changed cliques costs more.
        owners, since = self._owners, self._since_indexed.union(now)
        if len(since) * _MAX_CHANGED > len(cliques):
            owners, since = _OwnerIndex(cliques), frozenset()
        view = SiteView(cliques, self._layout, owners, since)
        view._states = {
            exclusive: states.changed(now, self._layout.order, "", exclusive)
            for exclusive, states in self._states.items()
        }
        return view

    def _holds_by_clique(self, holds: Iterable[TrayHold]) -> dict[str, list[TrayHold]]:
        found: dict[str, list[TrayHold]] = {}
        for hold in holds:
            clique = self.clique_of(hold.tray)
            if clique is not None:
                found.setdefault(clique, []).append(hold)
        return found

    def only(self, clique: str) -> "SiteView":
        """The view of one of its cliques."""
        inside = self.cliques[clique]
        cliques = {clique: inside}
        layout = _Layout(PlacementSite(inside.trays, inside.holds), cliques)
        return SiteView(cliques, layout, _OwnerIndex(cliques))


# The site as one gang meets it.


class TrayPosition(NamedTuple):
    """A tray of a site."""

    clique: str
    number: int
    """Among the trays of its clique."""


class SiteCapacity:
    """Cliques and their trays, for one gang."""

    def __init__(self, site: PlacementSite | SiteView, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that others use in part count as full."""
        self.view = SiteView.of(site)
        self.states: CliqueStates = self.view.states(owner, exclusive)
        self.cliques: Mapping[str, CliqueState] = self.states.cliques
        """In the order of their first trays."""

    def shape(self, clique: str) -> CliqueShape:
        """The shape of the clique, which equal cliques share."""
        return self.cliques[clique].shape

    def tray(self, at: TrayPosition) -> PlacementTray:
        """The tray."""
        return self.cliques[at.clique].trays[at.number]

    def state(self, at: TrayPosition) -> TrayState:
        """The state of the tray."""
        return self.cliques[at.clique].states[at.number]

    def why_barred(self, at: TrayPosition, terms: PlacementTerms) -> str | None:
        """Why a member with these terms may not go on a tray, or None if the terms allow it."""
        tray, state = self.tray(at), self.state(at)
        if not state.bars(terms):
            return None
        # A tray that is closed to all members, or to these, has its own reason. Only the channel is left.
        if state.free < 0 or terms.where in tray.closed:
            return tray.shut or tray.closed.get(terms.where, "in use")
        return "its IMEX channel is in use" if tray.gpus or tray.clique else "it has no IMEX channel"


def capacity_for(site: PlacementSite | SiteView | SiteCapacity, gang: Gang) -> SiteCapacity:
    """The site as the gang meets it. A capacity is returned as it is."""
    if isinstance(site, SiteCapacity):
        return site
    return SiteCapacity(site, owner=gang.name, exclusive=gang.exclusive)
