"""Incremental join: split a snapshot into independent shares and join only those that changed.

`recompute_changed` is the memo behind every step: a value is made again only where its input differs from
the previous one. Its function sees nothing but that input, so the outcome always equals a full
computation. Unchanged inputs are mostly the same objects, and comparing these costs next to nothing.

`split_snapshot` takes these steps:

1. Group the records: fabric GPUs by domain, machines by chassis, devices by node.
2. List for each group the parts of the join key that it names. A slot stands for its whole chassis, so
   the trays of a chassis stay together.
3. Unite groups that name a common part: union-find with path halving gives the connected components. A
   component is a share, named by its first group; mostly it is a rack.
4. `ShareContents` adds what belongs to the GPUs of the share: partitions, logical partitions, interfaces,
   nodes, allocated devices with all other devices of the same pods, claims, ComputeDomains, transfers.

No part of the key crosses shares, so `join_shares` can join each alone: the chains of all shares, sorted,
equal `gpu_chains` of the whole snapshot, whatever the previous state was.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from rackloom.core.diagnosis.join import chain_order, gpu_chains, parts_of
from rackloom.core.diagnosis.snapshot import (
    AllocatedDevice,
    ClaimRecord,
    DeviceRecord,
    FabricGpuRecord,
    GpuChain,
    InstanceGpuRecord,
    LogicalPartitionRecord,
    MachineRecord,
    MeasuredTransfer,
    NodeRecord,
    PartitionRecord,
    SiteSnapshot,
)
from rackloom.core.domains.compute_domain import ComputeDomain
from rackloom.topology.join_key import GpuKey

# Memo: recompute only what depends on changed input.


K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
V = TypeVar("V")

Memo = Mapping[K, tuple[I, V]]
"""By name: what was told, and what was made of it."""


def recompute_changed(
    before: Memo[K, I, V], told: Mapping[K, I], make: Callable[[I], V]
) -> dict[K, tuple[I, V]]:
    """`make(told)` under every name; where what is told equals what was, the very values that there were.

    `make` looks at nothing else, so the outcome equals that of making everything anew. Values that are the
    same objects are compared by address, so that what did not change costs next to nothing.
    """
    found = {}
    for name, one in told.items():
        known = before.get(name)
        found[name] = known if known is not None and known[0] == one else (one, make(one))
    return found


# Which other records of the snapshot belong to the GPUs of a share.


Pool = tuple[str, str]
"""Driver and name."""


class JoinTies(msgspec.Struct, frozen=True):
    """What some records name that records of others may name too."""

    parts: frozenset[Hashable]
    """Parts of the join key. Of a place the chassis: its trays stay together."""
    pools: frozenset[Pool] = frozenset()
    """Those of devices."""


def _partitions_by_domain(found: Iterable[PartitionRecord]) -> Mapping[str, list[PartitionRecord]]:
    """By domain."""
    told: defaultdict[str, list[PartitionRecord]] = defaultdict(list)
    for one in found:
        told[one.domain].append(one)
    return told


def _interfaces_by_instance(found: Iterable[InstanceGpuRecord]) -> Mapping[str, list[InstanceGpuRecord]]:
    """By instance."""
    told: defaultdict[str, list[InstanceGpuRecord]] = defaultdict(list)
    for one in found:
        told[one.instance].append(one)
    return told


class _FieldRecords(NamedTuple):
    """What a picture has under one name."""

    field: str
    records: tuple[Any, ...]


ContentIndexes = Memo[str, _FieldRecords, Any]
"""What is looked for in a picture, by its fields."""


class ShareContents:
    """Indexes of one picture, each made once; where its records are as they were `before`, none is made."""

    def __init__(self, picture: SiteSnapshot, before: ContentIndexes) -> None:
        told = {field: _FieldRecords(field, getattr(picture, field)) for field in _INDEXES}
        self.indexes = recompute_changed(before, told, lambda one: _INDEXES[one.field](one.records))
        made = {field: index for field, (_, index) in self.indexes.items()}
        self._partitions: Mapping[str, list[PartitionRecord]] = made["partitions"]
        self._wanted: Mapping[str, list[InstanceGpuRecord]] = made["instance_gpus"]
        self._logicals: Mapping[str, LogicalPartitionRecord] = made["logicals"]
        self._nodes: Mapping[str, NodeRecord] = made["nodes"]
        self._claims: Mapping[str, ClaimRecord] = made["claims"]
        self._domains: Mapping[str, ComputeDomain] = made["compute_domains"]
        self._transfers: _TransferIndex = made["transfers"]
        self._uses: _AllocationIndex = made["uses"]

    def of(
        self, share: SiteSnapshot, domains: Iterable[str], nodes: Collection[str], ties: Collection[JoinTies]
    ) -> SiteSnapshot:
        """The share with all that belongs to its GPUs, in the order of the whole picture."""
        partitions = tuple(partition for domain in domains for partition in self._partitions.get(domain, ()))
        logicals = dict.fromkeys(
            partition.logical for partition in partitions if partition.logical in self._logicals
        )
        instances = [machine.instance for machine in share.machines if machine.instance is not None]
        uses = self._uses.around(frozenset(pool for ty in ties for pool in ty.pools))
        claims = {use.claim: self._claims[use.claim] for use in uses if use.claim in self._claims}
        uids = dict.fromkeys(claim.domain for claim in claims.values() if claim.domain in self._domains)
        return msgspec.structs.replace(
            share,
            partitions=partitions,
            logicals=tuple(self._logicals[id_] for id_ in logicals if id_ is not None),
            instance_gpus=tuple(one for instance in instances for one in self._wanted.get(instance, ())),
            nodes=tuple(self._nodes[name] for name in nodes if name in self._nodes),
            uses=uses,
            claims=tuple(claims.values()),
            compute_domains=tuple(self._domains[uid] for uid in uids),
            transfers=self._transfers.of(ties, nodes),
        )


class _TransferIndex:
    """What was measured: by the UUID of the GPU wherever that was, or on a node."""

    def __init__(self, transfers: Iterable[MeasuredTransfer]) -> None:
        self._found: defaultdict[Hashable, list[MeasuredTransfer]] = defaultdict(list)
        for transfer in transfers:
            uuid = transfer.key.gpu_uuid
            self._found[("node", transfer.node) if uuid is None else ("gpu_uuid", uuid.value)].append(
                transfer
            )
        self._names = frozenset(self._found)

    def of(self, ties: Iterable[JoinTies], nodes: Iterable[str]) -> tuple[MeasuredTransfer, ...]:
        """Those from GPUs that are named in ties, or on nodes."""
        named = self._names.intersection(("node", name) for name in nodes)
        named = named.union(*(self._names & tied.parts for tied in ties))
        return tuple(one for name in sorted(named, key=str) for one in self._found.get(name, ()))


class _AllocationIndex:
    """Who has devices: by pool, and by pod, which may have others in other pools."""

    def __init__(self, uses: tuple[AllocatedDevice, ...]) -> None:
        self._uses = uses
        self._of_pool: defaultdict[Pool, list[int]] = defaultdict(list)
        self._of_pod: defaultdict[str, list[int]] = defaultdict(list)
        for number, use in enumerate(uses):
            self._of_pool[use.driver, use.pool].append(number)
            for pod in use.pods:
                self._of_pod[pod].append(number)

    def around(self, pools: Iterable[Pool]) -> tuple[AllocatedDevice, ...]:
        """Those of pools, and what else their pods have."""
        own = [number for pool in pools for number in self._of_pool.get(pool, ())]
        pods = {pod for number in own for pod in self._uses[number].pods}
        beside = {number for pod in pods for number in self._of_pod.get(pod, ())}
        return tuple(self._uses[number] for number in sorted(beside.union(own)))


_INDEXES: Mapping[str, Callable[[tuple[Any, ...]], Any]] = {
    "partitions": _partitions_by_domain,
    "instance_gpus": _interfaces_by_instance,
    "logicals": lambda found: {one.id: one for one in found},
    "nodes": lambda found: {one.name: one for one in found},
    "claims": lambda found: {f"{one.namespace}/{one.name}": one for one in found},
    "compute_domains": lambda found: {one.uid: one for one in found},
    "transfers": _TransferIndex,
    "uses": _AllocationIndex,
}
"""How each field of a picture is looked through."""


# Split of a snapshot into connected components of the join key.


GroupName = tuple[str, str]
"""Of a group of records: what they are (domain, chassis or node), and of which."""


class _KindRecords(msgspec.Struct, frozen=True):
    """The records of one kind, in the order of the picture."""

    kind: str
    records: tuple[Any, ...]


class _GroupedRecords(NamedTuple):
    """The records of one kind, taken apart by the group that each is of."""

    runs: tuple[tuple[GroupName, tuple[Any, ...]], ...]
    """Neighbours of one group; mostly they are all of it."""
    groups: Memo[GroupName, tuple[Any, ...], JoinTies]


class _ShareInputs(NamedTuple):
    """What the records of one kind in each share depend on."""

    grouped: _GroupedRecords
    homes: Mapping[GroupName, GroupName]


class SnapshotShares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one picture, and what the next picture is compared with."""

    kinds: Memo[str, _KindRecords, _GroupedRecords] = msgspec.field(default_factory=dict)
    parts: Mapping[GroupName, frozenset[Hashable]] = msgspec.field(default_factory=dict)
    """What each group names that others may name too."""
    homes: Mapping[GroupName, GroupName] = msgspec.field(default_factory=dict)
    """The share of each group, named by its first group."""
    at_home: Memo[str, _ShareInputs, Mapping[GroupName, tuple[Any, ...]]] = msgspec.field(
        default_factory=dict
    )
    """The records of one kind in each share."""
    indexes: ContentIndexes = msgspec.field(default_factory=dict)
    pictures: Mapping[GroupName, SiteSnapshot] = msgspec.field(default_factory=dict)
    """Each share as a picture of its own, which tells nothing of layers, domains and time."""


def split_snapshot(picture: SiteSnapshot, before: SnapshotShares) -> SnapshotShares:
    """Take a picture apart; `before` are the shares of an earlier one, whatever has changed since."""
    known = before.kinds
    told = {kind: _KindRecords(kind, getattr(picture, one.field)) for kind, one in _KINDS.items()}
    kinds = recompute_changed(
        known, told, lambda one: _grouped(one, known[one.kind][1].groups if known else {})
    )
    ties = _ties_by_group(kinds)
    parts = {name: ty.parts for name, ty in ties.items()}
    homes = before.homes if parts == before.parts else _homes(parts)
    stood = {kind: _ShareInputs(grouped, homes) for kind, (_, grouped) in kinds.items()}
    at_home = recompute_changed(before.at_home, stood, _records_by_share)
    belongings = ShareContents(picture, before.indexes)
    pictures = {}
    for home, names in _groups_by_share(homes).items():
        records: dict[str, Any] = {
            _KINDS[kind].field: found.get(home, ()) for kind, (_, found) in at_home.items()
        }
        pictures[home] = belongings.of(
            SiteSnapshot(at=0.0, layers=(), **records),
            [name for kind, name in names if kind == "domain"],
            [name for kind, name in names if kind == "node"],
            [ties[name] for name in names],
        )
    return SnapshotShares(
        kinds=kinds, parts=parts, homes=homes, at_home=at_home, indexes=belongings.indexes, pictures=pictures
    )


def _grouped(told: _KindRecords, before: Memo[GroupName, tuple[Any, ...], JoinTies]) -> _GroupedRecords:
    kind = _KINDS[told.kind]
    neighbours = groupby(told.records, key=kind.name)
    runs = tuple(((told.kind, name), tuple(run)) for name, run in neighbours)
    return _GroupedRecords(runs, recompute_changed(before, _concatenated(runs), kind.ties))


def _records_by_share(stood: _ShareInputs) -> dict[GroupName, tuple[Any, ...]]:
    return _concatenated((stood.homes[name], run) for name, run in stood.grouped.runs)


def _concatenated(runs: Iterable[tuple[GroupName, tuple[Any, ...]]]) -> dict[GroupName, tuple[Any, ...]]:
    """By name, in the order of the picture: where two records contradict each other, the first one counts."""
    found: defaultdict[GroupName, list[tuple[Any, ...]]] = defaultdict(list)
    for name, run in runs:
        found[name].append(run)
    return {name: some[0] if len(some) == 1 else tuple(chain(*some)) for name, some in found.items()}


def _fabric_ties(gpus: tuple[FabricGpuRecord, ...]) -> JoinTies:
    guids = {("fabric_guid", one.guid) for one in gpus}
    return JoinTies(frozenset(guids | {("chassis", one.place.chassis_serial) for one in gpus}))


def _machine_ties(trays: tuple[MachineRecord, ...]) -> JoinTies:
    named = {tie for tray in trays for key in tray.gpus for tie in _tied_parts(key)}
    return JoinTies(frozenset(named | {("chassis", tray.chassis_serial) for tray in trays}))


def _device_ties(devices: tuple[DeviceRecord, ...]) -> JoinTies:
    named = {tie for device in devices if device.kind == "gpu" for tie in _tied_parts(device.key)}
    return JoinTies(frozenset(named), frozenset((device.driver, device.pool) for device in devices))


def _tied_parts(key: GpuKey) -> Iterator[tuple[str, object]]:
    for part, value in parts_of(key):
        yield ("chassis", key.place.value.chassis_serial) if part == "place" and key.place else (part, value)


class _Kind(NamedTuple):
    field: str
    """Of the picture."""
    name: Callable[[Any], str]
    """Which group a record is of."""
    ties: Callable[[Any], JoinTies]


_KINDS = {
    "domain": _Kind("fabric_gpus", attrgetter("domain"), _fabric_ties),
    "chassis": _Kind("machines", attrgetter("chassis_serial"), _machine_ties),
    "node": _Kind("devices", attrgetter("node"), _device_ties),
}


def _ties_by_group(kinds: Memo[str, _KindRecords, _GroupedRecords]) -> Mapping[GroupName, JoinTies]:
    return {name: ties for _, grouped in kinds.values() for name, (_, ties) in grouped.groups.items()}


def _homes(parts: Mapping[GroupName, frozenset[Hashable]]) -> dict[GroupName, GroupName]:
    """The first group of all that are tied to one another, directly or through others."""
    above: dict[GroupName, GroupName] = {name: name for name in parts}
    order = {name: number for number, name in enumerate(parts)}

    def home(name: GroupName) -> GroupName:
        while above[name] != name:
            above[name] = name = above[above[name]]
        return name

    first: dict[Hashable, GroupName] = {}
    for name, named in parts.items():
        # A site names tens of thousands of parts, and a group shares them with few others.
        for other in set(map(first.setdefault, named, repeat(name))):
            ends = home(name), home(other)
            above[max(ends, key=order.__getitem__)] = min(ends, key=order.__getitem__)
    return {name: home(name) for name in parts}


def _groups_by_share(homes: Mapping[GroupName, GroupName]) -> Mapping[GroupName, list[GroupName]]:
    found: defaultdict[GroupName, list[GroupName]] = defaultdict(list)
    for name, home in homes.items():
        found[home].append(name)
    return found


# Join of the shares.


class JoinedShares(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a site, share by share."""

    shares: SnapshotShares = SnapshotShares()
    joined: Memo[GroupName, SiteSnapshot, tuple[GpuChain, ...]] = msgspec.field(default_factory=dict)

    @property
    def chains(self) -> tuple[GpuChain, ...]:
        """As `chains` has them of the whole picture."""
        return tuple(sorted((chain for _, found in self.joined.values() for chain in found), key=chain_order))


def join_shares(picture: SiteSnapshot, before: JoinedShares) -> JoinedShares:
    """Every GPU through all layers, joining only what is not as it was in the picture `before`.

    `before` may be of any picture, or `JoinedShares()`: what comes out is the same.
    """
    found = split_snapshot(picture, before.shares)
    return JoinedShares(shares=found, joined=recompute_changed(before.joined, found.pictures, gpu_chains))
