"""Which devices follow from what is known of the GPUs, and what each name stands for."""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.claim.allocate.objects import Device
from rackloom.claim.node.gpu import attributes as made
from rackloom.claim.node.gpu.condition import Condition, Conditions, Known, taints_of
from rackloom.claim.node.gpu.inventory import Inventory, Vfio
from rackloom.claim.node.gpu.place import NOWHERE, Place
from rackloom.claim.node.values import Value


class Node(Value, frozen=True, kw_only=True):
    """All that is known of a node's GPUs: conditions by UUID, places by PCI address."""

    conditions: Mapping[str, Condition] = {}
    inventory: Inventory = Inventory()
    places: Mapping[str, Place] = {}
    vfio: tuple[Vfio, ...] = ()


def devices_of(node: Node, harmless: frozenset[int]) -> tuple[Device, ...]:
    """What to publish; a GPU that does not answer any more stays, with a taint."""
    return tuple(_devices(node, harmless))


def names_of(node: Node) -> Mapping[str, Known]:
    """What each published name stands for."""
    found: dict[str, Known] = {}
    for one in _ordered(node.conditions):
        if not one.gpu.mig_mode:
            found[made.gpu_name(one.gpu)] = Known(condition=one)
        found.update({made.mig_name(one.gpu, mig): Known(condition=one, mig=mig) for mig in one.gpu.migs})
    found.update({made.vfio_name(vfio): Known(vfio=vfio) for vfio in node.vfio})
    return found


def answers(node: Node, uuid: str) -> bool:
    """Whether a GPU was there at the last look."""
    return any(gpu.uuid == uuid for gpu in node.inventory.gpus)


def _devices(node: Node, harmless: frozenset[int]) -> Iterator[Device]:
    for one in _ordered(node.conditions):
        taints = taints_of(one, harmless)
        for device in _of_gpu(one, node):
            yield msgspec.structs.replace(device, taints=taints)
    yield from map(made.vfio_device, node.vfio)


def _of_gpu(one: Condition, node: Node) -> Iterator[Device]:
    """A GPU in MIG mode is not published whole."""
    place = node.places.get(one.gpu.pci_address, NOWHERE)
    if not one.gpu.mig_mode:
        yield made.gpu_device(one.gpu, node.inventory, place)
    for mig in one.gpu.migs:
        yield made.mig_device(one.gpu, mig, node.inventory, place)


def _ordered(conditions: Conditions) -> list[Condition]:
    """By minor. A lost GPU gives way to one that came with its minor, as after a swap."""
    lost_first = sorted(conditions.values(), key=lambda one: one.lost_since is None)
    by_minor = {one.gpu.minor: one for one in lost_first}
    return [by_minor[minor] for minor in sorted(by_minor)]
