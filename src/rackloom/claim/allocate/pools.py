"""Which devices a node can reach now: slices into pools, with what is wrong with a pool.

Rules of upstream's pool gathering: of each pool only the newest generation counts, the pool must be there
completely, and its names must add up. What a driver is still writing is never allocated from.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.nodes import reaches
from rackloom.claim.allocate.objects import CounterSet, Device, DeviceTaint, Node, ResourceSlice

PoolKey = tuple[str, str]
"""Driver and pool name."""


class Trouble(StrEnum):
    """Why nothing is allocated from a pool."""

    INCOMPLETE = "incomplete"
    """Slices are missing: the driver is still writing."""
    INVALID = "invalid"
    """Its names contradict each other."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as one node sees it."""

    driver: str
    name: str
    slices: tuple[ResourceSlice, ...] = ()
    """With devices that the node may reach, in the order in which they are tried."""
    elsewhere: tuple[ResourceSlice, ...] = ()
    """With devices of other nodes: they draw from the same counters."""
    counter_sets: Mapping[str, CounterSet] = {}
    trouble: Trouble | None = None
    reason: str = ""

    @property
    def key(self) -> PoolKey:
        """Driver and name."""
        return self.driver, self.name


class SliceIndex:
    """All slices of a cluster, found by node and by pool."""

    def __init__(self, slices: Iterable[ResourceSlice]) -> None:
        self._of_node: defaultdict[str, list[ResourceSlice]] = defaultdict(list)
        self._of_pool: defaultdict[PoolKey, list[ResourceSlice]] = defaultdict(list)
        for one in slices:
            self._of_node[one.spec.node_name or ""].append(one)
            self._of_pool[_pool_key(one)].append(one)

    def near(self, node: str) -> list[ResourceSlice]:
        """Slices that name the node, then those that name no node."""
        return [*self._of_node.get(node, ()), *self._of_node.get("", ())]

    def taints(self) -> Iterator[DeviceTaint]:
        """The taints of all devices."""
        for of in self._of_pool.values():
            for one in of:
                for device in one.spec.devices:
                    yield from device.taints

    def unbound(self) -> bool:
        """Whether any slice does not name its node."""
        return "" in self._of_node

    def pool(self, key: PoolKey) -> Sequence[ResourceSlice]:
        """All slices of a pool, of every node and generation."""
        return self._of_pool.get(key, ())


def gather(node: Node, index: SliceIndex, features: Features) -> tuple[Pool, ...]:
    """The pools that the node reaches, in the order in which they are tried. Raises MalformedSelector.

    By driver and name; pools with binding conditions come last, because they make a pod wait.
    """
    newest: dict[PoolKey, list[ResourceSlice]] = {}
    for one in index.near(node.metadata.name):
        if _relevant(node, one, features):
            _keep_newest(newest, one)
    pools = (_pool(key, newest[key], index.pool(key), features) for key in sorted(newest))
    found = [pool for pool in pools if pool is not None]
    return tuple(sorted(found, key=_makes_wait))


def devices_of(pool: Pool) -> Iterator[tuple[ResourceSlice, Device]]:
    """The devices of a pool that the node may reach, in order."""
    for one in pool.slices:
        for device in one.spec.devices:
            yield one, device


def _pool_key(one: ResourceSlice) -> PoolKey:
    return one.spec.driver, one.spec.pool.name


def _relevant(node: Node, one: ResourceSlice, features: Features) -> bool:
    spec = one.spec
    partitions = spec.per_device_node_selection is not None or bool(spec.shared_counters)
    if partitions and not features.partitionable_devices:
        return False
    if spec.node_name or spec.all_nodes or spec.node_selector is not None:
        return reaches(node, node_name=spec.node_name, all_nodes=spec.all_nodes, selector=spec.node_selector)
    return bool(spec.per_device_node_selection) and any(
        reaches(node, node_name=device.node_name, all_nodes=device.all_nodes, selector=device.node_selector)
        for device in spec.devices
    )


def _keep_newest(newest: dict[PoolKey, list[ResourceSlice]], one: ResourceSlice) -> None:
    kept = newest.setdefault(_pool_key(one), [])
    if kept and one.spec.pool.generation < kept[0].spec.pool.generation:
        return
    if kept and one.spec.pool.generation > kept[0].spec.pool.generation:
        kept.clear()
    kept.append(one)


def _pool(
    key: PoolKey, kept: list[ResourceSlice], everywhere: Sequence[ResourceSlice], features: Features
) -> Pool | None:
    """The pool of `kept`; None when a newer generation, meant for other nodes, has replaced it."""
    generation, expected = kept[0].spec.pool.generation, kept[0].spec.pool.resource_slice_count
    same = [one for one in everywhere if one.spec.pool.generation == generation]
    if len({one.spec.pool.resource_slice_count for one in same}) > 1:
        return _useless(key, Trouble.INVALID, "its slices disagree on resourceSliceCount")
    if len(kept) == expected:
        return _validated(key, kept, [], features)
    if any(one.spec.pool.generation > generation for one in everywhere):
        return None
    if len(same) != expected:
        return _useless(key, Trouble.INCOMPLETE, f"{len(same)} of {expected} slices are there")
    here = {one.metadata.name for one in kept}
    return _validated(key, kept, [one for one in same if one.metadata.name not in here], features)


def _useless(key: PoolKey, trouble: Trouble, reason: str) -> Pool:
    return Pool(driver=key[0], name=key[1], trouble=trouble, reason=reason)


def _validated(
    key: PoolKey, kept: list[ResourceSlice], others: list[ResourceSlice], features: Features
) -> Pool:
    def holds_counters(one: ResourceSlice) -> bool:
        return features.partitionable_devices and bool(one.spec.shared_counters)

    here = sorted((one for one in kept if not holds_counters(one)), key=lambda one: one.metadata.name)
    elsewhere = [one for one in others if not holds_counters(one)]
    counters = [one for one in (*kept, *others) if holds_counters(one)]
    sets = [one for holder in counters for one in holder.spec.shared_counters]
    wrong = _contradiction(here, elsewhere, sets, features)
    if wrong is not None:
        return _useless(key, Trouble.INVALID, wrong)
    return Pool(
        driver=key[0],
        name=key[1],
        slices=tuple(here),
        elsewhere=tuple(elsewhere),
        counter_sets={one.name: one for one in sets},
    )


def _contradiction(
    here: list[ResourceSlice], elsewhere: list[ResourceSlice], sets: list[CounterSet], features: Features
) -> str | None:
    twice = _repeated(device.name for one in here for device in one.spec.devices)
    if twice is not None:
        return f"the device name {twice} appears twice"
    if not features.partitionable_devices:
        return None
    twice = _repeated(one.name for one in sets)
    if twice is not None:
        return f"the counter set name {twice} appears twice"
    known = {one.name: one.counters for one in sets}
    return next(_unknown_counters((*here, *elsewhere), known), None)


def _unknown_counters(
    slices: Iterable[ResourceSlice], known: Mapping[str, Mapping[str, object]]
) -> Iterator[str]:
    for one in slices:
        for device in one.spec.devices:
            for use in device.consumes_counters:
                if use.counter_set not in known:
                    yield f"device {device.name} draws from {use.counter_set}, not there"
                for name in use.counters:
                    if name not in known.get(use.counter_set, {}):
                        yield f"device {device.name} draws from {use.counter_set}/{name}, not there"


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _makes_wait(pool: Pool) -> bool:
    return any(device.binding_conditions for _, device in devices_of(pool))
