"""The opaque config of `dra.net`: how a network interface is set up inside the pod, and its rules.

Source: the NetworkConfig of kubernetes-sigs/dranet, chart line 1.4, with the IPv6 settings and addressing
modes that its documentation has added since. `decode_network_config` decodes strictly, then
`network_config_problems` checks every rule, and all problems are reported at once, each beginning with
the field. None leaves a setting as it is on the host.

Limits are those of the kernel: 15 bytes for an interface name (IFNAMSIZ), an MTU of 68 (RFC 791) or, with
any IPv6 setting, 1280 (RFC 8200) to 2^31 - 1, reserved routing tables 253 to 255. Combinations that
cannot work are refused: DHCP beside static addresses, SLAAC with router advertisements disabled, DHCP or
a hardware address on IPVLAN (it shares its parent's), policy rules beside a VRF. A VRF without a table
gets one from 1000 to 1999 by the FNV-1a hash of its name.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.core.domains.device_configs import ConfigValue, decode_strictly, refuse_problems

# The config as a value.


UNIVERSE_SCOPE, LINK_SCOPE = 0, 253
"""Route scopes of rtnetlink."""
_VRF_TABLES, _FIRST_VRF_TABLE = 1000, 1000


class InterfaceType(StrEnum):
    """How the pod sees the device."""

    PASSTHROUGH = "Passthrough"
    IPVLAN = "IPVLAN"


class Addressing(StrEnum):
    """Where the interface's addresses come from."""

    STATIC = "Static"
    DHCP = "DHCP"
    SLAAC = "SLAAC"
    UNNUMBERED = "Unnumbered"


class VrfConfig(ConfigValue, frozen=True, kw_only=True):
    """A virtual routing domain for the interface; without `table` one is derived from the name."""

    name: str
    table: int | None = None

    @property
    def routing_table(self) -> int:
        """The table of its routes: 1000 to 1999 by the FNV-1a hash of the name where none is given."""
        if self.table is not None:
            return self.table
        return _fnv32a(self.name.encode()) % _VRF_TABLES + _FIRST_VRF_TABLE


class InterfaceConfig(ConfigValue, frozen=True, kw_only=True):
    """The link itself. Sizes are bytes; `addresses` are CIDRs; None leaves a setting as it is on the host."""

    name: str | None = None
    type: InterfaceType = InterfaceType.PASSTHROUGH
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
    vrf: VrfConfig | None = None

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


class RouteConfig(ConfigValue, frozen=True, kw_only=True):
    """One route through the interface; table 0 is the main table."""

    destination: str
    gateway: str | None = None
    source: str | None = None
    scope: int = UNIVERSE_SCOPE
    table: int = 0


class RuleConfig(ConfigValue, frozen=True, kw_only=True):
    """One policy routing rule; table 0 is the main table."""

    table: int = 0
    priority: int = 0
    source: str | None = None
    destination: str | None = None


class NeighborConfig(ConfigValue, frozen=True, kw_only=True):
    """One permanent neighbour."""

    destination: str
    hardware_addr: str


class EthtoolConfig(ConfigValue, frozen=True, kw_only=True):
    """Features and private flags by their ethtool names."""

    features: Mapping[str, bool] = {}
    private_flags: Mapping[str, bool] = {}


class NetworkConfig(ConfigValue, frozen=True, kw_only=True):
    """All that one claim asks of one network device."""

    profile: str | None = None
    interface: InterfaceConfig = InterfaceConfig()
    routes: tuple[RouteConfig, ...] = ()
    rules: tuple[RuleConfig, ...] = ()
    neighbors: tuple[NeighborConfig, ...] = ()
    ethtool: EthtoolConfig = EthtoolConfig()

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


# Rules for names, addresses, routes and policy rules.


NETWORK_CONFIG_KIND = "NetworkConfig"
MAX_INTERFACE_NAME_BYTES = 15
"""IFNAMSIZ less its final zero byte."""
SMALLEST_MTU = 68
"""The smallest that IPv4 allows (RFC 791)."""
LARGEST_MTU = 2**31 - 1
"""The kernel keeps it in a signed 32-bit number."""
MAIN_TABLE = 254
RESERVED_TABLES = range(253, 256)
"""default, main and local."""
_ARP_IGNORE = frozenset({0, 1, 2, 3, 8})
_ARP_ANNOUNCE = frozenset({0, 1, 2})
_LARGEST_PRIORITY = 32767
_LARGEST_TABLE = 2**32 - 1
_MAC = re.compile(r"[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}|[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){19}")


def decode_network_config(parameters: Mapping[str, Any]) -> NetworkConfig:
    """Read and check what a claim says for driver `dra.net`. Raises Refused with every problem found."""
    config = decode_strictly(parameters, NetworkConfig, NETWORK_CONFIG_KIND)
    refuse_problems(NETWORK_CONFIG_KIND, network_config_problems(config))
    return config


def network_config_problems(config: NetworkConfig) -> tuple[str, ...]:
    """Everything that is wrong with a config."""
    found = [*_interface_problems(config.interface)]
    for number, route in enumerate(config.routes):
        found += [f"routes[{number}].{told}" for told in _route_problems(route)]
    for number, rule in enumerate(config.rules):
        found += [f"rules[{number}].{told}" for told in _rule_problems(rule)]
    for number, neighbor in enumerate(config.neighbors):
        found += [
            f"neighbors[{number}].destination {told}" for told in _address_problems(neighbor.destination)
        ]
        found += [
            f"neighbors[{number}].hardwareAddr {told}" for told in _mac_problems(neighbor.hardware_addr)
        ]
    if config.rules and config.interface.vrf is not None:
        found.append("rules do not go with interface.vrf: the VRF has a table of its own")
    return tuple(found)


def _interface_problems(interface_config: InterfaceConfig) -> Iterator[str]:
    if interface_config.name is not None:
        yield from (f"interface.name {told}" for told in _link_name_problems(interface_config.name))
    for number, address in enumerate(interface_config.addresses):
        yield from (f"interface.addresses[{number}] {told}" for told in _cidr_problems(address))
    yield from addressing_problems(interface_config)
    yield from ipv6_problems(interface_config)
    if interface_config.mtu is not None and interface_config.mtu < SMALLEST_MTU:
        yield f"interface.mtu is {interface_config.mtu}, below {SMALLEST_MTU}"
    if interface_config.mtu is not None and interface_config.mtu > LARGEST_MTU:
        yield f"interface.mtu is {interface_config.mtu}, above {LARGEST_MTU}"
    if interface_config.hardware_addr is not None:
        yield from (
            f"interface.hardwareAddr {told}" for told in _mac_problems(interface_config.hardware_addr)
        )
    yield from _size_problems(interface_config)
    if interface_config.arp_ignore is not None and interface_config.arp_ignore not in _ARP_IGNORE:
        yield f"interface.arpIgnore is {interface_config.arp_ignore}, not one of 0, 1, 2, 3, 8"
    if interface_config.arp_announce is not None and interface_config.arp_announce not in _ARP_ANNOUNCE:
        yield f"interface.arpAnnounce is {interface_config.arp_announce}, not 0, 1 or 2"
    if interface_config.vrf is not None:
        yield from (f"interface.vrf.{told}" for told in _vrf_problems(interface_config.vrf))


def _size_problems(interface_config: InterfaceConfig) -> Iterator[str]:
    sizes = {
        "gsoMaxSize": interface_config.gso_max_size,
        "groMaxSize": interface_config.gro_max_size,
        "gsoIPv4MaxSize": interface_config.gso_ipv4_max_size,
        "groIPv4MaxSize": interface_config.gro_ipv4_max_size,
    }
    for name, size in sizes.items():
        if size is not None and not 0 < size < 2**32:
            yield f"interface.{name} is {size}, not a positive 32-bit number"


def _vrf_problems(vrf: VrfConfig) -> Iterator[str]:
    yield from (f"name {told}" for told in _link_name_problems(vrf.name))
    if vrf.table is not None:
        yield from (f"table {told}" for told in _table_problems(vrf.table, may_be_main=False))


def _route_problems(route: RouteConfig) -> Iterator[str]:
    yield from (f"destination {told}" for told in _cidr_problems(route.destination))
    if route.gateway is not None:
        yield from (f"gateway {told}" for told in _address_problems(route.gateway))
    if route.source is not None:
        yield from (f"source {told}" for told in _address_problems(route.source))
    if route.scope not in (UNIVERSE_SCOPE, LINK_SCOPE):
        yield f"scope is {route.scope}, not {UNIVERSE_SCOPE} (universe) or {LINK_SCOPE} (link)"
    elif route.scope == UNIVERSE_SCOPE and route.gateway is None:
        yield f"gateway is missing: a route of universe scope needs one; scope {LINK_SCOPE} (link) does not"
    if not 0 <= route.table <= _LARGEST_TABLE:
        yield f"table is {route.table}, not a routing table"
    families = {_address_family(text) for text in (route.destination, route.gateway, route.source) if text}
    if len(families - {None}) > 1:
        yield "destination, gateway and source are of different families"


def _rule_problems(rule: RuleConfig) -> Iterator[str]:
    if not 0 <= rule.priority <= _LARGEST_PRIORITY:
        yield f"priority is {rule.priority}, not 0 to {_LARGEST_PRIORITY}"
    for name, text in (("source", rule.source), ("destination", rule.destination)):
        if text is not None:
            yield from (f"{name} {told}" for told in _cidr_problems(text))
    if rule.source and rule.destination and _address_family(rule.source) != _address_family(rule.destination):
        yield "source and destination are of different families"
    yield from (f"table {told}" for told in _table_problems(rule.table or MAIN_TABLE, may_be_main=True))


def _table_problems(table: int, *, may_be_main: bool) -> Iterator[str]:
    if not 0 < table <= _LARGEST_TABLE:
        yield f"is {table}, not a routing table"
    elif not may_be_main and table in RESERVED_TABLES:
        yield f"is {table}, which the kernel uses itself"


def _link_name_problems(name: str) -> Iterator[str]:
    if not 0 < len(name.encode()) <= MAX_INTERFACE_NAME_BYTES:
        yield f"is {name!r}, not 1 to {MAX_INTERFACE_NAME_BYTES} bytes"
    elif name in (".", "..") or any(letter in "/:" or letter.isspace() for letter in name):
        yield f"is {name!r}: the kernel takes no '/', ':' or space in it"


def _mac_problems(text: str) -> Iterator[str]:
    if not _MAC.fullmatch(text):
        yield f"is {text!r}, not 6 (or, for InfiniBand, 20) bytes in hexadecimal"


def _cidr_problems(text: str) -> Iterator[str]:
    return (
        _parse_problems(ipaddress.ip_interface, text, "a CIDR")
        if "/" in text
        else iter((f"is {text!r}, not a CIDR",))
    )


def _address_problems(text: str) -> Iterator[str]:
    return _parse_problems(ipaddress.ip_address, text, "an address")


def _parse_problems(parse: Callable[[str], object], text: str, what: str) -> Iterator[str]:
    try:
        parse(text)
    except ValueError:
        yield f"is {text!r}, not {what}"


def _address_family(text: str) -> int | None:
    try:
        return ipaddress.ip_interface(text).version
    except ValueError:
        return None


# Rules for IPv6 settings and for where addresses come from.


SMALLEST_IPV6_MTU = 1280
"""RFC 8200; the kernel has no IPv6 settings for a smaller interface."""
_MAX_INT32 = 2**31 - 1
_IPV6_RANGES = {
    "acceptRA": ("accept_ra", range(3)),
    "dadTransmits": ("dad_transmits", range(_MAX_INT32)),
    "routerSolicitationDelay": ("router_solicitation_delay", range(_MAX_INT32 // 1000)),
    "routerSolicitationInterval": ("router_solicitation_interval", range(1, _MAX_INT32 // 1000)),
    "addrGenMode": ("addr_gen_mode", range(4)),
}
"""By the field's name: the kernel's, and what it takes."""


def ipv6_problems(interface_config: InterfaceConfig) -> Iterator[str]:
    """What is wrong with the IPv6 settings; each begins with the field."""
    for field, (name, allowed) in _IPV6_RANGES.items():
        value = interface_config.ipv6.get(name)
        if value is not None and value not in allowed:
            yield f"interface.{field} is {value}, not {allowed.start} to {allowed.stop - 1}"
    if (
        needs_ipv6(interface_config)
        and interface_config.mtu is not None
        and interface_config.mtu < SMALLEST_IPV6_MTU
    ):
        yield f"interface.mtu is {interface_config.mtu}, below {SMALLEST_IPV6_MTU}, with which there is no IPv6 to set"
    if interface_config.disable_ipv6 and _has_ipv6(interface_config):
        yield "interface.disableIPv6 and an IPv6 address in interface.addresses exclude each other"


def addressing_problems(interface_config: InterfaceConfig) -> Iterator[str]:
    """What is wrong with where the addresses come from."""
    if interface_config.asks_dhcp and interface_config.addresses:
        yield "interface.dhcp and interface.addresses exclude each other"
    if (
        interface_config.dhcp is not None
        and interface_config.dhcp != (interface_config.addressing is Addressing.DHCP)
        and _is_not_static(interface_config)
    ):
        yield f"interface.dhcp is {str(interface_config.dhcp).lower()}, but interface.addressing is {interface_config.addressing}"
    if interface_config.type is InterfaceType.IPVLAN and interface_config.hardware_addr is not None:
        yield "interface.hardwareAddr does not go with type IPVLAN: the child has its parent's"
    if interface_config.type is InterfaceType.IPVLAN and interface_config.asks_dhcp:
        yield "interface.addressing DHCP does not go with type IPVLAN"
    if (
        interface_config.type is not InterfaceType.IPVLAN
        and interface_config.addressing is Addressing.UNNUMBERED
    ):
        yield "interface.addressing Unnumbered goes with type IPVLAN only"
    if interface_config.addressing is Addressing.SLAAC:
        yield from _slaac_problems(interface_config)


def needs_ipv6(interface_config: InterfaceConfig) -> bool:
    """Whether it sets anything that only an interface with IPv6 has."""
    return bool(interface_config.ipv6) or interface_config.addressing is Addressing.SLAAC


def _is_not_static(interface_config: InterfaceConfig) -> bool:
    return interface_config.addressing is not Addressing.STATIC


def _slaac_problems(interface_config: InterfaceConfig) -> Iterator[str]:
    against = {
        "an IPv6 address in interface.addresses": _has_ipv6(interface_config),
        "interface.acceptRA 0": interface_config.accept_ra == 0,
        "interface.disableIPv6": bool(interface_config.disable_ipv6),
        "interface.addrGenMode 1 or 2": interface_config.addr_gen_mode in (1, 2),
    }
    yield from (
        f"interface.addressing SLAAC does not go with {what}" for what, holds in against.items() if holds
    )


def _has_ipv6(interface_config: InterfaceConfig) -> bool:
    return any(":" in address for address in interface_config.addresses)


def is_ipv6(cidr: str) -> bool:
    """Whether a checked CIDR is of IPv6."""
    return ipaddress.ip_interface(cidr).version == 6
