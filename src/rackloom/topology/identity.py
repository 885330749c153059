"""The join key: the one value that ties the names of a GPU across layers.

A switch controller knows a GPU as (domain uuid, chassis serial, slot, module id) and as a 64-bit fabric
GUID; Kubernetes knows a GPU UUID, a PCI address and a clique label. The strings are not comparable, so a
layer publishes the parts that it knows and `joins` decides whether two keys name the same GPU.

A PCI address repeats on every machine, so it takes part only where the caller knows from elsewhere (it read
both keys on one node) that one machine printed both.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from rackloom.errors import Refused
from rackloom.topology.facts import Fact, directness

T = TypeVar("T")


class SlotKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Where a GPU sits: it survives a swap of the tray, which changes every GUID and UUID."""

    chassis_serial: str
    slot: int
    """Slot of the compute tray in the chassis."""
    module_id: int
    """1-based position on the tray (NMX: device id; REST deviceInstance is module_id - 1)."""


class GpuKey(msgspec.Struct, frozen=True, gc=False):
    """What one layer knows of a GPU's identity; unknown parts are None."""

    place: Fact[SlotKey] | None = None
    fabric_guid: Fact[int] | None = None
    """64-bit NVLink fabric GUID (NMX: gpu_uid)."""
    gpu_uuid: Fact[str] | None = None
    """`GPU-...` as NVML and the GPU driver print it."""
    pci_address: Fact[str] | None = None
    """Lower-case `dddd:bb:dd.f`, meaningful only within one machine."""


def joins(a: GpuKey, b: GpuKey, *, one_machine: bool = False) -> bool | None:
    """Whether two keys name the same GPU.

    False when any part that both know differs (a swapped tray keeps its place and changes its GUIDs: another
    GPU). True when such parts agree. None when there are none: it cannot be told. PCI addresses count only
    with `one_machine`.
    """
    agree = [ours.value == theirs.value for _, ours, theirs in _shared(a, b, one_machine)]
    return all(agree) if agree else None


def merge(a: GpuKey, b: GpuKey) -> GpuKey:
    """All that two keys of one GPU know; where both know a part, the more direct source is kept.

    That it is one GPU is the caller's claim, hence one machine: every shared part must agree, PCI addresses
    included. Refused otherwise, with both values and sources.
    """
    for part, ours, theirs in _shared(a, b, one_machine=True):
        if ours.value != theirs.value:
            raise Refused(
                f"{part} is {_told(ours)} but {_told(theirs)}: not one GPU, or one of the two is stale",
                nearest_fix="observe both again",
            )
    return GpuKey(
        place=_better(a.place, b.place),
        fabric_guid=_better(a.fabric_guid, b.fabric_guid),
        gpu_uuid=_better(a.gpu_uuid, b.gpu_uuid),
        pci_address=_better(a.pci_address, b.pci_address),
    )


def _shared(a: GpuKey, b: GpuKey, one_machine: bool) -> Iterator[tuple[str, Fact[object], Fact[object]]]:
    for part in GpuKey.__struct_fields__:
        ours, theirs = getattr(a, part), getattr(b, part)
        comparable = one_machine or part != "pci_address"
        if comparable and ours is not None and theirs is not None:
            yield part, ours, theirs


def _told(fact: Fact[object]) -> str:
    value = hex(fact.value) if isinstance(fact.value, int) else fact.value
    return f"{value} ({fact.source})"


def _better(a: Fact[T] | None, b: Fact[T] | None) -> Fact[T] | None:
    known = [fact for fact in (a, b) if fact is not None]
    return min(known, key=lambda fact: directness(fact.source), default=None)
