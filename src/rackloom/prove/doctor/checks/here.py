"""Which node of a cluster a host is, and what the cluster calls its devices: by GPU UUID and PCI address.

Names of hosts and nodes are set apart from one another, and may be alike by luck.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from rackloom.prove.doctor.checks.view import at_device, at_node
from rackloom.prove.doctor.words import unique
from rackloom.prove.picture.values import DeviceSeen, Picture
from rackloom.topology.machine import Machine


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """What findings about a host call it and its devices."""

    name: str
    """`node n1` where its cluster is known, else `host n1`."""
    node: str | None = None
    devices: Mapping[str, tuple[DeviceSeen, ...]] = msgspec.field(default_factory=dict)
    """Its GPUs and NICs in the cluster, by PCI address: several drivers may publish one."""
    held: frozenset[str] = frozenset()
    """PCI addresses of those that a claim holds."""

    def published(self, address: str | None) -> tuple[DeviceSeen, ...]:
        """All that the cluster has of the device at a PCI address."""
        return self.devices.get(address or "", ())

    def places(self, *addresses: str | None) -> tuple[str, ...]:
        """How `Finding.where` names these devices, the host last."""
        known = (at_device(one) for address in addresses for one in self.published(address))
        return unique(*known, self.name)


def here_of(machine: Machine, name: str, picture: Picture) -> Here:
    """The host that calls itself `name` and has these GPUs and NICs, as the cluster of `picture` knows it."""
    node = _node_of(machine, name, picture)
    if node is None:
        return Here(name=f"host {name}")
    devices: defaultdict[str, tuple[DeviceSeen, ...]] = defaultdict(tuple)
    for one, address in _addressed(picture):
        if one.node == node:
            devices[address] += (one,)
    used = {(one.driver, one.pool, one.device) for one in picture.uses}
    held = (
        at for at, seen in devices.items() if any((one.driver, one.pool, one.name) in used for one in seen)
    )
    return Here(name=at_node(node), node=node, devices=dict(devices), held=frozenset(held))


def _node_of(machine: Machine, name: str, picture: Picture) -> str | None:
    """The node with its GPUs; where no UUID is known on one side, the node of its name."""
    own = {gpu.uuid for gpu in machine.gpus if gpu.uuid is not None}
    nodes = {one.name for one in picture.nodes}
    seen = [(one.node, uuid) for one, uuid in _with_uuid(picture) if one.node in nodes]
    shared = Counter(node for node, uuid in seen if uuid in own)
    if shared:
        return min(shared, key=lambda node: (-shared[node], node))
    contradicted = bool(own) and name in {node for node, _ in seen}
    return None if contradicted or name not in nodes else name


def _with_uuid(picture: Picture) -> Iterator[tuple[DeviceSeen, str]]:
    for one in picture.devices:
        if one.kind == "gpu" and one.key.gpu_uuid is not None:
            yield one, one.key.gpu_uuid.value


def _addressed(picture: Picture) -> Iterator[tuple[DeviceSeen, str]]:
    """A PCI address counts within one node, and a share of a GPU has that of the whole."""
    for one in picture.devices:
        if one.kind in ("gpu", "nic") and one.key.pci_address is not None:
            yield one, one.key.pci_address.value
