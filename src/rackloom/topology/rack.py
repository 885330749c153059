"""Racks, NVLink domains and trays, as data.

Rack to domain is many-to-many: two cabled NVL36 racks form one domain, and newer racks hold several.
Trays per rack and GPUs per tray are read from the profile, never assumed.
"""

import msgspec

from rackloom.topology.identity import GpuKey


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
    """Machine profile that a compute tray resembles; None where no such machine is published."""
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


class Tray(msgspec.Struct, frozen=True, kw_only=True):
    """A compute tray: one machine."""

    chassis_serial: str
    slot: int
    """0-based, as the switch controller counts the compute trays of a chassis."""
    tray_index: int
    rack: str
    gpus: tuple[GpuKey, ...]
    """In module-id order, module 1 first."""


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """An NVLink domain: the GPUs that one switch fabric joins."""

    uuid: str
    racks: tuple[str, ...]
    trays: tuple[Tray, ...]


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """All domains of a site."""

    name: str
    domains: tuple[Domain, ...]
