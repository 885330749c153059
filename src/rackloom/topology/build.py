"""A site as it was ordered: racks, domains and trays of one rack profile, before anything was observed.

Only places are known at this point; GUIDs, UUIDs and PCI addresses come from observation.
"""

from collections.abc import Iterator
from typing import Protocol

from rackloom.errors import Refused
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey
from rackloom.topology.rack import Domain, RackProfile, Site, Tray


class IdSource(Protocol):
    """Names of a site and its parts; indices count from 0 over the whole site."""

    def site(self) -> str:
        """Name of the site."""

    def rack(self, index: int) -> str:
        """Name of a rack."""

    def chassis_serial(self, rack: int) -> str:
        """Serial of a rack's chassis, which all its compute trays share."""

    def domain_uuid(self, index: int) -> str:
        """UUID of an NVLink domain, as its switch controller will give it."""


def build_site(profile: RackProfile, racks: int, ids: IdSource) -> Site:
    """The declared site of `racks` racks; Refused when they do not make whole domains.

    Racks that share domains stand next to each other: `racks_per_domain` of them carry `domains_per_rack`
    domains, and each domain takes the same number of trays from each of its racks.
    """
    _require_whole_domains(profile, racks)
    domains = racks // profile.racks_per_domain * profile.domains_per_rack
    return Site(name=ids.site(), domains=tuple(_domain(profile, index, ids) for index in range(domains)))


def _require_whole_domains(profile: RackProfile, racks: int) -> None:
    per_domain = profile.racks_per_domain
    if racks >= 1 and racks % per_domain == 0:
        return
    enough = max(-(-racks // per_domain), 1) * per_domain
    raise Refused(
        f"{_counted(racks)} of {profile.name} do not make whole domains: each spans {_counted(per_domain)}",
        nearest_fix=f"use {_counted(enough)}",
    )


def _counted(racks: int) -> str:
    return "1 rack" if racks == 1 else f"{racks} racks"


def _domain(profile: RackProfile, index: int, ids: IdSource) -> Domain:
    group, position = divmod(index, profile.domains_per_rack)
    racks = range(group * profile.racks_per_domain, (group + 1) * profile.racks_per_domain)
    trays = tuple(tray for rack in racks for tray in _trays(profile, rack, position, ids))
    return Domain(uuid=ids.domain_uuid(index), racks=tuple(ids.rack(rack) for rack in racks), trays=trays)


def _trays(profile: RackProfile, rack: int, position: int, ids: IdSource) -> Iterator[Tray]:
    count = profile.trays_per_domain // profile.racks_per_domain
    serial = ids.chassis_serial(rack)
    for slot in range(position * count, (position + 1) * count):
        gpus = tuple(_gpu(serial, slot, module) for module in range(1, profile.gpus_per_tray + 1))
        yield Tray(chassis_serial=serial, slot=slot, tray_index=slot, rack=ids.rack(rack), gpus=gpus)


def _gpu(chassis_serial: str, slot: int, module_id: int) -> GpuKey:
    return GpuKey(place=Fact(SlotKey(chassis_serial, slot, module_id), Source.DECLARED))
