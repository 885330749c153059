"""The switch fabrics of a simulated site: one per NVLink domain, with GUIDs of their own."""

import hashlib
from collections.abc import Iterator

from rackloom.topology.rack import Domain, Site
from rackloom.twin.switches.fabric import FabricGpu, FabricLimits, SimulatedFabric

MOST_RACKS = 128
"""Each domain has a controller in this process; more would not start in a time that anybody waits."""


def fabrics_of(site: Site, seed: str) -> tuple[SimulatedFabric, ...]:
    """A fabric at its first boot for each domain of `site`; equal seeds give equal GUIDs."""
    return tuple(_fabric(domain, seed) for domain in site.domains)


def _fabric(domain: Domain, seed: str) -> SimulatedFabric:
    trays = domain.trays
    limits = FabricLimits(
        max_compute_nodes=len(trays), max_gpus_per_compute_node=max(len(tray.gpus) for tray in trays)
    )
    return SimulatedFabric(domain.uuid, _gpus(domain, seed), limits)


def _gpus(domain: Domain, seed: str) -> Iterator[FabricGpu]:
    chassis = {
        serial: number for number, serial in enumerate(sorted({t.chassis_serial for t in domain.trays}))
    }
    for host_id, tray in enumerate(domain.trays, 1):
        for module_id in range(1, len(tray.gpus) + 1):
            yield FabricGpu(
                guid=_guid(seed, tray.chassis_serial, tray.slot, module_id),
                chassis_serial=tray.chassis_serial,
                chassis_id=chassis[tray.chassis_serial],
                slot=tray.slot,
                host_id=host_id,
                tray_index=tray.tray_index,
                module_id=module_id,
            )


def _guid(seed: str, chassis_serial: str, slot: int, module_id: int) -> int:
    """A 64-bit GUID that says nothing of where the GPU sits; above 2**63 as those of real fabrics are."""
    seat = f"{seed} fabric guid {chassis_serial} {slot} {module_id}"
    return int.from_bytes(hashlib.blake2b(seat.encode(), digest_size=8).digest()) | 1 << 63
