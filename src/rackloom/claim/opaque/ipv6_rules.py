"""What a NetworkConfig must obey in its IPv6 settings and in where its addresses come from."""

import ipaddress
from collections.abc import Iterator

from rackloom.claim.opaque.network import Addressing, Interface, Presented

SMALLEST_IPV6_MTU = 1280
"""RFC 8200; the kernel has no IPv6 settings for a smaller interface."""
_LARGEST = 2**31 - 1
_RANGES = {
    "acceptRA": ("accept_ra", range(3)),
    "dadTransmits": ("dad_transmits", range(_LARGEST)),
    "routerSolicitationDelay": ("router_solicitation_delay", range(_LARGEST // 1000)),
    "routerSolicitationInterval": ("router_solicitation_interval", range(1, _LARGEST // 1000)),
    "addrGenMode": ("addr_gen_mode", range(4)),
}
"""By the field's name: the kernel's, and what it takes."""


def ipv6_problems(one: Interface) -> Iterator[str]:
    """What is wrong with the IPv6 settings; each begins with the field."""
    for field, (name, allowed) in _RANGES.items():
        value = one.ipv6.get(name)
        if value is not None and value not in allowed:
            yield f"interface.{field} is {value}, not {allowed.start} to {allowed.stop - 1}"
    if needs_ipv6(one) and one.mtu is not None and one.mtu < SMALLEST_IPV6_MTU:
        yield f"interface.mtu is {one.mtu}, below {SMALLEST_IPV6_MTU}, with which there is no IPv6 to set"
    if one.disable_ipv6 and _has_ipv6(one):
        yield "interface.disableIPv6 and an IPv6 address in interface.addresses exclude each other"


def addressing_problems(one: Interface) -> Iterator[str]:
    """What is wrong with where the addresses come from."""
    if one.asks_dhcp and one.addresses:
        yield "interface.dhcp and interface.addresses exclude each other"
    if one.dhcp is not None and one.dhcp != (one.addressing is Addressing.DHCP) and _says_how(one):
        yield f"interface.dhcp is {str(one.dhcp).lower()}, but interface.addressing is {one.addressing}"
    if one.type is Presented.IPVLAN and one.hardware_addr is not None:
        yield "interface.hardwareAddr does not go with type IPVLAN: the child has its parent's"
    if one.type is Presented.IPVLAN and one.asks_dhcp:
        yield "interface.addressing DHCP does not go with type IPVLAN"
    if one.type is not Presented.IPVLAN and one.addressing is Addressing.UNNUMBERED:
        yield "interface.addressing Unnumbered goes with type IPVLAN only"
    if one.addressing is Addressing.SLAAC:
        yield from _slaac(one)


def needs_ipv6(one: Interface) -> bool:
    """Whether it sets anything that only an interface with IPv6 has."""
    return bool(one.ipv6) or one.addressing is Addressing.SLAAC


def _says_how(one: Interface) -> bool:
    return one.addressing is not Addressing.STATIC


def _slaac(one: Interface) -> Iterator[str]:
    against = {
        "an IPv6 address in interface.addresses": _has_ipv6(one),
        "interface.acceptRA 0": one.accept_ra == 0,
        "interface.disableIPv6": bool(one.disable_ipv6),
        "interface.addrGenMode 1 or 2": one.addr_gen_mode in (1, 2),
    }
    yield from (
        f"interface.addressing SLAAC does not go with {what}" for what, holds in against.items() if holds
    )


def _has_ipv6(one: Interface) -> bool:
    return any(":" in address for address in one.addresses)


def is_ipv6(cidr: str) -> bool:
    """Whether a checked CIDR is of IPv6."""
    return ipaddress.ip_interface(cidr).version == 6
