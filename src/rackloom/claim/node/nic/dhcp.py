"""Speaking DHCP (RFC 2131) on an interface, in the namespace of the calling thread. Blocks, and is bounded.

An address is asked for by discover, offer, request, acknowledgement; one that was given is asked for again by
a single request. When to do so is decided elsewhere (`lease`). pyroute2 encodes and decodes.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
from pyroute2.dhcp import messages  # type: ignore[import-untyped]
from pyroute2.dhcp.dhcp4socket import AsyncDHCP4Socket  # type: ignore[import-untyped]
from pyroute2.dhcp.enums.dhcp import MessageType, Option  # type: ignore[import-untyped]
from pyroute2.dhcp.fsm import State  # type: ignore[import-untyped]

from rackloom.claim.node.nic.dhcp_answers import granted, routes
from rackloom.claim.node.nic.lease import Do, Grant, Lease, Said, began
from rackloom.claim.opaque.network import Route
from rackloom.errors import Refused, Retry

SECONDS = 5.0
"""How long an answer is waited for, as long as DRANET does."""
LEAST_LEASE_SECONDS = 5.0
"""A pod has no use of an address that ends before its renewal is answered."""
_REPEAT_SECONDS = 1.0
_ASKED = (
    Option.SUBNET_MASK,
    Option.CLASSLESS_STATIC_ROUTE,
    Option.LEASE_TIME,
    Option.RENEWAL_TIME,
    Option.REBINDING_TIME,
)
_Wanted = Mapping[Any, str | None]
"""Kinds of answers, each with the identifier of the server that alone may give it, or None for any."""
_OFFER: _Wanted = {MessageType.OFFER: None}
_ACK: _Wanted = {MessageType.ACK: None}
_STATES = {Do.REBOOT: State.REBOOTING, Do.RENEW: State.RENEWING, Do.REBIND: State.REBINDING}
_ETHERNET = 1
_UNREADABLE = (ValueError, LookupError, AssertionError)
"""What the library raises for a frame that it cannot read."""
logging.getLogger("pyroute2.dhcp").setLevel(logging.CRITICAL)
"""The library tells of every frame that it cannot read, and anybody may send those."""


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """What a server gave: one address, and the routes of option 121.

    A router (option 3) is not taken: it would be a default route, which belongs to the pod's first interface.
    """

    lease: Lease
    routes: tuple[Route, ...] = ()


def boot_seconds() -> float:
    """Seconds since the machine was booted, those in which it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ask(link: str, seconds: float = SECONDS) -> Leased:
    """The address that a server of the network gives `link`, which must be up.

    Raises `Retry` where nobody answers in time or the link cannot be used now, and `Refused` for an answer
    that makes no sense or a lease that is too short.
    """
    asked_at = boot_seconds()
    try:
        mac, told = asyncio.run(_asked(link, seconds))
        grant = _long_enough(granted(told), link)
        return Leased(
            lease=began(grant, mac, asked_at),
            routes=routes(told.dhcp["options"].get("classless_static_route", ())),
        )
    except TimeoutError as error:
        raise Retry(f"no DHCP server answered on {link} within {seconds:g} s", after=seconds) from error
    except OSError as error:
        raise Retry(f"DHCP on {link}: {error}", after=seconds) from error
    except (KeyError, ValueError) as error:
        raise Refused(
            f"the DHCP server's answer on {link} makes no sense: {error}",
            nearest_fix="give interface.addresses, or have the server send an address, its mask and a time",
        ) from error


def _long_enough(grant: Grant, link: str) -> Grant:
    if grant.seconds < LEAST_LEASE_SECONDS:
        raise Refused(
            f"DHCP server {grant.server} leases {grant.address} on {link} for {grant.seconds:g} s only,"
            f" too short to be kept up",
            nearest_fix=f"have it lease for {LEAST_LEASE_SECONDS:g} s or more, or give interface.addresses",
        )
    return grant


def ask_again(link: str, lease: Lease, way: Do, seconds: float = SECONDS) -> Grant | Said:
    """What comes of one request for an address that was given before. Raises `OSError`."""
    try:
        return asyncio.run(_asked_again(link, lease, way, seconds))
    except (TimeoutError, KeyError, ValueError):
        return Said.NOTHING


def release(link: str, lease: Lease) -> None:
    """Tell the server that the address is not used any more. Nobody answers that. Raises `OSError`."""
    asyncio.run(_released(link, lease))


async def _asked(link: str, seconds: float) -> tuple[str, Any]:
    async with asyncio.timeout(seconds), AsyncDHCP4Socket(link) as server:
        mac, number = server.l2addr, secrets.randbelow(2**32 - 1)
        offer = await _answer(server, _from(mac, messages.discover(_ASKED), number), _OFFER)
        request = _from(mac, messages.request_for_offer(_ASKED, offer), number)
        return mac, await _answer(server, request, _ACK)


async def _asked_again(link: str, lease: Lease, way: Do, seconds: float) -> Grant | Said:
    """Once: when it is repeated is the lease's business.

    A no is for good, so only the server that gave the lease can say it. Any may prolong it by a broadcast.
    """
    request = messages.request_for_lease(_ASKED, _as_the_library_has_it(lease), _STATES[way])
    if way is Do.REBIND:
        request.ip_src = _ip(lease)
    number = secrets.randbelow(2**32 - 1)
    async with asyncio.timeout(seconds), AsyncDHCP4Socket(link) as server:
        await server.put(_from(lease.mac, request, number))
        own = lease.grant.server
        wanted = {MessageType.ACK: own if way is Do.RENEW else None, MessageType.NAK: own}
        told = await _received(server, number, wanted)
    return Said.NO if told.message_type == MessageType.NAK else granted(told)


async def _released(link: str, lease: Lease) -> None:
    async with AsyncDHCP4Socket(link) as server:
        number = secrets.randbelow(2**32 - 1)
        await server.put(_from(lease.mac, messages.release(_as_the_library_has_it(lease)), number))


def _as_the_library_has_it(lease: Lease) -> Any:
    grant = lease.grant
    return SimpleNamespace(ip=_ip(lease), server_id=grant.server, server_mac=grant.server_mac)


def _ip(lease: Lease) -> str:
    return lease.grant.address.partition("/")[0]


def _from(mac: str, request: Any, number: int) -> Any:
    """As the client that `mac` is to the server, whatever the interface has now."""
    request.dhcp["xid"] = number
    request.dhcp["chaddr"] = mac
    request.dhcp["options"]["client_id"] = {"type": _ETHERNET, "key": mac}
    return request


async def _answer(server: Any, request: Any, wanted: _Wanted) -> Any:
    """Ask until there is an answer of the wanted kind."""
    while True:
        await server.put(request)
        try:
            async with asyncio.timeout(_REPEAT_SECONDS):
                return await _received(server, request.dhcp["xid"], wanted)
        except TimeoutError:
            continue


async def _received(server: Any, number: int, wanted: _Wanted) -> Any:
    """The first answer to the exchange `number` that is wanted. Others are waited past."""
    while True:
        with suppress(*_UNREADABLE):
            told = await server.get()
            options = told.dhcp["options"]
            kind, by = options.get("message_type"), options.get("server_id")
            if told.dhcp["xid"] == number and kind in wanted and wanted[kind] in (None, by):
                return told
