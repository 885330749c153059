"""What of a whole picture belongs to the GPUs of a share: as much as `Lookups` may look for, and no more."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.values import (
    DeviceUse,
    InstanceGpu,
    LogicalSeen,
    NodeSeen,
    PartitionSeen,
    Picture,
    TransferSeen,
)
from rackloom.prove.picture.workloads import ClaimSeen

Pool = tuple[str, str]
"""Driver and name."""


class Ties(msgspec.Struct, frozen=True):
    """What some records name that records of others may name too."""

    parts: frozenset[Hashable]
    """Parts of the join key. Of a place the chassis: its trays stay together."""
    pools: frozenset[Pool] = frozenset()
    """Those of devices."""


def _partitions(found: Iterable[PartitionSeen]) -> Mapping[str, list[PartitionSeen]]:
    """By domain."""
    told: defaultdict[str, list[PartitionSeen]] = defaultdict(list)
    for one in found:
        told[one.domain].append(one)
    return told


def _wanted(found: Iterable[InstanceGpu]) -> Mapping[str, list[InstanceGpu]]:
    """By instance."""
    told: defaultdict[str, list[InstanceGpu]] = defaultdict(list)
    for one in found:
        told[one.instance].append(one)
    return told


class _Records(NamedTuple):
    """What a picture has under one name."""

    field: str
    records: tuple[Any, ...]


Indexes = Kept[str, _Records, Any]
"""What is looked for in a picture, by its fields."""


class Belongings:
    """Indexes of one picture, each made once; where its records are as they were `before`, none is made."""

    def __init__(self, picture: Picture, before: Indexes) -> None:
        told = {field: _Records(field, getattr(picture, field)) for field in _INDEXES}
        self.indexes = again(before, told, lambda one: _INDEXES[one.field](one.records))
        made = {field: index for field, (_, index) in self.indexes.items()}
        self._partitions: Mapping[str, list[PartitionSeen]] = made["partitions"]
        self._wanted: Mapping[str, list[InstanceGpu]] = made["instance_gpus"]
        self._logicals: Mapping[str, LogicalSeen] = made["logicals"]
        self._nodes: Mapping[str, NodeSeen] = made["nodes"]
        self._claims: Mapping[str, ClaimSeen] = made["claims"]
        self._domains: Mapping[str, ComputeDomain] = made["compute_domains"]
        self._transfers: _Transfers = made["transfers"]
        self._uses: _Uses = made["uses"]

    def of(
        self, share: Picture, domains: Iterable[str], nodes: Collection[str], ties: Collection[Ties]
    ) -> Picture:
        """The share with all that belongs to its GPUs, in the order of the whole picture."""
        partitions = tuple(one for domain in domains for one in self._partitions.get(domain, ()))
        logicals = dict.fromkeys(one.logical for one in partitions if one.logical in self._logicals)
        instances = [one.instance for one in share.machines if one.instance is not None]
        uses = self._uses.around(frozenset(pool for one in ties for pool in one.pools))
        claims = {use.claim: self._claims[use.claim] for use in uses if use.claim in self._claims}
        uids = dict.fromkeys(one.domain for one in claims.values() if one.domain in self._domains)
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


class _Transfers:
    """What was measured: by the UUID of the GPU wherever that was, or on a node."""

    def __init__(self, transfers: Iterable[TransferSeen]) -> None:
        self._found: defaultdict[Hashable, list[TransferSeen]] = defaultdict(list)
        for one in transfers:
            uuid = one.key.gpu_uuid
            self._found[("node", one.node) if uuid is None else ("gpu_uuid", uuid.value)].append(one)
        self._names = frozenset(self._found)

    def of(self, ties: Iterable[Ties], nodes: Iterable[str]) -> tuple[TransferSeen, ...]:
        """Those from GPUs that are named in ties, or on nodes."""
        named = self._names.intersection(("node", name) for name in nodes)
        named = named.union(*(self._names & tied.parts for tied in ties))
        return tuple(one for name in sorted(named, key=str) for one in self._found.get(name, ()))


class _Uses:
    """Who has devices: by pool, and by pod, which may have others in other pools."""

    def __init__(self, uses: tuple[DeviceUse, ...]) -> None:
        self._uses = uses
        self._of_pool: defaultdict[Pool, list[int]] = defaultdict(list)
        self._of_pod: defaultdict[str, list[int]] = defaultdict(list)
        for number, use in enumerate(uses):
            self._of_pool[use.driver, use.pool].append(number)
            for pod in use.pods:
                self._of_pod[pod].append(number)

    def around(self, pools: Iterable[Pool]) -> tuple[DeviceUse, ...]:
        """Those of pools, and what else their pods have."""
        own = [number for pool in pools for number in self._of_pool.get(pool, ())]
        pods = {pod for number in own for pod in self._uses[number].pods}
        beside = {number for pod in pods for number in self._of_pod.get(pod, ())}
        return tuple(self._uses[number] for number in sorted(beside.union(own)))


_INDEXES: Mapping[str, Callable[[tuple[Any, ...]], Any]] = {
    "partitions": _partitions,
    "instance_gpus": _wanted,
    "logicals": lambda found: {one.id: one for one in found},
    "nodes": lambda found: {one.name: one for one in found},
    "claims": lambda found: {f"{one.namespace}/{one.name}": one for one in found},
    "compute_domains": lambda found: {one.uid: one for one in found},
    "transfers": _Transfers,
    "uses": _Uses,
}
"""How each field of a picture is looked through."""
