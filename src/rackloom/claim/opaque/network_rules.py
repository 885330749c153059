"""What a NetworkConfig must obey, beyond its shape. Each rule names the field it is about."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rackloom.claim.opaque.decode import read_strictly, refuse
from rackloom.claim.opaque.ipv6_rules import addressing_problems, ipv6_problems
from rackloom.claim.opaque.network import LINK, UNIVERSE, Interface, NetworkConfig, Route, Rule, Vrf

KIND = "NetworkConfig"
NAME_LENGTH = 15
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
    config = read_strictly(parameters, NetworkConfig, KIND)
    refuse(KIND, problems(config))
    return config


def problems(config: NetworkConfig) -> tuple[str, ...]:
    """Everything that is wrong with a config."""
    found = [*_interface(config.interface)]
    for number, route in enumerate(config.routes):
        found += [f"routes[{number}].{told}" for told in _route(route)]
    for number, rule in enumerate(config.rules):
        found += [f"rules[{number}].{told}" for told in _rule(rule)]
    for number, neighbor in enumerate(config.neighbors):
        found += [f"neighbors[{number}].destination {told}" for told in _address(neighbor.destination)]
        found += [f"neighbors[{number}].hardwareAddr {told}" for told in _mac(neighbor.hardware_addr)]
    if config.rules and config.interface.vrf is not None:
        found.append("rules do not go with interface.vrf: the VRF has a table of its own")
    return tuple(found)


def _interface(one: Interface) -> Iterator[str]:
    if one.name is not None:
        yield from (f"interface.name {told}" for told in _link_name(one.name))
    for number, address in enumerate(one.addresses):
        yield from (f"interface.addresses[{number}] {told}" for told in _cidr(address))
    yield from addressing_problems(one)
    yield from ipv6_problems(one)
    if one.mtu is not None and one.mtu < SMALLEST_MTU:
        yield f"interface.mtu is {one.mtu}, below {SMALLEST_MTU}"
    if one.mtu is not None and one.mtu > LARGEST_MTU:
        yield f"interface.mtu is {one.mtu}, above {LARGEST_MTU}"
    if one.hardware_addr is not None:
        yield from (f"interface.hardwareAddr {told}" for told in _mac(one.hardware_addr))
    yield from _sizes(one)
    if one.arp_ignore is not None and one.arp_ignore not in _ARP_IGNORE:
        yield f"interface.arpIgnore is {one.arp_ignore}, not one of 0, 1, 2, 3, 8"
    if one.arp_announce is not None and one.arp_announce not in _ARP_ANNOUNCE:
        yield f"interface.arpAnnounce is {one.arp_announce}, not 0, 1 or 2"
    if one.vrf is not None:
        yield from (f"interface.vrf.{told}" for told in _vrf(one.vrf))


def _sizes(one: Interface) -> Iterator[str]:
    sizes = {
        "gsoMaxSize": one.gso_max_size,
        "groMaxSize": one.gro_max_size,
        "gsoIPv4MaxSize": one.gso_ipv4_max_size,
        "groIPv4MaxSize": one.gro_ipv4_max_size,
    }
    for name, size in sizes.items():
        if size is not None and not 0 < size < 2**32:
            yield f"interface.{name} is {size}, not a positive 32-bit number"


def _vrf(vrf: Vrf) -> Iterator[str]:
    yield from (f"name {told}" for told in _link_name(vrf.name))
    if vrf.table is not None:
        yield from (f"table {told}" for told in _table(vrf.table, may_be_main=False))


def _route(route: Route) -> Iterator[str]:
    yield from (f"destination {told}" for told in _cidr(route.destination))
    if route.gateway is not None:
        yield from (f"gateway {told}" for told in _address(route.gateway))
    if route.source is not None:
        yield from (f"source {told}" for told in _address(route.source))
    if route.scope not in (UNIVERSE, LINK):
        yield f"scope is {route.scope}, not {UNIVERSE} (universe) or {LINK} (link)"
    elif route.scope == UNIVERSE and route.gateway is None:
        yield f"gateway is missing: a route of universe scope needs one; scope {LINK} (link) does not"
    if not 0 <= route.table <= _LARGEST_TABLE:
        yield f"table is {route.table}, not a routing table"
    families = {_family(text) for text in (route.destination, route.gateway, route.source) if text}
    if len(families - {None}) > 1:
        yield "destination, gateway and source are of different families"


def _rule(rule: Rule) -> Iterator[str]:
    if not 0 <= rule.priority <= _LARGEST_PRIORITY:
        yield f"priority is {rule.priority}, not 0 to {_LARGEST_PRIORITY}"
    for name, text in (("source", rule.source), ("destination", rule.destination)):
        if text is not None:
            yield from (f"{name} {told}" for told in _cidr(text))
    if rule.source and rule.destination and _family(rule.source) != _family(rule.destination):
        yield "source and destination are of different families"
    yield from (f"table {told}" for told in _table(rule.table or MAIN_TABLE, may_be_main=True))


def _table(table: int, *, may_be_main: bool) -> Iterator[str]:
    if not 0 < table <= _LARGEST_TABLE:
        yield f"is {table}, not a routing table"
    elif not may_be_main and table in RESERVED_TABLES:
        yield f"is {table}, which the kernel uses itself"


def _link_name(name: str) -> Iterator[str]:
    if not 0 < len(name.encode()) <= NAME_LENGTH:
        yield f"is {name!r}, not 1 to {NAME_LENGTH} bytes"
    elif name in (".", "..") or any(letter in "/:" or letter.isspace() for letter in name):
        yield f"is {name!r}: the kernel takes no '/', ':' or space in it"


def _mac(text: str) -> Iterator[str]:
    if not _MAC.fullmatch(text):
        yield f"is {text!r}, not 6 (or, for InfiniBand, 20) bytes in hexadecimal"


def _cidr(text: str) -> Iterator[str]:
    return (
        _parsed(ipaddress.ip_interface, text, "a CIDR")
        if "/" in text
        else iter((f"is {text!r}, not a CIDR",))
    )


def _address(text: str) -> Iterator[str]:
    return _parsed(ipaddress.ip_address, text, "an address")


def _parsed(parse: Callable[[str], object], text: str, what: str) -> Iterator[str]:
    try:
        parse(text)
    except ValueError:
        yield f"is {text!r}, not {what}"


def _family(text: str) -> int | None:
    try:
        return ipaddress.ip_interface(text).version
    except ValueError:
        return None
