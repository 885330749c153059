"""Kinds of nodes: nodes are copies of each other to a claim if they agree in everything that it reads.

Real devices differ in UUIDs, serial numbers and addresses, and nodes in all of them. A claim reads few
of these: the names in its expressions (`Program.reads`), the attributes that its constraints compare, and
the capacities that it requests. `reads_of` collects that. `NodeKinds` numbers the devices and nodes of a
fleet by those values alone, so that nodes which differ elsewhere are of one kind. Claims that read the same
share it.

Beside these values, a device's kind has all that the allocator itself looks at: driver, pool, taints,
counters and their groups, binding conditions, node selection, and whether it can be shared. A malformed
device (every selector fails on it) counts with all of its content. The capacities of a device that is
never shared count only if a request policy or a request for capacity looks at them.

A node is read when a search first comes to it. Equal kinds and equal occupancy give equal answers, by
position.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.eligibility import CandidateDevice, compiled, compiled_derived, is_quantity
from rackloom.core.allocate.inputs import DeviceId, RequestAlternative
from rackloom.core.allocate.objects import Device, ResourceClaim
from rackloom.core.allocate.pools import MalformedNodeSelector, Pool, node_is_selected
from rackloom.core.allocate.problem import NodeDevices

if TYPE_CHECKING:
    from rackloom.core.allocate.cel.compiler import Program
    from rackloom.core.allocate.cel.derived import DerivedProgram

# The parts of devices that claims read.


QualifiedName = tuple[str, str]
"""Domain and identifier."""


class DeviceReads(NamedTuple):
    """The parts of a device that claims read, beside those that the allocator reads of every device."""

    attributes: frozenset[QualifiedName] | None
    """None if any of them may be read."""
    capacities: frozenset[QualifiedName] | None
    amounts: bool
    """Whether claims request capacity. Such a request looks at all capacities of the device."""
    compared: frozenset[QualifiedName] = frozenset()
    """Attributes that constraints compare and no selector reads. Their values do not count, only which
    devices of a node are equal in them: eight GPUs of eight UUIDs are like any other eight."""


def reads_of(asks: Iterable[RequestAlternative], claims: Iterable[ResourceClaim]) -> DeviceReads:
    """The reads of the requests and constraints of claims. Expressions that do not compile read nothing."""
    names: _Names = {"attribute": set(), "capacity": set()}
    amounts = False
    for ask in asks:
        amounts = amounts or bool(ask.amounts)
        for selector in (*ask.device_class.spec.selectors, *ask.selectors):
            if selector.cel is not None:
                _add_expression(names, compiled(selector.cel.expression))
        for expression in ask.derived.values():
            _add_expression(names, compiled_derived(expression))
    compared = set()
    for claim in claims:
        for constraint in claim.spec.devices.constraints:
            name = constraint.match_attribute or constraint.distinct_attribute or ""
            domain, slash, identifier = name.partition("/")
            compared.add((domain, identifier) if slash else ("", name))
    found = _frozen(names, amounts=amounts)
    # An attribute that a selector reads counts with its value anyway.
    if found.attributes is None:
        return found
    return found._replace(compared=frozenset(compared) - found.attributes)


def reads_of_expressions(expressions: Iterable[str]) -> DeviceReads:
    """The reads of selectors."""
    names: _Names = {"attribute": set(), "capacity": set()}
    for expression in expressions:
        _add_expression(names, compiled(expression))
    return _frozen(names, amounts=False)


_Names = dict[str, set[QualifiedName] | None]


def _frozen(names: _Names, *, amounts: bool) -> DeviceReads:
    attributes, capacities = names["attribute"], names["capacity"]
    return DeviceReads(
        None if attributes is None else frozenset(attributes),
        None if capacities is None else frozenset(capacities),
        amounts,
    )


def _add_expression(names: _Names, program: "Program | DerivedProgram | errors.CompileError") -> None:
    if isinstance(program, errors.CompileError):
        return
    for kind, domain, identifier in program.reads:
        known = names.get(kind)
        # Any attribute is read already, or it is a field that counts for every claim.
        if known is None:
            continue
        # A name that is computed may be any.
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
        """The kinds of devices of each kind of node, by position."""
        self.malformed: set[int] = set()
        """The kinds of nodes with a device or a counter that cannot be read."""

        self.views = 0
        """The number of views of the fleet that use them."""
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

    def forget(self, number: int) -> None:
        """The devices of a node changed."""
        self._of_node.pop(number, None)

    def of(self, number: int, devices: NodeDevices) -> int:
        """The kind of a node. `number` is that of the node in its fleet."""
        kind = self._of_node.get(number)
        if kind is None:
            kind = self._of_node[number] = self._kind(devices)
        return kind

    def _kind(self, devices: NodeDevices) -> int:
        pools = {pool.key: at for at, pool in enumerate(devices.pools)}
        own = tuple(self._device(devices, device, pools[device.pool.key]) for device in devices.candidates)
        content = tuple(_pool_content(devices, pool) for pool in devices.pools)
        # Constraints compare devices of one node, so only which of them have equal values counts.
        equal = tuple([_equal_values(devices.candidates, *name) for name in sorted(self.reads.compared)])
        node = own, content, equal
        kind = self._nodes.setdefault(node, len(self._nodes))
        if kind == len(self.device_kinds):
            self.device_kinds.append(own)
            if has_malformed(devices):
                self.malformed.add(kind)
        return kind

    def _device(self, devices: NodeDevices, candidate: CandidateDevice, pool: int) -> int:
        driver, device, reads = candidate.id.driver, candidate.device, self.reads
        if driver not in self._names:
            self._names[driver] = names_at(driver, reads.attributes), names_at(driver, reads.capacities)
        attributes, capacities = self._names[driver]
        # A share, an amount and a policy depend on capacities that no selector reads.
        if (
            candidate.shareable
            or reads.amounts
            or any(has.request_policy is not None for has in device.capacity.values())
        ):
            capacities = None
        content = (
            driver,
            pool,
            chosen_values(device.attributes, attributes),
            chosen_values(device.capacity, capacities),
            _rare_content(devices, candidate),
        )
        return self._devices.setdefault(content, len(self._devices))


def names_at(driver: str, reads: frozenset[QualifiedName] | None) -> tuple[str, ...] | None:
    """The names of `reads` on a driver's devices, without the domain if it is the driver's. None is all."""
    if reads is None:
        return None
    own = [identifier for domain, identifier in reads if domain in (driver, "")]
    return tuple(sorted({f"{domain}/{identifier}" for domain, identifier in reads} | set(own)))


def chosen_values(values: Mapping[str, Hashable], names: tuple[str, ...] | None) -> Hashable:
    """The values under `names`, or all values if it is None."""
    if names is None:
        return frozenset(values.items())
    return tuple([values.get(name) for name in names])


def _equal_values(candidates: Iterable[CandidateDevice], domain: str, identifier: str) -> Hashable:
    """The number of each device's value if all are single and no versions, or else the values."""
    name = f"{domain}/{identifier}" if domain else identifier
    values = [candidate.attribute(name) for candidate in candidates]
    numbers: dict[Hashable, int] = {}
    found: list[int | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        given = [part for part in (value.string, value.int_, value.bool_) if part is not None]
        others = (value.version, value.versions, value.strings, value.ints, value.bools)
        # Versions and lists may be equal in part, so their contents count.
        if len(given) != 1 or any(part is not None for part in others):
            return tuple(values)
        single = type(given[0]), given[0]
        found.append(numbers.setdefault(single, len(numbers)))
    return tuple(found)


def _rare_content(devices: NodeDevices, candidate: CandidateDevice) -> Hashable:
    """The content that most devices do not have."""
    device = candidate.device
    reach = _reach(devices, candidate) if candidate.source.spec.per_device_node_selection else None
    counters = device.consumes_counters
    if (
        reach is None
        and not (counters or device.taints or device.binding_conditions or candidate.malformed)
        and device.allow_multiple_allocations is None
    ):
        return None
    return (
        device.taints,
        candidate.shareable,
        device.allow_multiple_allocations,
        bool(device.binding_conditions),
        _draws(device) if counters else None,
        _groups(device) if candidate.pool.has_groups else None,
        reach,
        (frozenset(device.attributes.items()), frozenset(device.capacity.items()))
        if candidate.malformed
        else None,
    )


def _draws(device: Device) -> Hashable:
    """The device's draws from counters, as text, because the search reports text that is no quantity."""
    return tuple(
        (use.counter_set, name, counter.value)
        for use in device.consumes_counters
        for name, counter in use.counters.items()
    )


def _groups(device: Device) -> Hashable:
    """The compatibility groups of the device on each counter set that it draws from."""
    return tuple((use.counter_set, use.compatibility_groups) for use in device.consumes_counters)


def _reach(devices: NodeDevices, candidate: CandidateDevice) -> Hashable:
    """Whether the device selects the node, or the error if its selector cannot be read."""
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
        (
            devices.positions[DeviceId(pool.driver, pool.name, device.name)],
            _draws(device),
            _groups(device) if pool.has_groups else None,
        )
        for slice_ in pool.elsewhere
        for device in slice_.spec.devices
        if device.consumes_counters
    )
    return pool.driver, pool.trouble, counters, elsewhere


def has_malformed(devices: NodeDevices) -> bool:
    """Whether a device or a counter of the node cannot be read."""
    if any(candidate.malformed for candidate in devices.candidates):
        return True
    return any(
        not is_quantity(total.value)
        for pool in devices.pools
        for counter_set in pool.counter_sets.values()
        for total in counter_set.counters.values()
    )
