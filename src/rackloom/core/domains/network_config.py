"""The opaque config of `dra.net`: how a network interface is set up inside the pod, and its rules.

Source: the NetworkConfig of kubernetes-sigs/dranet, chart line 1.4, with the IPv6 settings and addressing
modes that its documentation has added since. `decode_network_config` decodes strictly, then
`network_config_problems` checks every rule, and all problems are reported at once, each beginning with
the field. None leaves a setting as it is on the host.

Limits are those of the kernel: 15 bytes for an interface name (IFNAMSIZ), an MTU of 68 (RFC 791) or, with
any IPv6 setting, 1280 (RFC 8200) to 2^31 - 1, reserved routing tables 253 to 255. Combinations that
cannot work are refused: DHCP beside static addresses, SLAAC with router advertisements disabled, DHCP on a
child of the interface, a hardware address on IPVLAN (it shares its parent's), policy rules beside a VRF.
A VRF without a table gets one from 1000 to 1999 by the FNV-1a hash of its name.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.core.cluster.device_configs import ConfigValue, decode_strictly, refuse_problems

# The config as a value.


UNIVERSE_SCOPE, LINK_SCOPE = 0, 253
"""Route scopes of rtnetlink."""
_VRF_TABLES, _FIRST_VRF_TABLE = 1000, 1000


class InterfaceType(StrEnum):
    """How the pod sees the device."""

    PASSTHROUGH = "Passthrough"
    IPVLAN = "IPVLAN"
    MACVLAN = "MACVLAN"
    """DRANET does not know this one."""

    @property
    def is_child(self) -> bool:
        """Whether the interface stays on the host and the pod gets a child of it."""
        return self is not InterfaceType.PASSTHROUGH


class Addressing(StrEnum):
    """The origin of the interface's addresses."""

    STATIC = "Static"
    DHCP = "DHCP"
    SLAAC = "SLAAC"
    UNNUMBERED = "Unnumbered"


class VrfConfig(ConfigValue, frozen=True, kw_only=True):
    """A virtual routing domain for the interface. Without `table`, one is derived from the name."""

    name: str
    table: int | None = None

    @property
    def routing_table(self) -> int:
        """The table of its routes: 1000 to 1999 by the FNV-1a hash of the name where none is given."""
        if self.table is not None:
            return self.table
        return _fnv32a(self.name.encode()) % _VRF_TABLES + _FIRST_VRF_TABLE


class InterfaceConfig(ConfigValue, frozen=True, kw_only=True):
    """The link. Sizes are bytes, `addresses` are CIDRs. None leaves a setting as it is on the host."""

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
        """Its values below /proc/sys/net/ipv6/conf, by the kernel's names."""
        settings = {
            "accept_ra": self.accept_ra,
            "dad_transmits": self.dad_transmits,
            "router_solicitation_delay": self.router_solicitation_delay,
            "router_solicitation_interval": self.router_solicitation_interval,
            "disable_ipv6": None if self.disable_ipv6 is None else int(self.disable_ipv6),
            "addr_gen_mode": self.addr_gen_mode,
        }
        return {name: value for name, value in settings.items() if value is not None}


class RouteConfig(ConfigValue, frozen=True, kw_only=True):
    """One route through the interface. Table 0 is the main table."""

    destination: str
    gateway: str | None = None
    source: str | None = None
    scope: int = UNIVERSE_SCOPE
    table: int = 0


class RuleConfig(ConfigValue, frozen=True, kw_only=True):
    """One policy routing rule. Table 0 is the main table."""

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
    """The settings that one claim wants for one network device."""

    profile: str | None = None
    interface: InterfaceConfig = InterfaceConfig()
    routes: tuple[RouteConfig, ...] = ()
    rules: tuple[RuleConfig, ...] = ()
    neighbors: tuple[NeighborConfig, ...] = ()
    ethtool: EthtoolConfig = EthtoolConfig()

    @property
    def asks_for_a_netdev(self) -> bool:
        """Whether it has a setting of a network interface, which an RDMA-only device lacks."""
        return self != NetworkConfig(profile=self.profile)


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
    """Read and check a claim's config for driver `dra.net`. Raises Refused with every problem."""
    config = decode_strictly(parameters, NetworkConfig, NETWORK_CONFIG_KIND)
    refuse_problems(NETWORK_CONFIG_KIND, network_config_problems(config))
    return config


def network_config_problems(config: NetworkConfig) -> tuple[str, ...]:
    """Everything that is wrong with a config, each problem with the path of its field."""
    found = [*_interface_problems(config.interface)]
    for number, route in enumerate(config.routes):
        found += _route_problems(f"routes[{number}]", route)
    for number, rule in enumerate(config.rules):
        found += _rule_problems(f"rules[{number}]", rule)
    for number, neighbor in enumerate(config.neighbors):
        found += _address_problems(f"neighbors[{number}].destination", neighbor.destination)
        found += _mac_problems(f"neighbors[{number}].hardwareAddr", neighbor.hardware_addr)
    if config.rules and config.interface.vrf is not None:
        found.append("rules do not go with interface.vrf: the VRF has a table of its own")
    return tuple(found)


def _interface_problems(config: InterfaceConfig) -> Iterator[str]:
    yield from _link_name_problems("interface.name", config.name)
    for number, address in enumerate(config.addresses):
        yield from _cidr_problems(f"interface.addresses[{number}]", address)
    yield from addressing_problems(config)
    yield from ipv6_problems(config)
    if config.mtu is not None and config.mtu < SMALLEST_MTU:
        yield f"interface.mtu is {config.mtu}, below {SMALLEST_MTU}"
    if config.mtu is not None and config.mtu > LARGEST_MTU:
        yield f"interface.mtu is {config.mtu}, above {LARGEST_MTU}"
    yield from _mac_problems("interface.hardwareAddr", config.hardware_addr)
    sizes = {
        "gsoMaxSize": config.gso_max_size,
        "groMaxSize": config.gro_max_size,
        "gsoIPv4MaxSize": config.gso_ipv4_max_size,
        "groIPv4MaxSize": config.gro_ipv4_max_size,
    }
    for name, size in sizes.items():
        if size is not None and not 0 < size < 2**32:
            yield f"interface.{name} is {size}, not a positive 32-bit number"
    if config.arp_ignore is not None and config.arp_ignore not in _ARP_IGNORE:
        yield f"interface.arpIgnore is {config.arp_ignore}, not one of 0, 1, 2, 3, 8"
    if config.arp_announce is not None and config.arp_announce not in _ARP_ANNOUNCE:
        yield f"interface.arpAnnounce is {config.arp_announce}, not 0, 1 or 2"
    if config.vrf is not None:
        yield from _link_name_problems("interface.vrf.name", config.vrf.name)
        yield from _table_problems("interface.vrf.table", config.vrf.table, may_be_main=False)


def _route_problems(field: str, route: RouteConfig) -> Iterator[str]:
    yield from _cidr_problems(f"{field}.destination", route.destination)
    yield from _address_problems(f"{field}.gateway", route.gateway)
    yield from _address_problems(f"{field}.source", route.source)
    if route.scope not in (UNIVERSE_SCOPE, LINK_SCOPE):
        yield f"{field}.scope is {route.scope}, not {UNIVERSE_SCOPE} (universe) or {LINK_SCOPE} (link)"
    elif route.scope == UNIVERSE_SCOPE and route.gateway is None:
        need = f"a route of universe scope needs one; scope {LINK_SCOPE} (link) does not"
        yield f"{field}.gateway is missing: {need}"
    if not 0 <= route.table <= _LARGEST_TABLE:
        yield f"{field}.table is {route.table}, not a routing table"
    families = {_address_family(text) for text in (route.destination, route.gateway, route.source) if text}
    if len(families - {None}) > 1:
        yield f"{field}.destination, gateway and source are of different families"


def _rule_problems(field: str, rule: RuleConfig) -> Iterator[str]:
    if not 0 <= rule.priority <= _LARGEST_PRIORITY:
        yield f"{field}.priority is {rule.priority}, not 0 to {_LARGEST_PRIORITY}"
    yield from _cidr_problems(f"{field}.source", rule.source)
    yield from _cidr_problems(f"{field}.destination", rule.destination)
    if rule.source and rule.destination and _address_family(rule.source) != _address_family(rule.destination):
        yield f"{field}.source and destination are of different families"
    yield from _table_problems(f"{field}.table", rule.table or MAIN_TABLE, may_be_main=True)


# Rules for single values. A field that is left out (None) has no problem.


def _table_problems(field: str, table: int | None, *, may_be_main: bool) -> Iterator[str]:
    if table is not None and not 0 < table <= _LARGEST_TABLE:
        yield f"{field} is {table}, not a routing table"
    elif not may_be_main and table in RESERVED_TABLES:
        yield f"{field} is {table}, which the kernel uses itself"


def _link_name_problems(field: str, name: str | None) -> Iterator[str]:
    if name is None:
        return
    if not 0 < len(name.encode()) <= MAX_INTERFACE_NAME_BYTES:
        yield f"{field} is {name!r}, not 1 to {MAX_INTERFACE_NAME_BYTES} bytes"
    elif name in (".", "..") or any(letter in "/:" or letter.isspace() for letter in name):
        yield f"{field} is {name!r}: the kernel takes no '/', ':' or space in it"


def _mac_problems(field: str, text: str | None) -> Iterator[str]:
    if text is not None and not _MAC.fullmatch(text):
        yield f"{field} is {text!r}, not 6 (or, for InfiniBand, 20) bytes in hexadecimal"


def _cidr_problems(field: str, text: str | None) -> Iterator[str]:
    # ip_interface also takes an address without a prefix length.
    if text is not None and not ("/" in text and _is_parsed_by(ipaddress.ip_interface, text)):
        yield f"{field} is {text!r}, not a CIDR"


def _address_problems(field: str, text: str | None) -> Iterator[str]:
    if text is not None and not _is_parsed_by(ipaddress.ip_address, text):
        yield f"{field} is {text!r}, not an address"


def _is_parsed_by(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _address_family(text: str) -> int | None:
    try:
        return ipaddress.ip_interface(text).version
    except ValueError:
        return None


# Rules for IPv6 settings and for where addresses come from.


SMALLEST_IPV6_MTU = 1280
"""RFC 8200. The kernel has no IPv6 settings for a smaller interface."""
_MAX_INT32 = 2**31 - 1
_IPV6_RANGES = {
    "acceptRA": ("accept_ra", range(3)),
    "dadTransmits": ("dad_transmits", range(_MAX_INT32)),
    "routerSolicitationDelay": ("router_solicitation_delay", range(_MAX_INT32 // 1000)),
    "routerSolicitationInterval": ("router_solicitation_interval", range(1, _MAX_INT32 // 1000)),
    "addrGenMode": ("addr_gen_mode", range(4)),
}
"""By the field's name: the kernel's name, and the values that it takes."""


def ipv6_problems(config: InterfaceConfig) -> Iterator[str]:
    """The problems of the IPv6 settings."""
    for field, (name, allowed) in _IPV6_RANGES.items():
        value = config.ipv6.get(name)
        if value is not None and value not in allowed:
            yield f"interface.{field} is {value}, not {allowed.start} to {allowed.stop - 1}"
    if needs_ipv6(config) and config.mtu is not None and config.mtu < SMALLEST_IPV6_MTU:
        below = f"below {SMALLEST_IPV6_MTU}, with which there is no IPv6 to set"
        yield f"interface.mtu is {config.mtu}, {below}"
    if config.disable_ipv6 and _has_ipv6_address(config):
        yield "interface.disableIPv6 and an IPv6 address in interface.addresses exclude each other"


def addressing_problems(config: InterfaceConfig) -> Iterator[str]:
    """The problems of the origin of the addresses."""
    addressing = config.addressing
    if config.asks_dhcp and config.addresses:
        yield "interface.dhcp and interface.addresses exclude each other"
    # Static is the default, so it may be unwritten: then `dhcp` alone decides.
    contradicts = config.dhcp is not None and config.dhcp != (addressing is Addressing.DHCP)
    if contradicts and addressing is not Addressing.STATIC:
        yield f"interface.dhcp is {str(config.dhcp).lower()}, but interface.addressing is {addressing}"
    yield from _child_problems(config) if config.type.is_child else _passthrough_problems(config)
    if addressing is Addressing.SLAAC:
        conflicts = {
            "an IPv6 address in interface.addresses": _has_ipv6_address(config),
            "interface.acceptRA 0": config.accept_ra == 0,
            "interface.disableIPv6": config.disable_ipv6,
            "interface.addrGenMode 1 or 2": config.addr_gen_mode in (1, 2),
        }
        for setting, is_set in conflicts.items():
            if is_set:
                yield f"interface.addressing SLAAC does not go with {setting}"


def _passthrough_problems(config: InterfaceConfig) -> Iterator[str]:
    """Without addresses the interface has those of the host."""
    if config.addressing is Addressing.UNNUMBERED:
        yield "interface.addressing Unnumbered goes with types IPVLAN and MACVLAN only"


def _child_problems(config: InterfaceConfig) -> Iterator[str]:
    """The host's addresses stay on the host."""
    if config.type is InterfaceType.IPVLAN and config.hardware_addr is not None:
        yield "interface.hardwareAddr does not go with type IPVLAN: the child has its parent's"
    if config.asks_dhcp:
        yield f"interface.addressing DHCP does not go with type {config.type}"
    elif config.addressing is Addressing.UNNUMBERED and config.addresses:
        yield "interface.addressing Unnumbered and interface.addresses exclude each other"
    elif config.addressing is Addressing.STATIC and not config.addresses:
        yield (
            f"interface.type {config.type} has no address: give interface.addresses,"
            " or interface.addressing SLAAC or Unnumbered"
        )


def needs_ipv6(config: InterfaceConfig) -> bool:
    """Whether it sets anything that only an interface with IPv6 has."""
    return bool(config.ipv6) or config.addressing is Addressing.SLAAC


def _has_ipv6_address(config: InterfaceConfig) -> bool:
    return any(":" in address for address in config.addresses)


def is_ipv6(cidr: str) -> bool:
    """Whether a checked CIDR is of IPv6."""
    return ipaddress.ip_interface(cidr).version == 6
