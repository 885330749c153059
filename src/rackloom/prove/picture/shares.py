"""A picture taken apart into shares that have no GPU in common: mostly racks.

No part of the join key that a record of one share names is named in another, so each share can be joined by
itself, and one whose records are as they were need not be joined again.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from rackloom.prove.picture.belongings import Belongings, Indexes, Ties
from rackloom.prove.picture.identities import parts_of
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.values import DeviceSeen, FabricGpu, MachineSeen, Picture
from rackloom.topology.identity import GpuKey

Name = tuple[str, str]
"""Of a group of records: what they are (domain, chassis or node), and of which."""


class _Told(msgspec.Struct, frozen=True):
    """The records of one kind, in the order of the picture."""

    kind: str
    records: tuple[Any, ...]


class _Grouped(NamedTuple):
    """The records of one kind, taken apart by the group that each is of."""

    runs: tuple[tuple[Name, tuple[Any, ...]], ...]
    """Neighbours of one group; mostly they are all of it."""
    groups: Kept[Name, tuple[Any, ...], Ties]


class _Stood(NamedTuple):
    """What the records of one kind in each share depend on."""

    grouped: _Grouped
    homes: Mapping[Name, Name]


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one picture, and what the next picture is compared with."""

    kinds: Kept[str, _Told, _Grouped] = msgspec.field(default_factory=dict)
    parts: Mapping[Name, frozenset[Hashable]] = msgspec.field(default_factory=dict)
    """What each group names that others may name too."""
    homes: Mapping[Name, Name] = msgspec.field(default_factory=dict)
    """The share of each group, named by its first group."""
    at_home: Kept[str, _Stood, Mapping[Name, tuple[Any, ...]]] = msgspec.field(default_factory=dict)
    """The records of one kind in each share."""
    indexes: Indexes = msgspec.field(default_factory=dict)
    pictures: Mapping[Name, Picture] = msgspec.field(default_factory=dict)
    """Each share as a picture of its own, which tells nothing of layers, domains and time."""


def shares(picture: Picture, before: Shares) -> Shares:
    """Take a picture apart; `before` are the shares of an earlier one, whatever has changed since."""
    known = before.kinds
    told = {kind: _Told(kind, getattr(picture, one.field)) for kind, one in _KINDS.items()}
    kinds = again(known, told, lambda one: _grouped(one, known[one.kind][1].groups if known else {}))
    ties = _ties(kinds)
    parts = {name: one.parts for name, one in ties.items()}
    homes = before.homes if parts == before.parts else _homes(parts)
    stood = {kind: _Stood(grouped, homes) for kind, (_, grouped) in kinds.items()}
    at_home = again(before.at_home, stood, _in_shares)
    belongings = Belongings(picture, before.indexes)
    pictures = {}
    for home, names in _members(homes).items():
        records: dict[str, Any] = {
            _KINDS[kind].field: found.get(home, ()) for kind, (_, found) in at_home.items()
        }
        pictures[home] = belongings.of(
            Picture(at=0.0, layers=(), **records),
            [name for kind, name in names if kind == "domain"],
            [name for kind, name in names if kind == "node"],
            [ties[name] for name in names],
        )
    return Shares(
        kinds=kinds, parts=parts, homes=homes, at_home=at_home, indexes=belongings.indexes, pictures=pictures
    )


def _grouped(told: _Told, before: Kept[Name, tuple[Any, ...], Ties]) -> _Grouped:
    kind = _KINDS[told.kind]
    neighbours = groupby(told.records, key=kind.name)
    runs = tuple(((told.kind, name), tuple(run)) for name, run in neighbours)
    return _Grouped(runs, again(before, _gathered(runs), kind.ties))


def _in_shares(stood: _Stood) -> dict[Name, tuple[Any, ...]]:
    return _gathered((stood.homes[name], run) for name, run in stood.grouped.runs)


def _gathered(runs: Iterable[tuple[Name, tuple[Any, ...]]]) -> dict[Name, tuple[Any, ...]]:
    """By name, in the order of the picture: where two records contradict each other, the first one counts."""
    found: defaultdict[Name, list[tuple[Any, ...]]] = defaultdict(list)
    for name, run in runs:
        found[name].append(run)
    return {name: some[0] if len(some) == 1 else tuple(chain(*some)) for name, some in found.items()}


def _of_fabric(gpus: tuple[FabricGpu, ...]) -> Ties:
    guids = {("fabric_guid", one.guid) for one in gpus}
    return Ties(frozenset(guids | {("chassis", one.place.chassis_serial) for one in gpus}))


def _of_machines(trays: tuple[MachineSeen, ...]) -> Ties:
    named = {tie for tray in trays for key in tray.gpus for tie in _tied(key)}
    return Ties(frozenset(named | {("chassis", tray.chassis_serial) for tray in trays}))


def _of_devices(devices: tuple[DeviceSeen, ...]) -> Ties:
    named = {tie for one in devices if one.kind == "gpu" for tie in _tied(one.key)}
    return Ties(frozenset(named), frozenset((one.driver, one.pool) for one in devices))


def _tied(key: GpuKey) -> Iterator[tuple[str, object]]:
    for part, value in parts_of(key):
        yield ("chassis", key.place.value.chassis_serial) if part == "place" and key.place else (part, value)


class _Kind(NamedTuple):
    field: str
    """Of the picture."""
    name: Callable[[Any], str]
    """Which group a record is of."""
    ties: Callable[[Any], Ties]


_KINDS = {
    "domain": _Kind("fabric_gpus", attrgetter("domain"), _of_fabric),
    "chassis": _Kind("machines", attrgetter("chassis_serial"), _of_machines),
    "node": _Kind("devices", attrgetter("node"), _of_devices),
}


def _ties(kinds: Kept[str, _Told, _Grouped]) -> Mapping[Name, Ties]:
    return {name: ties for _, grouped in kinds.values() for name, (_, ties) in grouped.groups.items()}


def _homes(parts: Mapping[Name, frozenset[Hashable]]) -> dict[Name, Name]:
    """The first group of all that are tied to one another, directly or through others."""
    above: dict[Name, Name] = {name: name for name in parts}
    order = {name: number for number, name in enumerate(parts)}

    def home(name: Name) -> Name:
        while above[name] != name:
            above[name] = name = above[above[name]]
        return name

    first: dict[Hashable, Name] = {}
    for name, named in parts.items():
        # A site names tens of thousands of parts, and a group shares them with few others.
        for other in set(map(first.setdefault, named, repeat(name))):
            ends = home(name), home(other)
            above[max(ends, key=order.__getitem__)] = min(ends, key=order.__getitem__)
    return {name: home(name) for name in parts}


def _members(homes: Mapping[Name, Name]) -> Mapping[Name, list[Name]]:
    found: defaultdict[Name, list[Name]] = defaultdict(list)
    for name, home in homes.items():
        found[home].append(name)
    return found
