"""The opaque config of `dra.net`: what a network interface is to be like inside the pod.

Source: the NetworkConfig of kubernetes-sigs/dranet, chart line 1.4, with the IPv6 settings and ways of
addressing that its documentation has had since.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from rackloom.claim.opaque.decode import ConfigValue

UNIVERSE, LINK = 0, 253
"""Route scopes of rtnetlink."""
_VRF_TABLES, _FIRST_VRF_TABLE = 1000, 1000


class Presented(StrEnum):
    """How the pod sees the device."""

    PASSTHROUGH = "Passthrough"
    IPVLAN = "IPVLAN"


class Addressing(StrEnum):
    """Where the interface's addresses come from."""

    STATIC = "Static"
    DHCP = "DHCP"
    SLAAC = "SLAAC"
    UNNUMBERED = "Unnumbered"


class Vrf(ConfigValue, frozen=True, kw_only=True):
    """A virtual routing domain for the interface; without `table` one is derived from the name."""

    name: str
    table: int | None = None

    @property
    def routing_table(self) -> int:
        """The table of its routes: 1000 to 1999 by the FNV-1a hash of the name where none is given."""
        if self.table is not None:
            return self.table
        return _fnv32a(self.name.encode()) % _VRF_TABLES + _FIRST_VRF_TABLE


class Interface(ConfigValue, frozen=True, kw_only=True):
    """The link itself. Sizes are bytes; `addresses` are CIDRs; None leaves a setting as it is on the host."""

    name: str | None = None
    type: Presented = Presented.PASSTHROUGH
    addressing: Addressing = Addressing.STATIC
    addresses: tuple[str, ...] = ()
    dhcp: bool | None = None
    """The older way to say `addressing: DHCP`."""
    mtu: int | None = None
    hardware_addr: str | None = None
    gso_max_size: int | None = None
    gro_max_size: int | None = None
    gso_ipv4_max_size: int | None = msgspec.field(default=None, name="gsoIPv4MaxSize")
    gro_ipv4_max_size: int | None = msgspec.field(default=None, name="groIPv4MaxSize")
    disable_ebpf_programs: bool | None = None
    forwarding: bool | None = None
    arp_ignore: int | None = None
    arp_announce: int | None = None
    accept_ra: int | None = msgspec.field(default=None, name="acceptRA")
    dad_transmits: int | None = None
    router_solicitation_delay: int | None = None
    router_solicitation_interval: int | None = None
    disable_ipv6: bool | None = msgspec.field(default=None, name="disableIPv6")
    addr_gen_mode: int | None = None
    vrf: Vrf | None = None

    @property
    def asks_dhcp(self) -> bool:
        """Whether a server gives the address."""
        return bool(self.dhcp) or self.addressing is Addressing.DHCP

    @property
    def ipv6(self) -> Mapping[str, int]:
        """What it sets below /proc/sys/net/ipv6/conf, by the kernel's names."""
        said = {
            "accept_ra": self.accept_ra,
            "dad_transmits": self.dad_transmits,
            "router_solicitation_delay": self.router_solicitation_delay,
            "router_solicitation_interval": self.router_solicitation_interval,
            "disable_ipv6": None if self.disable_ipv6 is None else int(self.disable_ipv6),
            "addr_gen_mode": self.addr_gen_mode,
        }
        return {name: value for name, value in said.items() if value is not None}


class Route(ConfigValue, frozen=True, kw_only=True):
    """One route through the interface; table 0 is the main table."""

    destination: str
    gateway: str | None = None
    source: str | None = None
    scope: int = UNIVERSE
    table: int = 0


class Rule(ConfigValue, frozen=True, kw_only=True):
    """One policy routing rule; table 0 is the main table."""

    table: int = 0
    priority: int = 0
    source: str | None = None
    destination: str | None = None


class Neighbor(ConfigValue, frozen=True, kw_only=True):
    """One permanent neighbour."""

    destination: str
    hardware_addr: str


class Ethtool(ConfigValue, frozen=True, kw_only=True):
    """Features and private flags by their ethtool names."""

    features: Mapping[str, bool] = {}
    private_flags: Mapping[str, bool] = {}


class NetworkConfig(ConfigValue, frozen=True, kw_only=True):
    """All that one claim asks of one network device."""

    profile: str | None = None
    interface: Interface = Interface()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    neighbors: tuple[Neighbor, ...] = ()
    ethtool: Ethtool = Ethtool()

    @property
    def asks_for_a_netdev(self) -> bool:
        """Whether it sets anything that only a network interface has; an RDMA-only device has none."""
        plain = NetworkConfig(profile=self.profile)
        return self != plain


def _fnv32a(data: bytes) -> int:
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
