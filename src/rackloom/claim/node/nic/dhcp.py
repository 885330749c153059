"""Asking a DHCP server for the address of an interface (RFC 2131), from the namespace of the calling thread.

One exchange: discover, offer, request, acknowledgement. pyroute2 encodes and decodes. The lease is not
renewed, since the pod that gets the address has no client: it must last as long as the pod.
"""

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pyroute2.dhcp import messages  # type: ignore[import-untyped]
from pyroute2.dhcp.dhcp4socket import AsyncDHCP4Socket  # type: ignore[import-untyped]
from pyroute2.dhcp.enums.dhcp import MessageType, Option  # type: ignore[import-untyped]

from rackloom.claim.opaque.network import LINK, UNIVERSE, Route
from rackloom.errors import Refused, Retry

SECONDS = 5.0
"""How long an answer is waited for, as long as DRANET does."""
_REPEAT_SECONDS = 1.0
_ASKED = (Option.SUBNET_MASK, Option.CLASSLESS_STATIC_ROUTE, Option.LEASE_TIME)
_ETHERNET = 1
logging.getLogger("pyroute2.dhcp").setLevel(logging.CRITICAL)
"""The library tells of every frame that it cannot read, and anybody may send those."""


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """What a server gave: one address, and the routes of option 121.

    A router (option 3) is not taken: it would be a default route, which belongs to the pod's first interface.
    """

    address: str
    """With its prefix length."""
    routes: tuple[Route, ...] = ()


def ask(link: str, seconds: float = SECONDS) -> Leased:
    """The address that a server of the network gives `link`, which must be up. Blocks.

    Raises `Retry` where nobody answers in time or the link cannot be used now, and `Refused` for an answer
    that makes no sense.
    """
    try:
        answer = asyncio.run(_within(link, seconds))
    except TimeoutError as error:
        raise Retry(f"no DHCP server answered on {link} within {seconds:g} s", after=seconds) from error
    except OSError as error:
        raise Retry(f"DHCP on {link}: {error}", after=seconds) from error
    try:
        return leased(answer["yiaddr"], answer["options"])
    except (KeyError, ValueError) as error:
        raise Refused(
            f"the DHCP server's answer on {link} makes no sense: {error}",
            nearest_fix="give interface.addresses, or have the server send an address and its mask",
        ) from error


def leased(address: str, options: dict[str, Any]) -> Leased:
    """The use of an answer's fields. Raises `KeyError` and `ValueError`."""
    one = ipaddress.IPv4Interface(f"{address}/{options['subnet_mask']}")
    return Leased(address=str(one), routes=routes(options.get("classless_static_route", ())))


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


async def _within(link: str, seconds: float) -> Any:
    async with asyncio.timeout(seconds), AsyncDHCP4Socket(link) as server:
        number = secrets.randbelow(2**32 - 1)
        offer = await _answer(server, messages.discover(_ASKED), number, MessageType.OFFER)
        request = messages.request_for_offer(_ASKED, offer)
        return (await _answer(server, request, number, MessageType.ACK)).dhcp


async def _answer(server: Any, request: Any, number: int, wanted: Any) -> Any:
    """Ask until there is an answer of the wanted kind to the exchange `number`."""
    request.dhcp["xid"] = number
    request.dhcp["options"]["client_id"] = {"type": _ETHERNET, "key": server.l2addr}
    while True:
        await server.put(request)
        try:
            async with asyncio.timeout(_REPEAT_SECONDS):
                return await _received(server, number, wanted)
        except TimeoutError:
            continue


async def _received(server: Any, number: int, wanted: Any) -> Any:
    while True:
        told = await server.get()
        if told.dhcp["xid"] == number and told.dhcp["options"].get("message_type") == wanted:
            return told
