"""What a DHCP server's acknowledgement says (RFC 2131, 2132, 3442), as pyroute2 has decoded it. Pure."""

import ipaddress
from collections.abc import Sequence
from typing import Any

from rackloom.claim.node.nic.lease import Grant
from rackloom.claim.opaque.network import LINK, UNIVERSE, Route

_T1, _T2 = 0.5, 0.875
"""Of the lease, where the server does not say (RFC 2131, 4.4.5)."""
LEAST_SECONDS = 60.0
"""From a grant to the request that prolongs it, unless half of the lease is less."""


def granted(told: Any) -> Grant:
    """The use of an acknowledgement. Raises `KeyError` and `ValueError`."""
    options = told.dhcp["options"]
    one = ipaddress.IPv4Interface(f"{told.dhcp['yiaddr']}/{options['subnet_mask']}")
    seconds = _unsigned(options["lease_time"])
    if not seconds:
        raise ValueError("its lease lasts no time")
    renew, rebind = times(seconds, options.get("renewal_time"), options.get("rebinding_time"))
    return Grant(
        address=str(one),
        server=options["server_id"],
        server_mac=told.eth_src,
        seconds=seconds,
        renew_after=renew,
        rebind_after=rebind,
    )


def times(seconds: float, renewal: int | None, rebinding: int | None) -> tuple[float, float]:
    """T1 and T2: what options 58 and 59 say, unless they are out of order or too soon."""
    renew = seconds * _T1 if renewal is None else float(_unsigned(renewal))
    rebind = seconds * _T2 if rebinding is None else float(_unsigned(rebinding))
    if not 0 < renew < rebind < seconds:
        return seconds * _T1, seconds * _T2
    renew = max(renew, min(LEAST_SECONDS, seconds * _T1))
    return renew, rebind if renew < rebind else seconds * _T2


def _unsigned(value: int) -> int:
    """The library reads times as signed numbers."""
    return value & 0xFFFFFFFF


def routes(data: Sequence[int]) -> tuple[Route, ...]:
    """Option 121 (RFC 3442): prefix length, as many bytes of network as it needs, gateway. `ValueError`."""
    found, left = [], bytes(data)
    while left:
        length = left[0]
        used = (length + 7) // 8
        network, gateway = left[1 : 1 + used], left[1 + used : 5 + used]
        if length > 32 or len(gateway) < 4:
            raise ValueError("its routes (option 121) are cut short")
        found.append(_route(network.ljust(4, b"\0"), length, gateway))
        left = left[5 + used :]
    return tuple(found)


def _route(network: bytes, length: int, gateway: bytes) -> Route:
    """A gateway of zeros is none: the network is on the link itself."""
    destination = str(ipaddress.IPv4Interface((network, length)).network)
    if not any(gateway):
        return Route(destination=destination, scope=LINK)
    return Route(destination=destination, gateway=str(ipaddress.IPv4Address(gateway)), scope=UNIVERSE)
