"""Rack profiles, and the site of racks, NVLink domains and compute trays that they describe.

The relation of racks to NVLink domains is many-to-many: two cabled NVL36 racks form one domain, and other
products hold several domains in a rack. Numbers of trays and GPUs are read from the `RackProfile`, never
assumed. A profile whose trays do not divide evenly over the racks of a domain is refused.

`build_site` lays out a site as it was ordered, before anything was observed. Racks that share a domain
are adjacent, and each domain takes the same number of trays from each of its racks. Only positions
(chassis serial, slot, module id) are known at this point, with the source `declared`. GUIDs, UUIDs and PCI
addresses come from observation. Names come from an `IdSource`, so the result does not depend on a
clock or on random numbers. Raises Refused if the racks do not make whole domains, and names the next
number that does.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source


class RackProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rack-scale product."""

    name: str
    product: str
    """Product name of the GPU, e.g. `NVIDIA GB200`."""
    racks_per_domain: int
    domains_per_rack: int
    trays_per_domain: int
    gpus_per_tray: int
    nvlink_links_per_gpu: int | None
    nvlink_gbytes_per_s_per_gpu: int
    """GB/s, both directions."""
    switch_trays_per_domain: int
    tray_machine: str | None
    """Machine profile that a compute tray resembles. None if no such machine is published."""
    note: str
    origin: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse a domain that takes unequal numbers of trays from its racks."""
        if self.trays_per_domain % self.racks_per_domain:
            raise ValueError(
                f"{self.name}: {self.trays_per_domain} trays do not divide over {self.racks_per_domain} racks"
            )

    @property
    def gpus_per_domain(self) -> int:
        """GPUs that can share memory over NVLink."""
        return self.trays_per_domain * self.gpus_per_tray


class ComputeTray(msgspec.Struct, frozen=True, kw_only=True):
    """A compute tray: one machine."""

    chassis_serial: str
    slot: int
    """0-based, as the switch controller counts the compute trays of a chassis."""
    tray_index: int
    rack: str
    gpus: tuple[GpuKey, ...]
    """In module-id order, module 1 first."""


class NvlinkDomain(msgspec.Struct, frozen=True, kw_only=True):
    """An NVLink domain: the GPUs that one switch fabric joins."""

    uuid: str
    racks: tuple[str, ...]
    trays: tuple[ComputeTray, ...]


class RackSite(msgspec.Struct, frozen=True, kw_only=True):
    """All domains of a site."""

    name: str
    domains: tuple[NvlinkDomain, ...]


class IdSource(Protocol):
    """Names of a site and its parts. Indices count from 0 over the whole site."""

    def site(self) -> str:
        """Name of the site."""

    def rack(self, index: int) -> str:
        """Name of a rack."""

    def chassis_serial(self, rack: int) -> str:
        """Serial of a rack's chassis, which all its compute trays share."""

    def domain_uuid(self, index: int) -> str:
        """UUID of an NVLink domain, as its switch controller will give it."""


def build_site(profile: RackProfile, racks: int, ids: IdSource) -> RackSite:
    """The declared site of `racks` racks. Raises Refused when they do not make whole domains.

    Racks that share domains are adjacent: `racks_per_domain` of them carry `domains_per_rack`
    domains, and each domain takes the same number of trays from each of its racks.
    """
    per_domain = profile.racks_per_domain
    if racks < 1 or racks % per_domain:
        enough = max(-(-racks // per_domain), 1) * per_domain
        raise Refused(
            f"{_rack_count_text(racks)} of {profile.name} do not make whole domains:"
            f" each spans {_rack_count_text(per_domain)}",
            nearest_fix=f"use {_rack_count_text(enough)}",
        )
    domains = racks // per_domain * profile.domains_per_rack
    return RackSite(
        name=ids.site(), domains=tuple(_build_domain(profile, index, ids) for index in range(domains))
    )


def _rack_count_text(racks: int) -> str:
    return "1 rack" if racks == 1 else f"{racks} racks"


def _build_domain(profile: RackProfile, index: int, ids: IdSource) -> NvlinkDomain:
    group, position = divmod(index, profile.domains_per_rack)
    racks = range(group * profile.racks_per_domain, (group + 1) * profile.racks_per_domain)
    trays = tuple(tray for rack in racks for tray in _build_trays(profile, rack, position, ids))
    return NvlinkDomain(
        uuid=ids.domain_uuid(index), racks=tuple(ids.rack(rack) for rack in racks), trays=trays
    )


def _build_trays(profile: RackProfile, rack: int, position: int, ids: IdSource) -> Iterator[ComputeTray]:
    count = profile.trays_per_domain // profile.racks_per_domain
    serial = ids.chassis_serial(rack)
    for slot in range(position * count, (position + 1) * count):
        gpus = tuple(
            GpuKey(place=Fact(SlotKey(serial, slot, module), Source.DECLARED))
            for module in range(1, profile.gpus_per_tray + 1)
        )
        yield ComputeTray(chassis_serial=serial, slot=slot, tray_index=slot, rack=ids.rack(rack), gpus=gpus)
