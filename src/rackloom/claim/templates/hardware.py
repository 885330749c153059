"""A kind of machine as templates see it: its topology next to what its drivers publish.

Topology says which devices belong together, the published attributes say how a selector can name them. A GPU
or NIC has one index for both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from rackloom.claim.allocate.candidates import Candidate, candidates_of
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import DeviceClass, Node, ObjectMeta, ResourceSlice
from rackloom.claim.allocate.pools import SliceIndex, gather
from rackloom.claim.allocate.slices import GPU_DRIVER, NIC_DRIVER, device_classes, slices_of
from rackloom.claim.templates.observed import observed, overlaid
from rackloom.claim.templates.published import TELLING
from rackloom.topology.machine import Machine

_FRESH_NODES = 2
"""A profile is planned on both ends of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """Nodes that are alike."""

    machine: Machine
    nodes: tuple[Node, ...]
    devices: tuple[Candidate, ...]
    """All that the first node reaches, of any driver, in the order in which the allocator tries them."""

    @property
    def gpus(self) -> tuple[Candidate, ...]:
        """The GPUs by index."""
        return tuple(one for one in self.devices if one.id.driver == GPU_DRIVER)

    @property
    def nics(self) -> tuple[Candidate, ...]:
        """The NICs by index."""
        return tuple(one for one in self.devices if one.id.driver == NIC_DRIVER)

    @property
    def usable(self) -> tuple[int, ...]:
        """Indices of the NICs that may carry data."""
        return tuple(nic.index for nic in self.machine.nics if nic.excluded is None)


@dataclass(frozen=True, slots=True, eq=False)
class Stock:
    """Where a template is to work."""

    kinds: tuple[Hardware, ...]
    """The most frequent kind of node first."""
    classes: tuple[DeviceClass, ...]
    index: SliceIndex
    source: str
    """What it was made from, in words."""
    observed: bool
    """From slices: what is not there is not published. A profile may just not know it."""


def stock_of_machine(machine: Machine) -> Stock:
    """Fresh nodes of a machine profile, with the slices that its drivers would publish."""
    names = tuple(f"node-{number}" for number in range(_FRESH_NODES))
    index = SliceIndex(one for name in names for one in slices_of(machine, name))
    nodes = tuple(_node(name) for name in names)
    kind = Hardware(machine, nodes, _devices(nodes[0], index))
    return Stock((kind,), device_classes(), index, f"the machine profile {machine.name}", observed=False)


def stock_of_slices(
    slices: Sequence[ResourceSlice],
    classes: Iterable[DeviceClass] = (),
    nodes: Iterable[Node] = (),
    *,
    machine: Machine | None = None,
) -> Stock:
    """The nodes that `slices` name, with all devices free.

    Of devices that `machine` has at the same address, its knowledge of the topology is used.
    """
    index = SliceIndex(slices)
    named = [name for one in slices for name in _node_names(one)]
    known = {node.metadata.name: node for node in nodes}
    places = [known.get(name) or _node(name) for name in sorted({*named, *known})]
    alike: dict[bytes, list[Node]] = {}
    for node in places:
        alike.setdefault(_shape(_devices(node, index)), []).append(node)
    kinds = [_kind(group, index, machine) for group in alike.values()]
    kinds.sort(key=lambda kind: (-len(kind.nodes), kind.nodes[0].metadata.name))
    own = {one.metadata.name: one for one in (*device_classes(), *classes)}
    with_profile = f" and the machine profile {machine.name}" if machine else ""
    return Stock(tuple(kinds), tuple(own.values()), index, f"ResourceSlices{with_profile}", observed=True)


def _kind(nodes: Sequence[Node], index: SliceIndex, machine: Machine | None) -> Hardware:
    devices = _devices(nodes[0], index)
    gpus, nics = ([one for one in devices if one.id.driver == driver] for driver in (GPU_DRIVER, NIC_DRIVER))
    seen = observed(nodes[0].metadata.name, gpus, nics)
    return Hardware(overlaid(seen, machine) if machine else seen, tuple(nodes), devices)


def _devices(node: Node, index: SliceIndex) -> tuple[Candidate, ...]:
    features = Features()
    return candidates_of(gather(node, index, features), features)


def _node_names(one: ResourceSlice) -> list[str]:
    names = [one.spec.node_name, *(device.node_name for device in one.spec.devices)]
    return [name for name in names if name]


def _shape(devices: Sequence[Candidate]) -> bytes:
    """Equal for nodes whose devices differ in what no template reads (UUIDs, IP addresses) at most."""
    return msgspec.json.encode([_reduced(one) for one in devices], order="sorted")


def _reduced(one: Candidate) -> object:
    read = {name: value for name in TELLING if (value := one.attribute(name)) is not None}
    return one.id.driver, msgspec.structs.replace(one.device, attributes=read)


def _node(name: str) -> Node:
    return Node(metadata=ObjectMeta(name=name, labels={"kubernetes.io/hostname": name}))
