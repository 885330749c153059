"""Incremental join: split a snapshot into independent shares and join only those that changed.

`recompute_changed` is the memo behind every step: a value is recomputed only if its input differs from the
previous one. Its function sees nothing but that input, so the outcome always equals a full computation.
Unchanged inputs are mostly the same objects, and comparing these costs next to nothing.

`split_snapshot` takes these steps:

1. Group the records: fabric GPUs by domain, machines by chassis, devices by node.
2. List for each group the parts of the join key that it names. A slot stands for its whole chassis, so
   the trays of a chassis stay together.
3. Unite groups that name a common part: union-find with path halving gives the connected components. A
   component is a share, named by its first group. Mostly it is a rack.
4. `ShareContents` adds the records that belong to the GPUs of the share: partitions, logical partitions,
   interfaces, nodes, allocated devices with all other devices of the same pods, claims, ComputeDomains,
   transfers.

No part of the key crosses shares, so `join_shares` can join each alone: the chains of all shares, sorted,
equal `gpu_chains` of the whole snapshot, regardless of the previous state.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from itertools import chain, count, groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from rackloom.core.diagnosis.join import chain_order, gpu_chains
from rackloom.core.diagnosis.snapshot import (
    DeviceRecord,
    DeviceUse,
    FabricGpuRecord,
    GpuChain,
    MachineRecord,
    MeasuredTransfer,
    SiteSnapshot,
    grouped,
)
from rackloom.topology.join_key import GpuKey

# Memo: recompute only values that depend on changed input.


K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
V = TypeVar("V")

Memo = Mapping[K, tuple[I, V]]
"""By name: the input, and the value made of it."""


def recompute_changed(
    before: Memo[K, I, V], inputs: Mapping[K, I], make: Callable[[I], V]
) -> dict[K, tuple[I, V]]:
    """`make(input)` under every name, or the previous value itself if the input equals the previous one.

    `make` depends on nothing but its input, so the outcome equals that of making everything again. Inputs are
    mostly the same objects as before. Comparing these is a comparison of addresses and costs next to nothing.
    """
    found = {}
    for name, value in inputs.items():
        known = before.get(name)
        if known is not None and (known[0] is value or known[0] == value):
            found[name] = known
        else:
            found[name] = value, make(value)
    return found


# Which other records of the snapshot belong to the GPUs of a share.


Pool = tuple[str, str]
"""Driver and name."""


class JoinTies(msgspec.Struct, frozen=True):
    """Names by which the records of a group may be tied to records of other groups."""

    parts: frozenset[Hashable]
    """Parts of the join key: GUIDs as numbers, UUIDs as text, and a `_chassis_tie` for each slot."""
    pools: frozenset[Pool] = frozenset()
    """The pools of the group's devices."""


class _FieldRecords(NamedTuple):
    """The records in one field of a snapshot."""

    field: str
    records: tuple[Any, ...]


ContentIndexes = Memo[str, _FieldRecords, Any]
"""The index of each field of a snapshot."""


class ShareContents:
    """Indexes of one snapshot, each built once. A field that equals that of `before` keeps its index."""

    def __init__(self, snapshot: SiteSnapshot, before: ContentIndexes) -> None:
        fields = {field: _FieldRecords(field, getattr(snapshot, field)) for field in _INDEXES}
        self.indexes = recompute_changed(before, fields, lambda found: _INDEXES[found.field](found.records))
        self.is_same = all(before.get(field) is entry for field, entry in self.indexes.items())
        """Whether every index is that of `before`."""

    def of(
        self, share: SiteSnapshot, domains: Iterable[str], nodes: Collection[str], ties: Collection[JoinTies]
    ) -> SiteSnapshot:
        """The share with everything that belongs to its GPUs, in the order of the whole snapshot."""
        made = {field: index for field, (_, index) in self.indexes.items()}
        partitions = tuple(
            partition for domain in domains for partition in made["partitions"].get(domain, ())
        )
        instances = (machine.instance for machine in share.machines if machine.instance is not None)
        uses = made["uses"].around(frozenset(pool for ty in ties for pool in ty.pools))
        claims = _found(made["claims"], (use.claim for use in uses))
        return msgspec.structs.replace(
            share,
            partitions=partitions,
            logicals=_found(made["logicals"], (partition.logical for partition in partitions)),
            instance_gpus=tuple(chain(*(made["instance_gpus"].get(instance, ()) for instance in instances))),
            nodes=_found(made["nodes"], nodes),
            uses=uses,
            claims=claims,
            compute_domains=_found(made["compute_domains"], (claim.domain for claim in claims)),
            transfers=made["transfers"].of(ties, nodes),
        )


def _found(index: Mapping[K, V], names: Iterable[K]) -> tuple[V, ...]:
    """The records of these names that exist, each once."""
    return tuple(index[name] for name in dict.fromkeys(names) if name in index)


class _TransferIndex:
    """Transfers by the UUID of their GPU, or by node if the UUID is not known."""

    def __init__(self, transfers: Iterable[MeasuredTransfer]) -> None:
        self._found: Mapping[Hashable, list[MeasuredTransfer]] = grouped(
            (
                uuid.value if (uuid := transfer.key.gpu_uuid) else ("node", transfer.node),
                transfer,
            )
            for transfer in transfers
        )
        self._names = frozenset(self._found)

    def of(self, ties: Iterable[JoinTies], nodes: Iterable[str]) -> tuple[MeasuredTransfer, ...]:
        """Transfers from the GPUs that the ties name, and from GPUs without a UUID on the nodes."""
        named = self._names.intersection(("node", name) for name in nodes)
        named = named.union(*(self._names & tied.parts for tied in ties))
        return tuple(transfer for name in sorted(named, key=str) for transfer in self._found.get(name, ()))


class _AllocationIndex:
    """Allocated devices by pool, and by pod, because a pod may hold devices of several pools."""

    def __init__(self, uses: tuple[DeviceUse, ...]) -> None:
        self._uses = uses
        self._of_pool = grouped(zip(map(attrgetter("driver", "pool"), uses), count(), strict=False))
        self._of_pod = grouped((pod, number) for number, use in enumerate(uses) for pod in use.pods)

    def around(self, pools: Iterable[Pool]) -> tuple[DeviceUse, ...]:
        """The allocations from some pools, and all other allocations of the same pods."""
        own = [number for pool in pools for number in self._of_pool.get(pool, ())]
        pods = {pod for number in own for pod in self._uses[number].pods}
        beside = {number for pod in pods for number in self._of_pod.get(pod, ())}
        return tuple(self._uses[number] for number in sorted(beside.union(own)))


def _runs_joined(records: tuple[Any, ...], name: Callable[[Any], K]) -> Mapping[K, list[Any]]:
    """The records of each name. Most records of a name follow one another, so few steps are interpreted."""
    found: defaultdict[K, list[Any]] = defaultdict(list)
    for key, run in groupby(records, key=name):
        found[key] += run
    return found


_INDEXES: Mapping[str, Callable[[tuple[Any, ...]], Any]] = {
    "partitions": partial(_runs_joined, name=attrgetter("domain")),
    "instance_gpus": partial(_runs_joined, name=attrgetter("instance")),
    "logicals": lambda found: {logical.id: logical for logical in found},
    "nodes": lambda found: {node.name: node for node in found},
    "claims": lambda found: {claim.key: claim for claim in found},
    "compute_domains": lambda found: {domain.uid: domain for domain in found},
    "transfers": _TransferIndex,
    "uses": _AllocationIndex,
}
"""How each field of a snapshot is indexed."""


# Split of a snapshot into connected components of the join key.


GroupName = tuple[str, str]
"""A group of records: its kind (domain, chassis or node), and the name of that domain, chassis or node."""


class _KindRecords(msgspec.Struct, frozen=True):
    """The records of one kind, in the order of the snapshot."""

    kind: str
    records: tuple[Any, ...]


class _GroupedRecords(NamedTuple):
    """The records of one kind by group."""

    runs: tuple[tuple[GroupName, tuple[Any, ...]], ...]
    """Consecutive records of one group. Mostly one run is the whole group."""
    groups: Memo[GroupName, tuple[Any, ...], JoinTies]


class _ShareInputs(NamedTuple):
    """The input that determines the records of one kind in each share."""

    grouped: _GroupedRecords
    homes: Mapping[GroupName, GroupName]


class _ShareParts(NamedTuple):
    """The parts of a share, beside the indexes of the whole snapshot."""

    records: tuple[tuple[Any, ...], ...]
    """Those of each kind."""
    names: tuple[GroupName, ...]
    ties: tuple[JoinTies, ...]
    """Of each of the names."""


class SnapshotShares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one snapshot, and the values that the next snapshot is compared with."""

    kinds: Memo[str, _KindRecords, _GroupedRecords] = msgspec.field(default_factory=dict)
    parts: Mapping[GroupName, frozenset[Hashable]] = msgspec.field(default_factory=dict)
    """The parts of the join key that each group names."""
    homes: Mapping[GroupName, GroupName] = msgspec.field(default_factory=dict)
    """The share of each group, named by its first group."""
    at_home: Memo[str, _ShareInputs, Mapping[GroupName, tuple[Any, ...]]] = msgspec.field(
        default_factory=dict
    )
    """The records of one kind in each share."""
    indexes: ContentIndexes = msgspec.field(default_factory=dict)
    snapshots: Memo[GroupName, _ShareParts, SiteSnapshot] = msgspec.field(default_factory=dict)
    """Each share as a snapshot, without layers, domains and time."""


def split_snapshot(snapshot: SiteSnapshot, before: SnapshotShares) -> SnapshotShares:
    """Split a snapshot into shares. `before` are the shares of any earlier snapshot."""
    known = before.kinds
    records = {kind: _KindRecords(kind, getattr(snapshot, found.field)) for kind, found in _KINDS.items()}
    kinds = recompute_changed(
        known, records, lambda found: _grouped(found, known[found.kind][1].groups if known else {})
    )
    ties = {name: ties for _, found in kinds.values() for name, (_, ties) in found.groups.items()}
    parts = {name: ty.parts for name, ty in ties.items()}
    homes = before.homes if parts == before.parts else _homes(parts)
    inputs = {kind: _ShareInputs(found, homes) for kind, (_, found) in kinds.items()}
    at_home = recompute_changed(before.at_home, inputs, _records_by_share)
    contents = ShareContents(snapshot, before.indexes)
    made = {kind: found for kind, (_, found) in at_home.items()}
    shares = {
        home: _ShareParts(
            tuple([found.get(home, ()) for found in made.values()]),
            tuple(names),
            tuple([ties[name] for name in names]),
        )
        for home, names in grouped((home, name) for name, home in homes.items()).items()
    }
    # While all else is the same, a share differs only if its own records do.
    snapshots = recompute_changed(
        before.snapshots if contents.is_same else {}, shares, lambda parts: _share_snapshot(contents, parts)
    )
    return SnapshotShares(
        kinds=kinds, parts=parts, homes=homes, at_home=at_home, indexes=contents.indexes, snapshots=snapshots
    )


def _share_snapshot(contents: ShareContents, parts: _ShareParts) -> SiteSnapshot:
    own: dict[str, Any] = {
        kind.field: records for kind, records in zip(_KINDS.values(), parts.records, strict=True)
    }
    return contents.of(
        SiteSnapshot(at=0.0, layers=(), **own),
        [name for kind, name in parts.names if kind == "domain"],
        [name for kind, name in parts.names if kind == "node"],
        parts.ties,
    )


def _grouped(found: _KindRecords, before: Memo[GroupName, tuple[Any, ...], JoinTies]) -> _GroupedRecords:
    kind = _KINDS[found.kind]
    runs = tuple(((found.kind, name), tuple(run)) for name, run in groupby(found.records, key=kind.name))
    return _GroupedRecords(runs, recompute_changed(before, _concatenated(runs), kind.ties))


def _records_by_share(inputs: _ShareInputs) -> dict[GroupName, tuple[Any, ...]]:
    return _concatenated((inputs.homes[name], run) for name, run in inputs.grouped.runs)


def _concatenated(runs: Iterable[tuple[GroupName, tuple[Any, ...]]]) -> dict[GroupName, tuple[Any, ...]]:
    """The records of each name in the order of the snapshot: the first of contradicting ones counts."""
    # Most names have one run. Keeping that very tuple makes the next comparison one of addresses.
    return {name: some[0] if len(some) == 1 else tuple(chain(*some)) for name, some in grouped(runs).items()}


def _fabric_ties(gpus: tuple[FabricGpuRecord, ...]) -> JoinTies:
    chassis = {gpu.place.chassis_serial for gpu in gpus}
    return JoinTies(frozenset([*(gpu.guid for gpu in gpus), *map(_chassis_tie, chassis)]))


def _machine_ties(trays: tuple[MachineRecord, ...]) -> JoinTies:
    chassis = {tray.chassis_serial for tray in trays}
    return JoinTies(_tied_parts([key for tray in trays for key in tray.gpus], chassis))


def _device_ties(devices: tuple[DeviceRecord, ...]) -> JoinTies:
    named = _tied_parts([device.key for device in devices if device.kind == "gpu"], ())
    return JoinTies(named, frozenset([(device.driver, device.pool) for device in devices]))


def _tied_parts(keys: Iterable[GpuKey], chassis: Iterable[str]) -> frozenset[Hashable]:
    """The parts that these keys name, and some chassis."""
    named: set[Hashable] = set()
    slots = set(chassis)
    for key in keys:
        if key.place is not None:
            slots.add(key.place.value.chassis_serial)
        if key.fabric_guid is not None:
            named.add(key.fabric_guid.value)
        if key.gpu_uuid is not None:
            named.add(key.gpu_uuid.value)
    named.update(map(_chassis_tie, slots))
    return frozenset(named)


def _chassis_tie(serial: str) -> tuple[str, str]:
    """A slot stands for its whole chassis, so that the trays of a chassis stay together."""
    return "chassis", serial


class _Kind(NamedTuple):
    field: str
    """The field of the snapshot."""
    name: Callable[[Any], str]
    """The group of a record."""
    ties: Callable[[Any], JoinTies]


_KINDS = {
    "domain": _Kind("fabric_gpus", attrgetter("domain"), _fabric_ties),
    "chassis": _Kind("machines", attrgetter("chassis_serial"), _machine_ties),
    "node": _Kind("devices", attrgetter("node"), _device_ties),
}


def _homes(parts: Mapping[GroupName, frozenset[Hashable]]) -> dict[GroupName, GroupName]:
    """The share of each group: the first group of its connected component (union-find)."""
    names = list(parts)
    # Groups are numbered in their order: numbers are compared and hashed faster than names.
    above = list(range(len(names)))

    def home(group: int) -> int:
        while above[group] != group:
            above[group] = group = above[above[group]]  # path halving
        return group

    first: dict[Hashable, int] = {}
    for group, named in enumerate(parts.values()):
        # `first` maps each part to the first group that names it. A site names tens of thousands of parts,
        # of which a group shares few with other groups: the set leaves one union for each of those.
        for earlier in set(map(first.setdefault, named, repeat(group))):
            ends = home(group), home(earlier)
            # The earlier group becomes the root, so the name of a share does not depend on later groups.
            above[max(ends)] = min(ends)
    return {name: names[home(group)] for group, name in enumerate(names)}


# Join of the shares.


class JoinedShares(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a site, share by share."""

    shares: SnapshotShares = SnapshotShares()
    joined: Memo[GroupName, SiteSnapshot, tuple[GpuChain, ...]] = msgspec.field(default_factory=dict)

    @property
    def chains(self) -> tuple[GpuChain, ...]:
        """The same chains as `gpu_chains` of the whole snapshot."""
        return tuple(sorted((chain for _, found in self.joined.values() for chain in found), key=chain_order))


def join_shares(snapshot: SiteSnapshot, before: JoinedShares) -> JoinedShares:
    """Every GPU through all layers. Only shares that differ from `before` are joined again.

    `before` may be the join of any snapshot, or `JoinedShares()`: the result is the same.
    """
    found = split_snapshot(snapshot, before.shares)
    snapshots = {name: share for name, (_, share) in found.snapshots.items()}
    return JoinedShares(shares=found, joined=recompute_changed(before.joined, snapshots, gpu_chains))
