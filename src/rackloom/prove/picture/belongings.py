"""What of a whole picture belongs to the GPUs of a share: as much as `Lookups` may look for, and no more."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable

import msgspec

from rackloom.prove.picture.values import DeviceUse, InstanceGpu, PartitionSeen, Picture, TransferSeen

Pool = tuple[str, str]
"""Driver and name."""


class Ties(msgspec.Struct, frozen=True):
    """What some records name that records of others may name too."""

    parts: frozenset[Hashable]
    """Parts of the join key. Of a place the chassis: its trays stay together."""
    pools: frozenset[Pool] = frozenset()
    """Those of devices."""


class Belongings:
    """Indexes of one picture, each made once."""

    def __init__(self, picture: Picture) -> None:
        self._partitions: defaultdict[str, list[PartitionSeen]] = defaultdict(list)
        for partition in picture.partitions:
            self._partitions[partition.domain].append(partition)
        self._wanted: defaultdict[str, list[InstanceGpu]] = defaultdict(list)
        for one in picture.instance_gpus:
            self._wanted[one.instance].append(one)
        self._logicals = {one.id: one for one in picture.logicals}
        self._nodes = {one.name: one for one in picture.nodes}
        self._claims = {f"{one.namespace}/{one.name}": one for one in picture.claims}
        self._domains = {one.uid: one for one in picture.compute_domains}
        self._transfers = _Transfers(picture.transfers)
        self._uses = _Uses(picture.uses)

    def of(
        self, share: Picture, domains: Iterable[str], nodes: Collection[str], ties: Collection[Ties]
    ) -> Picture:
        """The share with all that belongs to its GPUs, in the order of the whole picture."""
        partitions = tuple(one for domain in domains for one in self._partitions[domain])
        logicals = dict.fromkeys(one.logical for one in partitions if one.logical in self._logicals)
        instances = [one.instance for one in share.machines if one.instance is not None]
        uses = self._uses.around(frozenset(pool for one in ties for pool in one.pools))
        claims = {use.claim: self._claims[use.claim] for use in uses if use.claim in self._claims}
        uids = dict.fromkeys(one.domain for one in claims.values() if one.domain in self._domains)
        return msgspec.structs.replace(
            share,
            partitions=partitions,
            logicals=tuple(self._logicals[id_] for id_ in logicals if id_ is not None),
            instance_gpus=tuple(one for instance in instances for one in self._wanted[instance]),
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
        return tuple(one for name in sorted(named, key=str) for one in self._found[name])


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
        beside = {number for pod in pods for number in self._of_pod[pod]}
        return tuple(self._uses[number] for number in sorted(beside.union(own)))
