"""A snapshot with the indexes that several checks share, and the names of places in findings.

`SnapshotIndex` builds each index on first use: chains by node, domains, logical partitions, nodes,
devices and their allocations by name, and which machine a node runs on (where their GPUs tell). `can_see`
says whether a layer was read, so that something missing in it is really missing. `is_fresh` says whether
the reading of an NVLink domain shows how things are now; a check must not judge a domain that is not
fresh.

The functions `at_...` spell the entries of `Finding.where`. Two findings that share an entry concern the
same thing, and `examination` folds one under the other by comparing these strings, so every check has to
use them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from rackloom.core.diagnosis.join import Rails, gpu_chains
from rackloom.core.diagnosis.snapshot import (
    AllocatedDevice,
    DeviceRecord,
    GpuChain,
    Layer,
    LogicalPartitionRecord,
    NodeRecord,
    NvlinkDomainRecord,
    SiteSnapshot,
)


class SnapshotIndex:
    """One picture, as the checks look at it."""

    def __init__(self, picture: SiteSnapshot, joined: tuple[GpuChain, ...] | None = None) -> None:
        self.picture = picture
        self._joined = joined

    def can_see(self, layer: Layer) -> bool:
        """Whether a layer was read: what is missing in it is then really missing."""
        seen = self.picture.layer(layer)
        return seen is not None and seen.unknown_since is None

    def is_fresh(self, domain: str) -> bool:
        """Whether a domain's reading says how things are now."""
        return domain in self._fresh

    @cached_property
    def chains(self) -> tuple[GpuChain, ...]:
        """Every GPU through all layers."""
        return gpu_chains(self.picture) if self._joined is None else self._joined

    @cached_property
    def by_node(self) -> Mapping[str, tuple[GpuChain, ...]]:
        """The GPUs of each node that the fabric knows too."""
        found: defaultdict[str, list[GpuChain]] = defaultdict(list)
        for chain in self.chains:
            if chain.device is not None and chain.fabric is not None:
                found[chain.device.node].append(chain)
        return {node: tuple(gpus) for node, gpus in found.items()}

    @cached_property
    def domains(self) -> Mapping[str, NvlinkDomainRecord]:
        """NVLink domains by uuid."""
        return {domain.uuid: domain for domain in self.picture.domains}

    @cached_property
    def logicals(self) -> Mapping[str, LogicalPartitionRecord]:
        """Logical partitions by id."""
        return {logical.id: logical for logical in self.picture.logicals}

    @cached_property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return {node.name: node for node in self.picture.nodes}

    @cached_property
    def rails(self) -> Rails:
        """Which NICs serve which GPU."""
        return Rails(self.picture.devices)

    @cached_property
    def devices(self) -> Mapping[tuple[str, str, str], DeviceRecord]:
        """Devices by driver, pool and name."""
        return {(device.driver, device.pool, device.name): device for device in self.picture.devices}

    @cached_property
    def uses(self) -> Mapping[tuple[str, str, str], AllocatedDevice]:
        """Who has each allocated device."""
        return {(use.driver, use.pool, use.device): use for use in self.picture.uses}

    @cached_property
    def _fresh(self) -> frozenset[str]:
        return frozenset(domain.uuid for domain in self.picture.domains if domain.unknown_since is None)

    @cached_property
    def node_of_machine(self) -> Mapping[str, str]:
        """The node that runs on each machine, where their GPUs tell."""
        return {
            chain.machine.id: chain.device.node
            for chain in self.chains
            if chain.machine is not None and chain.device is not None
        }

    @cached_property
    def machine_of_node(self) -> Mapping[str, str]:
        """The machine that each node runs on, where their GPUs tell."""
        return {node: machine for machine, node in self.node_of_machine.items()}

    def at_tray(self, node: str) -> tuple[str, ...]:
        """How `Finding.where` names a node and, where it is known, its machine."""
        machine = self.machine_of_node.get(node)
        return (at_node(node),) if machine is None else (at_node(node), at_machine(machine))


def places_around(gpus: Iterable[GpuChain]) -> tuple[str, ...]:
    """Everything that trouble with these GPUs concerns, for `Finding.where`."""
    return tuple(dict.fromkeys(place for chain in gpus for place in _places_of_chain(chain)))


def _places_of_chain(chain: GpuChain) -> Iterator[str]:
    if chain.device is not None:
        yield at_device(chain.device)
        yield at_node(chain.device.node)
    if chain.machine is not None:
        yield at_machine(chain.machine.id)
    if chain.partition is not None:
        yield at_partition(chain.partition.domain, chain.partition.name)
    if chain.fabric is not None:
        yield at_gpu(chain.fabric.domain, chain.fabric.guid)


def at_device(device: DeviceRecord) -> str:
    """How `Finding.where` names a device: each driver has names of its own for the devices of a node."""
    return f"device {device.node}/{device.driver}/{device.name}"


def at_node(name: str) -> str:
    """How `Finding.where` names a node."""
    return f"node {name}"


def at_domain(uuid: str) -> str:
    """How `Finding.where` names an NVLink domain."""
    return f"domain {uuid}"


def at_machine(id_: str) -> str:
    """How `Finding.where` names a machine."""
    return f"machine {id_}"


def at_partition(domain: str, name: str) -> str:
    """How `Finding.where` names a physical partition."""
    return f"partition {domain}/{name}"


def at_logical(id_: str) -> str:
    """How `Finding.where` names a logical partition."""
    return f"logical partition {id_}"


def at_pod(key: str) -> str:
    """How `Finding.where` names a pod, `namespace/name`."""
    return f"pod {key}"


def at_gpu(domain: str, guid: int) -> str:
    """How `Finding.where` names a GPU."""
    return f"gpu {domain}/0x{guid:016x}"
