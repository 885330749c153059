"""The devices that a node can reach now: node selectors, and ResourceSlices gathered into pools.

`node_is_selected` evaluates `nodeName`, `allNodes` and `nodeSelector` as the scheduler does. All terms
of a selector are read before any of them counts, because upstream refuses a malformed term even if
another one matches (`MalformedNodeSelector`).

`gather_pools` applies upstream's rules in this order:

1. Keep the slices that reach the node, and of each pool those of the newest generation.
2. A pool is invalid if its slices disagree on `resourceSliceCount`.
3. If the node sees only some slices of a pool, the pool is left out if a newer generation has replaced it
   on other nodes. It is incomplete if slices are missing everywhere: its driver is still writing.
4. A pool is invalid unless its device names and counter set names are unique and the consumed counters
   exist.
5. Order pools by driver and name. Pools with binding conditions come last, because they make a pod
   wait.

Nothing is allocated from an invalid or incomplete pool. `SliceIndex` finds slices by node and by pool,
so that one index serves every node of a cluster.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter

import msgspec

from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import (
    CounterSet,
    Device,
    DeviceTaint,
    Node,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    ResourceSlice,
    ResourceSliceSpec,
)

# Node selectors.


_NAME_FIELD = "metadata.name"


class MalformedNodeSelector(ValueError):
    """A node selector that cannot be read. Upstream gives up on the whole attempt."""


def node_is_selected(node: Node, by: Device | ResourceSliceSpec) -> bool:
    """Whether a device or slice selects the node. Nothing set selects none. Raises MalformedNodeSelector."""
    if by.node_name:
        return node.metadata.name == by.node_name
    return bool(by.all_nodes) or (
        by.node_selector is not None and node_selector_matches(node, by.node_selector)
    )


def node_selector_matches(node: Node, selector: NodeSelector) -> bool:
    """Whether any term of the selector matches the node. Raises MalformedNodeSelector."""
    matches = False
    # Read all terms: upstream refuses a malformed term even if another one matches. For the same reason
    # each term is read to its end.
    for term in selector.node_selector_terms:
        holds = [_label_holds(node.metadata.labels, need) for need in term.match_expressions]
        for need in term.match_fields:
            if need.key != _NAME_FIELD or need.operator not in ("In", "NotIn") or len(need.values) != 1:
                raise MalformedNodeSelector(
                    f"{need.key}: match fields know {_NAME_FIELD} In or NotIn one name"
                )
            holds.append((need.values[0] == node.metadata.name) == (need.operator == "In"))
        # A term without requirements matches nothing.
        matches = matches or (bool(holds) and all(holds))
    return matches


def _label_holds(labels: Mapping[str, str], need: NodeSelectorRequirement) -> bool:
    present, value = need.key in labels, labels.get(need.key)
    # A malformed requirement is refused for any labels of the node.
    match need.operator:
        case "In" | "NotIn" if not need.values:
            raise MalformedNodeSelector(f"{need.key}: operator {need.operator} needs values")
        case "In":
            return present and value in need.values
        case "NotIn":
            return not present or value not in need.values
        case "Exists" | "DoesNotExist" if need.values:
            raise MalformedNodeSelector(f"{need.key}: operator {need.operator} takes no values")
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "Gt" | "Lt":
            bound = _integer(need.values[0]) if len(need.values) == 1 else None
            if bound is None:
                raise MalformedNodeSelector(f"{need.key}: operator {need.operator} needs one whole number")
            # A label that is missing or no number fails the comparison. Only the selector can be malformed.
            actual = _integer(value or "")
            if actual is None:
                return False
            return actual > bound if need.operator == "Gt" else actual < bound
        case other:
            raise MalformedNodeSelector(f"{need.key}: {other!r} is not a node selector operator")


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def selector_of_node(node: str) -> NodeSelector:
    """The selector of exactly one node."""
    requirement = NodeSelectorRequirement(key=_NAME_FIELD, operator="In", values=(node,))
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(requirement,)),))


def merged_selector(selectors: Iterable[NodeSelector]) -> NodeSelector | None:
    """One term with all requirements of the given selectors, or None if they have none.

    Raises MalformedNodeSelector for a selector of several terms: their union cannot be joined into one term.
    """
    fields: list[NodeSelectorRequirement] = []
    labels: list[NodeSelectorRequirement] = []
    for selector in selectors:
        if len(selector.node_selector_terms) > 1:
            raise MalformedNodeSelector(f"node selector with {len(selector.node_selector_terms)} terms")
        for term in selector.node_selector_terms:
            _add_requirements(fields, term.match_fields)
            _add_requirements(labels, term.match_expressions)
    # An empty term would match nothing, but no requirement at all means any node.
    if not fields and not labels:
        return None
    term = NodeSelectorTerm(match_expressions=tuple(labels), match_fields=tuple(fields))
    return NodeSelector(node_selector_terms=(term,))


def _add_requirements(known: list[NodeSelectorRequirement], more: Iterable[NodeSelectorRequirement]) -> None:
    for need in more:
        # Slices of one pool often repeat a requirement. The order of its values does not count.
        same = (need.key, need.operator, frozenset(need.values))
        if same not in [(had.key, had.operator, frozenset(had.values)) for had in known]:
            known.append(need)


# Pools as one node sees them.


PoolKey = tuple[str, str]
"""Driver and pool name."""


class PoolProblem(StrEnum):
    """The reason why nothing is allocated from a pool."""

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
    has_groups: bool = False
    """Whether a device of it names compatibility groups."""
    trouble: PoolProblem | None = None
    reason: str = ""

    @property
    def key(self) -> PoolKey:
        """Driver and name."""
        return self.driver, self.name


_Found = dict[str, ResourceSlice | list[ResourceSlice]]
"""Slices by a name. Most names have one slice, which is kept without a list."""


def _add(found: _Found, name: str, slice_: ResourceSlice) -> None:
    """Add a slice to those of a name that has one."""
    known = found[name]
    if isinstance(known, list):
        known.append(slice_)
    else:
        found[name] = [known, slice_]


class _SlicesBy:
    """Slices by a name, of which some are replaced."""

    def __init__(self, name_of: Callable[[ResourceSlice], str], found: _Found) -> None:
        self._name_of = name_of
        self._found = found

    def of(self, name: str) -> Sequence[ResourceSlice]:
        """The slices of a name, in order."""
        known = self._found.get(name)
        if known is None:
            return ()
        return known if isinstance(known, list) else (known,)

    def everything(self) -> Iterator[ResourceSlice]:
        """All slices."""
        for known in self._found.values():
            if isinstance(known, list):
                yield from known
            else:
                yield known

    def replace(self, before: ResourceSlice | None, after: ResourceSlice | None) -> None:
        """Put a slice in place of another one. None means that there was none, or that none is left."""
        if before is not None:
            name = self._name_of(before)
            # A new list, because callers may hold the old one.
            slices = list(self.of(name))
            at = slices.index(before)
            if after is not None and self._name_of(after) == name:
                slices[at] = after
                after = None
            else:
                del slices[at]
            self._put(name, slices)
        if after is not None:
            name = self._name_of(after)
            self._put(name, [*self.of(name), after])

    def _put(self, name: str, slices: list[ResourceSlice]) -> None:
        if slices:
            self._found[name] = slices if len(slices) > 1 else slices[0]
        else:
            self._found.pop(name, None)


class SliceIndex:
    """All slices of a cluster, found by node and by pool."""

    def __init__(self, slices: Iterable[ResourceSlice]) -> None:
        of_node: _Found = {}
        with_pool_name: _Found = {}
        # Each slice is read once: a fleet that places few pods spends most of its time here.
        for slice_ in slices:
            spec = slice_.spec
            node, pool = spec.node_name or "", spec.pool.name
            if node in of_node:
                _add(of_node, node, slice_)
            else:
                of_node[node] = slice_
            if pool in with_pool_name:
                _add(with_pool_name, pool, slice_)
            else:
                with_pool_name[pool] = slice_
        self._of_node = _SlicesBy(_node_named, of_node)
        self._with_pool_name = _SlicesBy(attrgetter("spec.pool.name"), with_pool_name)

    def replace(self, before: ResourceSlice | None, after: ResourceSlice | None) -> None:
        """Put a slice in place of another one. None means that there was none, or that none is left."""
        self._of_node.replace(before, after)
        self._with_pool_name.replace(before, after)

    def near(self, node: str) -> list[ResourceSlice]:
        """Slices that name the node, then those that name no node."""
        return [*self._of_node.of(node), *self._of_node.of("")]

    def taints(self) -> Iterator[DeviceTaint]:
        """The taints of all devices."""
        for slice_ in self._with_pool_name.everything():
            for device in slice_.spec.devices:
                yield from device.taints

    def tainted(self) -> bool:
        """Whether any device has a taint."""
        for slice_ in self._with_pool_name.everything():
            for device in slice_.spec.devices:
                if device.taints:
                    return True
        return False

    def unbound(self) -> bool:
        """Whether any slice does not name its node."""
        return bool(self._of_node.of(""))

    def common_pools(self) -> set[PoolKey]:
        """The pools with slices that name no node."""
        return set(map(pool_key, self._of_node.of("")))

    def pool(self, key: PoolKey) -> Sequence[ResourceSlice]:
        """All slices of a pool, of every node and generation."""
        driver, name = key
        # A text is found in less time than a pair, and few drivers have a pool of one name.
        return [slice_ for slice_ in self._with_pool_name.of(name) if slice_.spec.driver == driver]


def _node_named(slice_: ResourceSlice) -> str:
    return slice_.spec.node_name or ""


def gather_pools(node: Node, index: SliceIndex, features: Features) -> tuple[Pool, ...]:
    """The pools that the node reaches, in the order in which they are tried. Raises MalformedNodeSelector.

    The order is by driver and name. Pools with binding conditions come last, because they make a pod wait.
    """
    newest: dict[PoolKey, list[ResourceSlice]] = {}
    for slice_ in index.near(node.metadata.name):
        if not _node_sees_slice(node, slice_, features):
            continue
        # A driver writes a new generation of its pool beside the old one: only the newest counts.
        kept = newest.setdefault(pool_key(slice_), [])
        newer = slice_.spec.pool.generation - kept[0].spec.pool.generation if kept else 0
        if newer > 0:
            kept.clear()
        if newer >= 0:
            kept.append(slice_)
    pools = (_complete_pool(key, newest[key], index.pool(key), features) for key in sorted(newest))
    found = [pool for pool in pools if pool is not None]
    # The sort is stable, so pools keep the order of their keys on both sides.
    return tuple(
        sorted(found, key=lambda pool: any(device.binding_conditions for _, device in devices_of(pool)))
    )


def devices_of(pool: Pool) -> Iterator[tuple[ResourceSlice, Device]]:
    """The devices of a pool that the node may reach, in order."""
    for slice_ in pool.slices:
        for device in slice_.spec.devices:
            yield slice_, device


def pool_key(slice_: ResourceSlice) -> PoolKey:
    """The pool of a slice."""
    return slice_.spec.driver, slice_.spec.pool.name


def _node_sees_slice(node: Node, slice_: ResourceSlice, features: Features) -> bool:
    spec = slice_.spec
    # A scheduler without a feature ignores slices that use it: it would break the rule that it cannot read.
    partitions = spec.per_device_node_selection is not None or bool(spec.shared_counters)
    if partitions and not features.partitionable_devices:
        return False
    if not features.compatibility_groups and _names_groups(slice_):
        return False
    if spec.node_name or spec.all_nodes or spec.node_selector is not None:
        return node_is_selected(node, spec)
    # If devices select their nodes, one that reaches the node is enough to see the slice.
    return bool(spec.per_device_node_selection) and any(
        node_is_selected(node, device) for device in spec.devices
    )


def _complete_pool(
    key: PoolKey, kept: list[ResourceSlice], everywhere: Sequence[ResourceSlice], features: Features
) -> Pool | None:
    """The pool of `kept`, or None if a newer generation, meant for other nodes, has replaced it."""
    generation, expected = kept[0].spec.pool.generation, kept[0].spec.pool.resource_slice_count
    same = [slice_ for slice_ in everywhere if slice_.spec.pool.generation == generation]
    if len({slice_.spec.pool.resource_slice_count for slice_ in same}) > 1:
        return _unusable_pool(key, PoolProblem.INVALID, "its slices disagree on resourceSliceCount")
    # The node sees the whole pool: no need to look at other nodes.
    if len(kept) == expected:
        return _validated_pool(key, kept, [], features)
    # A newer generation elsewhere replaced the pool. Its driver no longer means these slices.
    if any(slice_.spec.pool.generation > generation for slice_ in everywhere):
        return None
    if not features.compatibility_groups:
        # With the feature off, such devices must not be allocated, nor those beside them.
        known = [slice_ for slice_ in same if not _names_groups(slice_)]
        if len(known) < len(same):
            count = len(same) - len(known)
            why = f"{count} of {expected} slices have compatibility groups, and that feature is off"
            return _unusable_pool(key, PoolProblem.INCOMPLETE, why)
    if len(same) != expected:
        return _unusable_pool(key, PoolProblem.INCOMPLETE, f"{len(same)} of {expected} slices are there")
    # The rest of the pool is of other nodes. Its devices draw from the same counters.
    here = {slice_.metadata.name for slice_ in kept}
    return _validated_pool(
        key, kept, [slice_ for slice_ in same if slice_.metadata.name not in here], features
    )


def _unusable_pool(key: PoolKey, trouble: PoolProblem, reason: str) -> Pool:
    return Pool(driver=key[0], name=key[1], trouble=trouble, reason=reason)


def _validated_pool(
    key: PoolKey, kept: list[ResourceSlice], others: list[ResourceSlice], features: Features
) -> Pool:
    def holds_counters(slice_: ResourceSlice) -> bool:
        return features.partitionable_devices and bool(slice_.spec.shared_counters)

    # By name: the search tries devices in this order, and servers list slices in any.
    here = sorted(
        (slice_ for slice_ in kept if not holds_counters(slice_)), key=lambda slice_: slice_.metadata.name
    )
    elsewhere = [slice_ for slice_ in others if not holds_counters(slice_)]
    counters = [slice_ for slice_ in (*kept, *others) if holds_counters(slice_)]
    sets = [counter for holder in counters for counter in holder.spec.shared_counters]
    wrong = _name_contradiction(here, elsewhere, sets, features)
    if wrong is not None:
        return _unusable_pool(key, PoolProblem.INVALID, wrong)
    return Pool(
        driver=key[0],
        name=key[1],
        slices=tuple(here),
        elsewhere=tuple(elsewhere),
        counter_sets={counter_set.name: counter_set for counter_set in sets},
        has_groups=bool(sets) and any(map(_names_groups, (*here, *elsewhere))),
    )


def _names_groups(slice_: ResourceSlice) -> bool:
    """Whether a device of the slice names compatibility groups."""
    return any(use.compatibility_groups for device in slice_.spec.devices for use in device.consumes_counters)


def _name_contradiction(
    here: list[ResourceSlice], elsewhere: list[ResourceSlice], sets: list[CounterSet], features: Features
) -> str | None:
    twice = _first_repeated([device.name for slice_ in here for device in slice_.spec.devices])
    if twice is not None:
        return f"the device name {twice} appears twice"
    if not features.partitionable_devices:
        return None
    twice = _first_repeated([counter_set.name for counter_set in sets])
    if twice is not None:
        return f"the counter set name {twice} appears twice"
    # A counter that is not there would be drawn from without a limit.
    known = {counter_set.name: counter_set.counters for counter_set in sets}
    for slice_ in (*here, *elsewhere):
        for device in slice_.spec.devices:
            for use in device.consumes_counters:
                if use.counter_set not in known:
                    return f"device {device.name} draws from {use.counter_set}, not there"
                for name in use.counters:
                    if name not in known[use.counter_set]:
                        return f"device {device.name} draws from {use.counter_set}/{name}, not there"
    return None


def _first_repeated(names: Sequence[str]) -> str | None:
    # Nearly all pools have no repetition, and a set shows that at once.
    if len(set(names)) == len(names):
        return None
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            return name
        earlier.add(name)
    return None
