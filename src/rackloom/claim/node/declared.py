"""What files that stand in for a node's hardware declare of a GPU's identity."""

from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey


def declared_key(
    *,
    uuid: str | None,
    pci_address: str | None,
    chassis_serial: str | None,
    slot: int | None,
    module_id: int | None,
    fabric_guid: str | None,
) -> GpuKey:
    """A GPU's join key; a place needs all of chassis, slot and module. `fabric_guid` is hexadecimal."""
    place = None
    if chassis_serial is not None and slot is not None and module_id is not None:
        place = Fact(SlotKey(chassis_serial, slot, module_id), Source.DECLARED)
    return GpuKey(
        place=place,
        fabric_guid=None if fabric_guid is None else Fact(int(fabric_guid, 16), Source.DECLARED),
        gpu_uuid=None if uuid is None else Fact(uuid, Source.DECLARED),
        pci_address=None if pci_address is None else Fact(pci_address, Source.DECLARED),
    )
