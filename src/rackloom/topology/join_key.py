"""The join key: one value that links the names of a GPU across layers, each part with its source.

Each layer sees only part of a rack, and some of its facts are wrong: a virtual machine hides the PCIe
tree, a driver leaves out the NUMA node. A `Fact` therefore carries its `Source`, and `directness` ranks
the sources (kernel, NVML, switch controller, vendor file, declaration).

A switch controller knows a GPU as chassis serial, slot and module id, and as a 64-bit fabric GUID.
Kubernetes knows a GPU UUID, a PCI address and a clique label. These strings are not comparable, so each
layer publishes the parts that it knows as a `GpuKey`.

`joins` compares the parts that both keys have: False if any differs, True if all agree, None if there is
no common part. A replaced tray keeps its slot and changes its GUIDs, so it does not join. A PCI address
repeats on every machine. It counts only if the caller knows that both keys come from one machine.
`merge_keys` unites two keys of one GPU, keeps the more direct source of each part, and raises Refused if a
part contradicts.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from rackloom.errors import Refused

# Facts: a value together with the source that reported it.


T = TypeVar("T")


class Source(StrEnum):
    """The source of a fact, in the words that the command line prints."""

    SYSFS = "sysfs"
    """Read from the kernel of the machine (directly, or through a driver that reads it there)."""
    NVML = "nvml"
    VENDOR_FILE = "vendor-file"
    """A topology file that the vendor of the machine ships (NCCL XML)."""
    DECLARED = "declared"
    """Written down by a person or by vendor documentation. Nothing on the machine confirms it."""
    NMX = "nmx"
    """Reported by an NVLink switch controller (NMX-C or NMX-M)."""


class Fact(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A value and its source."""

    value: T
    source: Source


_DIRECTNESS = (Source.SYSFS, Source.NVML, Source.NMX, Source.VENDOR_FILE, Source.DECLARED)
"""On the device's own machine (kernel, NVML), then from elsewhere, then from a file, then declared."""
_RANK = {source: rank for rank, source in enumerate(_DIRECTNESS)}


def directness(source: Source) -> int:
    """Rank of a source, 0 for the most direct: of two sources that agree, the lower one is named."""
    return _RANK[source]


def least_direct(*sources: Source) -> Source:
    """Source of a conclusion that rests on facts of all `sources`: no better than the weakest of them."""
    return max(sources, key=directness)


# The join key of a GPU.


class SlotKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The position of a GPU. It survives a swap of the tray, which changes every GUID and UUID."""

    chassis_serial: str
    slot: int
    """Slot of the compute tray in the chassis."""
    module_id: int
    """1-based position on the tray (device id of NMX, and module_id - 1 is deviceInstance of REST)."""


class GpuKey(msgspec.Struct, frozen=True, gc=False):
    """The identity of a GPU as one layer knows it. Unknown parts are None."""

    place: Fact[SlotKey] | None = None
    fabric_guid: Fact[int] | None = None
    """64-bit NVLink fabric GUID (NMX: gpu_uid)."""
    gpu_uuid: Fact[str] | None = None
    """`GPU-...` as NVML and the GPU driver print it."""
    pci_address: Fact[str] | None = None
    """Lower-case `dddd:bb:dd.f`, meaningful only within one machine."""


def joins(a: GpuKey, b: GpuKey, *, one_machine: bool = False) -> bool | None:
    """Whether two keys name the same GPU.

    False if any part that both have differs: a swapped tray keeps its slot, but its GUIDs change. True if all
    such parts agree. None if there is none. PCI addresses count only with `one_machine`.
    """
    agree = [ours.value == theirs.value for _, ours, theirs in _shared_parts(a, b, one_machine)]
    return all(agree) if agree else None


def merge_keys(a: GpuKey, b: GpuKey) -> GpuKey:
    """All parts of two keys of one GPU. If both have a part, the more direct source is kept.

    The caller states that both keys are of one GPU, and so of one machine: PCI addresses must agree, too.
    Raises Refused with both values and sources if a part differs.
    """
    merged = merged_if_agreed(a, b)
    if merged is not None:
        return merged
    part, ours, theirs = next(
        (part, ours, theirs)
        for part, ours, theirs in _shared_parts(a, b, one_machine=True)
        if ours.value != theirs.value
    )
    raise Refused(
        f"{part} is {_fact_text(ours)} but {_fact_text(theirs)}: not one GPU, or one of the two is stale",
        nearest_fix="observe both again",
    )


def merged_if_agreed(a: GpuKey, b: GpuKey) -> GpuKey | None:
    """As `merge_keys`, but None if a part contradicts.

    A site merges keys a few hundred thousand times at once, so the parts are written out.
    """
    place, guid, uuid, pci = a.place, a.fabric_guid, a.gpu_uuid, a.pci_address
    other_place, other_guid, other_uuid, other_pci = b.place, b.fabric_guid, b.gpu_uuid, b.pci_address
    if (
        (place is not None and other_place is not None and place.value != other_place.value)
        or (guid is not None and other_guid is not None and guid.value != other_guid.value)
        or (uuid is not None and other_uuid is not None and uuid.value != other_uuid.value)
        or (pci is not None and other_pci is not None and pci.value != other_pci.value)
    ):
        return None
    return GpuKey(
        place if other_place is None else _more_direct(place, other_place),
        guid if other_guid is None else _more_direct(guid, other_guid),
        uuid if other_uuid is None else _more_direct(uuid, other_uuid),
        pci if other_pci is None else _more_direct(pci, other_pci),
    )


def _shared_parts(
    a: GpuKey, b: GpuKey, one_machine: bool
) -> Iterator[tuple[str, Fact[object], Fact[object]]]:
    for part in GpuKey.__struct_fields__:
        ours, theirs = getattr(a, part), getattr(b, part)
        comparable = one_machine or part != "pci_address"
        if comparable and ours is not None and theirs is not None:
            yield part, ours, theirs


def _fact_text(fact: Fact[object]) -> str:
    value = hex(fact.value) if isinstance(fact.value, int) else fact.value
    return f"{value} ({fact.source})"


def _more_direct(a: Fact[T] | None, b: Fact[T]) -> Fact[T]:
    return a if a is not None and (a.source is b.source or _RANK[a.source] <= _RANK[b.source]) else b


def declared_key(
    *,
    uuid: str | None,
    pci_address: str | None,
    chassis_serial: str | None,
    slot: int | None,
    module_id: int | None,
    fabric_guid: str | None,
) -> GpuKey:
    """A GPU's join key. A place needs chassis, slot and module. `fabric_guid` is hexadecimal."""
    place = None
    if chassis_serial is not None and slot is not None and module_id is not None:
        place = Fact(SlotKey(chassis_serial, slot, module_id), Source.DECLARED)
    return GpuKey(
        place=place,
        fabric_guid=None if fabric_guid is None else Fact(int(fabric_guid, 16), Source.DECLARED),
        gpu_uuid=None if uuid is None else Fact(uuid, Source.DECLARED),
        pci_address=None if pci_address is None else Fact(pci_address, Source.DECLARED),
    )
