"""The join key: the one value that ties the names of a GPU across layers.

A switch controller knows a GPU as (domain uuid, chassis serial, slot, module id) and as a 64-bit fabric
GUID; Kubernetes knows a GPU UUID, a PCI address and a clique label. The strings are not comparable, so a
layer publishes the parts that it knows and `joins` decides whether two keys name the same GPU.
"""

import msgspec

from rackloom.topology.facts import Fact


class SlotKey(msgspec.Struct, frozen=True, order=True):
    """Where a GPU sits: it survives a swap of the tray, which changes every GUID and UUID."""

    chassis_serial: str
    slot: int
    """Slot of the compute tray in the chassis."""
    module_id: int
    """1-based position on the tray (NMX: device id; REST deviceInstance is module_id - 1)."""


class GpuKey(msgspec.Struct, frozen=True):
    """What one layer knows of a GPU's identity; unknown parts are None."""

    place: Fact[SlotKey] | None = None
    fabric_guid: Fact[int] | None = None
    """64-bit NVLink fabric GUID (NMX: gpu_uid)."""
    gpu_uuid: Fact[str] | None = None
    """`GPU-...` as NVML and the GPU driver print it."""
    pci_address: Fact[str] | None = None
    """Lower-case `dddd:bb:dd.f`, meaningful only within one machine."""
