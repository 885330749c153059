"""A picture taken apart into shares that have no GPU in common: mostly racks.

No part of the join key that a record of one share names is named in another, so each share can be joined by
itself, and one whose records are as they were need not be joined again.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from rackloom.prove.picture.belongings import Belongings, Ties
from rackloom.prove.picture.identities import parts_of
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.values import DeviceSeen, FabricGpu, MachineSeen, Picture
from rackloom.topology.identity import GpuKey

Name = tuple[str, str]
"""Of a group of records: what they are (domain, chassis or node), and of which."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one picture, and what the next picture is compared with."""

    groups: Kept[Name, tuple[Any, ...], Ties] = msgspec.field(default_factory=dict)
    homes: Mapping[Name, Name] = msgspec.field(default_factory=dict)
    """The share of each group, named by its first group."""
    pictures: Mapping[Name, Picture] = msgspec.field(default_factory=dict)
    """Each share as a picture of its own, which tells nothing of layers, domains and time."""


def shares(picture: Picture, before: Shares) -> Shares:
    """Take a picture apart; `before` are the shares of an earlier one, whatever has changed since."""
    runs = {kind: _runs(kind, picture) for kind in _KINDS}
    groups: dict[Name, tuple[Any, Ties]] = {}
    for kind, told in runs.items():
        groups |= again(before.groups, _gathered(told), _KINDS[kind].ties)
    homes = before.homes if _ties(groups) == _ties(before.groups) else _homes(_ties(groups))
    at_home = {kind: _gathered((homes[name], run) for name, run in told) for kind, told in runs.items()}
    belongings = Belongings(picture)
    pictures = {}
    for home, names in _members(homes).items():
        records: dict[str, Any] = {_KINDS[kind].field: found.get(home, ()) for kind, found in at_home.items()}
        pictures[home] = belongings.of(
            Picture(at=0.0, layers=(), **records),
            [name for kind, name in names if kind == "domain"],
            [name for kind, name in names if kind == "node"],
            [groups[name][1] for name in names],
        )
    return Shares(groups=groups, homes=homes, pictures=pictures)


def _runs(kind: str, picture: Picture) -> list[tuple[Name, list[Any]]]:
    """Neighbours of one group; mostly they are all of it."""
    records = getattr(picture, _KINDS[kind].field)
    return [((kind, name), list(run)) for name, run in groupby(records, key=_KINDS[kind].name)]


def _gathered(runs: Iterable[tuple[Name, list[Any]]]) -> dict[Name, tuple[Any, ...]]:
    """By name, in the order of the picture: where two records contradict each other, the first one counts."""
    found: defaultdict[Name, list[Any]] = defaultdict(list)
    for name, run in runs:
        found[name] += run
    return {name: tuple(records) for name, records in found.items()}


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


def _ties(groups: Kept[Name, tuple[Any, ...], Ties]) -> Mapping[Name, Ties]:
    return {name: ties for name, (_, ties) in groups.items()}


def _homes(ties: Mapping[Name, Ties]) -> dict[Name, Name]:
    """The first group of all that are tied to one another, directly or through others."""
    above: dict[Name, Name] = {name: name for name in ties}
    order = {name: number for number, name in enumerate(ties)}

    def home(name: Name) -> Name:
        while above[name] != name:
            above[name] = name = above[above[name]]
        return name

    first: dict[Hashable, Name] = {}
    for name, tied in ties.items():
        for part in tied.parts:
            ends = home(name), home(first.setdefault(part, name))
            above[max(ends, key=order.__getitem__)] = min(ends, key=order.__getitem__)
    return {name: home(name) for name in ties}


def _members(homes: Mapping[Name, Name]) -> Mapping[Name, list[Name]]:
    found: defaultdict[Name, list[Name]] = defaultdict(list)
    for name, home in homes.items():
        found[home].append(name)
    return found
