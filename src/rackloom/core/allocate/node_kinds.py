"""Which nodes are copies of each other to a claim: kinds of nodes, by what the claim reads.

Real devices differ in UUIDs, serial numbers and addresses, and nodes in all of them. A claim reads few
of these: what its selectors name (`Program.reads`), what its constraints compare, and the capacities
that it asks for. `reads_of` collects that. `NodeKinds` numbers the devices and nodes of a fleet by those
values alone, so that nodes which differ elsewhere are of one kind. Claims that read the same share it.

Beside what is read, a device's kind has all that the allocator itself looks at: driver, pool, taints,
counters, binding conditions, node selection, and whether it can be shared. A malformed device (every
selector fails on it) counts with all of its content. The capacities of a device that is never shared
count only where a request policy or a request for capacity looks at them.

A node is looked at when a search first comes to it. Equal kinds and equal occupancy give equal answers,
by position.
"""

from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.values import SemanticVersion
from rackloom.core.allocate.eligibility import CandidateDevice, compiled
from rackloom.core.allocate.inputs import DeviceId, RequestAlternative
from rackloom.core.allocate.objects import Amount, Device, DeviceAttribute, ResourceClaim
from rackloom.core.allocate.pools import MalformedNodeSelector, Pool, node_is_selected
from rackloom.core.allocate.problem import NodeDevices
from rackloom.core.allocate.quantity import Quantity

# What claims read of devices.


QualifiedName = tuple[str, str]
"""Domain and identifier."""


class DeviceReads(NamedTuple):
    """What claims read of a device, beside what the allocator reads of every device."""

    attributes: frozenset[QualifiedName] | None
    """None: any of them."""
    capacities: frozenset[QualifiedName] | None
    amounts: bool
    """Whether capacity is asked for, which looks at all capacities of the device."""


def reads_of(asks: Iterable[RequestAlternative], claims: Iterable[ResourceClaim]) -> DeviceReads:
    """What the requests and constraints of claims read. Selectors that do not compile read nothing."""
    names: _Names = {"attribute": set(), "capacity": set()}
    amounts = False
    for ask in asks:
        amounts = amounts or bool(ask.amounts)
        for selector in (*ask.device_class.spec.selectors, *ask.selectors):
            if selector.cel is not None:
                _add_expression(names, selector.cel.expression)
    for claim in claims:
        for constraint in claim.spec.devices.constraints:
            compared = constraint.match_attribute or constraint.distinct_attribute or ""
            _add_read(names, "attribute", *_qualified(compared))
    return _frozen(names, amounts=amounts)


def reads_of_expressions(expressions: Iterable[str]) -> DeviceReads:
    """What selectors read."""
    names: _Names = {"attribute": set(), "capacity": set()}
    for expression in expressions:
        _add_expression(names, expression)
    return _frozen(names, amounts=False)


_Names = dict[str, set[QualifiedName] | None]


def _frozen(names: _Names, *, amounts: bool) -> DeviceReads:
    attributes, capacities = names["attribute"], names["capacity"]
    return DeviceReads(
        None if attributes is None else frozenset(attributes),
        None if capacities is None else frozenset(capacities),
        amounts,
    )


def _add_expression(names: _Names, expression: str) -> None:
    program = compiled(expression)
    if not isinstance(program, errors.CompileError):
        for kind, domain, identifier in program.reads:
            _add_read(names, kind, domain, identifier)


def _qualified(name: str) -> QualifiedName:
    domain, slash, identifier = name.partition("/")
    return (domain, identifier) if slash else ("", name)


def _add_read(names: _Names, kind: str, domain: str | None, identifier: str | None) -> None:
    known = names.get(kind)
    if known is None:
        return
    if domain is None or identifier is None:
        names[kind] = None
    else:
        known.add((domain, identifier))


# Kinds of devices and nodes.


_NODE_BYTES, _DEVICE_KIND_BYTES, _NODE_KIND_BYTES = 100, 400, 700
"""Measured for devices of which two attributes are read, eight of them on a node, and rounded up."""


class NodeKinds:
    """The kinds of a fleet's nodes and devices, as numbers, for claims that read the same."""

    def __init__(self, reads: DeviceReads) -> None:
        self.reads = reads
        self._devices: dict[Hashable, int] = {}
        self._nodes: dict[Hashable, int] = {}
        self._of_node: dict[int, int] = {}
        self._names: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {}
        self.device_kinds: list[tuple[int, ...]] = []
        """Of each kind of node, the kinds of its devices by position."""
        self.malformed: set[int] = set()
        """The kinds of nodes with a device or a counter that cannot be read."""

        self.views = 0
        """How many views of the fleet use them."""
        self.counted = 0
        """The size that the fleet has counted."""

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return (
            _NODE_BYTES * len(self._of_node)
            + _DEVICE_KIND_BYTES * len(self._devices)
            + _NODE_KIND_BYTES * len(self._nodes)
        )

    def of(self, number: int, devices: NodeDevices) -> int:
        """The kind of a node. `number` is that of the node in its fleet."""
        kind = self._of_node.get(number)
        if kind is None:
            kind = self._of_node[number] = self._kind(devices)
        return kind

    def _kind(self, devices: NodeDevices) -> int:
        pools = {pool.key: at for at, pool in enumerate(devices.pools)}
        own = tuple(self._device(devices, device, pools[device.pool.key]) for device in devices.candidates)
        node = own, tuple(_pool_content(devices, pool) for pool in devices.pools)
        kind = self._nodes.setdefault(node, len(self._nodes))
        if kind == len(self.device_kinds):
            self.device_kinds.append(own)
            if any(map(_is_malformed, devices.candidates)) or not _has_quantities(devices.pools):
                self.malformed.add(kind)
        return kind

    def _device(self, devices: NodeDevices, candidate: CandidateDevice, pool: int) -> int:
        attributes, capacities = self._names_for(candidate.id.driver)
        device = candidate.device
        content = (
            candidate.id.driver,
            pool,
            _chosen(device.attributes, attributes),
            _chosen(device.capacity, capacities if not self._looks_at_capacity(candidate) else None),
            _rare_content(devices, candidate),
        )
        return self._devices.setdefault(content, len(self._devices))

    def _looks_at_capacity(self, candidate: CandidateDevice) -> bool:
        return (
            candidate.shareable
            or self.reads.amounts
            or any(capacity.request_policy is not None for capacity in candidate.device.capacity.values())
        )

    def _names_for(self, driver: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """The names under which a driver's devices have what is read; None: all."""
        if driver not in self._names:
            self._names[driver] = (
                _names_at(driver, self.reads.attributes),
                _names_at(driver, self.reads.capacities),
            )
        return self._names[driver]


def _names_at(driver: str, reads: frozenset[QualifiedName] | None) -> tuple[str, ...] | None:
    """A name without a domain is in the driver's domain."""
    if reads is None:
        return None
    own = [identifier for domain, identifier in reads if domain in (driver, "")]
    return tuple(sorted({f"{domain}/{identifier}" for domain, identifier in reads} | set(own)))


def _chosen(values: Mapping[str, Hashable], names: tuple[str, ...] | None) -> Hashable:
    if names is None:
        return frozenset(values.items())
    return tuple([values.get(name) for name in names])


def _rare_content(devices: NodeDevices, candidate: CandidateDevice) -> Hashable:
    """What most devices have nothing of."""
    device = candidate.device
    reach = _reach(devices, candidate) if candidate.source.spec.per_device_node_selection else None
    counters = device.consumes_counters
    rare = (
        device.taints,
        candidate.shareable,
        device.allow_multiple_allocations,
        bool(device.binding_conditions),
        any(use.compatibility_groups for use in counters),
        _draws(device) if counters else None,
        reach,
        (frozenset(device.attributes.items()), frozenset(device.capacity.items()))
        if _is_malformed(candidate)
        else None,
    )
    return None if rare == _ORDINARY else rare


_ORDINARY = ((), False, None, False, False, None, None, None)


def _draws(device: Device) -> Hashable:
    """What the device draws from counters, as text: what is no quantity is the search's to report."""
    return tuple(
        (use.counter_set, name, counter.value)
        for use in device.consumes_counters
        for name, counter in use.counters.items()
    )


def _reach(devices: NodeDevices, candidate: CandidateDevice) -> Hashable:
    """Whether the device selects the node; text for a selector that cannot be read."""
    try:
        return node_is_selected(devices.node, candidate.device)
    except MalformedNodeSelector as error:
        return str(error)


def _pool_content(devices: NodeDevices, pool: Pool) -> Hashable:
    counters = frozenset(
        (name, counter, total.value)
        for name, of in pool.counter_sets.items()
        for counter, total in of.counters.items()
    )
    elsewhere = tuple(
        (devices.positions[DeviceId(pool.driver, pool.name, device.name)], _draws(device))
        for slice_ in pool.elsewhere
        for device in slice_.spec.devices
        if device.consumes_counters
    )
    return pool.driver, pool.trouble, counters, elsewhere


# Malformed devices: every selector fails on them.


def _is_malformed(candidate: CandidateDevice) -> bool:
    device = candidate.device
    plain = all(map(_is_plain, device.attributes.values()))
    if plain and all(_is_quantity(capacity.value) for capacity in device.capacity.values()):
        return False
    return candidate.view.problem is not None


def _is_plain(attribute: DeviceAttribute) -> bool:
    """Whether the attribute is well-formed for sure: a value whose text needs no parsing."""
    if attribute.version is not None:
        return attribute.versions is None and _is_version(attribute.version)
    return attribute.versions is None and not (
        attribute.string is None and attribute.int_ is None and attribute.bool_ is None
    )


def _has_quantities(pools: Iterable[Pool]) -> bool:
    """Whether all counters of the pools can be read."""
    return all(
        _is_quantity(total.value)
        for pool in pools
        for counter_set in pool.counter_sets.values()
        for total in counter_set.counters.values()
    )


@lru_cache(maxsize=4096)
def _is_version(text: str) -> bool:
    try:
        SemanticVersion.parse(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def _is_quantity(amount: Amount) -> bool:
    try:
        Quantity.parse(str(amount))
    except ValueError:
        return False
    return True
