"""The DHCP client (RFC 2131) on the wire.

`request_lease` obtains an address by DISCOVER, OFFER, REQUEST, ACK. `renew_lease` sends one request for an
address that was given. `release_lease` gives it back. `core.nics.lease` decides when. Everything runs
on an interface in the namespace of the calling thread, blocks, and is bounded: 5 s for an answer, as in
DRANET. pyroute2 encodes and decodes.

Only the server that gave a lease can refuse it, since a NAK is final. Any server may prolong it in answer
to a broadcast. A router (option 3) is not taken: it would be a default route, which belongs to the
pod's first interface. Routes of option 121 are. Any host on the network may send frames, so frames that
cannot be read are skipped without a log entry.

Import this module only when a lease is requested: the library's client takes as much memory as
the rest of it, and most nodes never speak DHCP.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from pyroute2.dhcp import messages  # type: ignore[import-untyped]
from pyroute2.dhcp.dhcp4socket import AsyncDHCP4Socket  # type: ignore[import-untyped]
from pyroute2.dhcp.enums.dhcp import MessageType, Option  # type: ignore[import-untyped]
from pyroute2.dhcp.fsm import State  # type: ignore[import-untyped]

from rackloom.claim.node.nic.leases import LeasedAddress, boot_seconds
from rackloom.core.nics.lease import (
    DhcpGrant,
    DhcpLease,
    LeaseAction,
    RequestFailure,
    classless_routes,
    new_lease,
    read_grant,
)
from rackloom.errors import Refused, Retry

# The client.


DHCP_SECONDS = 5.0
"""How long an answer is waited for, as long as DRANET does."""
LEAST_LEASE_SECONDS = 5.0
"""A pod has no use of an address that ends before its renewal is answered."""
_REPEAT_SECONDS = 1.0
_REQUESTED_OPTIONS = (
    Option.SUBNET_MASK,
    Option.CLASSLESS_STATIC_ROUTE,
    Option.LEASE_TIME,
    Option.RENEWAL_TIME,
    Option.REBINDING_TIME,
)
_ExpectedAnswers = Mapping[Any, str | None]
"""Kinds of answers, each with the identifier of the server that alone may give it, or None for any."""
_OFFER: _ExpectedAnswers = {MessageType.OFFER: None}
_ACK: _ExpectedAnswers = {MessageType.ACK: None}
_STATES = {
    LeaseAction.REBOOT: State.REBOOTING,
    LeaseAction.RENEW: State.RENEWING,
    LeaseAction.REBIND: State.REBINDING,
}
_ETHERNET = 1
_UNREADABLE = (ValueError, LookupError, AssertionError)
"""The library's errors for a frame that it cannot read."""
logging.getLogger("pyroute2.dhcp").setLevel(logging.CRITICAL)
"""The library logs every frame that it cannot read, and any host on the network may send those."""


def request_lease(link: str, seconds: float = DHCP_SECONDS) -> LeasedAddress:
    """The address that a server of the network gives `link`, which must be up.

    Raises `Retry` if no server answers in time or the link cannot be used now, and `Refused` for an
    invalid answer or a lease that is too short.
    """
    # A lease counts from the request and not from the answer: the server's clock may have started then.
    asked_at = boot_seconds()
    try:
        mac, answer = asyncio.run(_exchange_request(link, seconds))
        grant = _long_enough(read_grant(answer), link)
        return LeasedAddress(
            lease=new_lease(grant, mac, asked_at),
            routes=classless_routes(answer.dhcp["options"].get("classless_static_route", ())),
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


def _long_enough(grant: DhcpGrant, link: str) -> DhcpGrant:
    if grant.seconds < LEAST_LEASE_SECONDS:
        raise Refused(
            f"DHCP server {grant.server} leases {grant.address} on {link} for {grant.seconds:g} s only,"
            f" too short to be kept up",
            nearest_fix=f"have it lease for {LEAST_LEASE_SECONDS:g} s or more, or give interface.addresses",
        )
    return grant


def renew_lease(
    link: str, lease: DhcpLease, way: LeaseAction, seconds: float = DHCP_SECONDS
) -> DhcpGrant | RequestFailure:
    """The outcome of one request for an address that was given before. Raises `OSError`."""
    try:
        return asyncio.run(_exchange_renewal(link, lease, way, seconds))
    except (TimeoutError, KeyError, ValueError):
        return RequestFailure.NOTHING


def release_lease(link: str, lease: DhcpLease) -> None:
    """Release the address at its server. DHCPRELEASE has no answer. Raises `OSError`."""
    asyncio.run(_send_release(link, lease))


async def _exchange_request(link: str, seconds: float) -> tuple[str, Any]:
    async with asyncio.timeout(seconds), AsyncDHCP4Socket(link) as server:
        mac, number = server.l2addr, secrets.randbelow(2**32 - 1)
        offer = await _answer(
            server, _with_client_id(mac, messages.discover(_REQUESTED_OPTIONS), number), _OFFER
        )
        request = _with_client_id(mac, messages.request_for_offer(_REQUESTED_OPTIONS, offer), number)
        return mac, await _answer(server, request, _ACK)


async def _exchange_renewal(
    link: str, lease: DhcpLease, way: LeaseAction, seconds: float
) -> DhcpGrant | RequestFailure:
    """One request. `core.nics.lease` decides when to repeat it."""
    request = messages.request_for_lease(_REQUESTED_OPTIONS, _library_lease(lease), _STATES[way])
    if way is LeaseAction.REBIND:
        request.ip_src = _ip(lease)
    number = secrets.randbelow(2**32 - 1)
    async with asyncio.timeout(seconds), AsyncDHCP4Socket(link) as server:
        await server.put(_with_client_id(lease.mac, request, number))
        own = lease.grant.server
        # A NAK is final, so only the server that gave the lease may send it. By broadcast any may prolong it.
        wanted = {MessageType.ACK: own if way is LeaseAction.RENEW else None, MessageType.NAK: own}
        answer = await _received(server, number, wanted)
    return RequestFailure.NO if answer.message_type == MessageType.NAK else read_grant(answer)


async def _send_release(link: str, lease: DhcpLease) -> None:
    async with AsyncDHCP4Socket(link) as server:
        number = secrets.randbelow(2**32 - 1)
        await server.put(_with_client_id(lease.mac, messages.release(_library_lease(lease)), number))


def _library_lease(lease: DhcpLease) -> Any:
    grant = lease.grant
    return SimpleNamespace(ip=_ip(lease), server_id=grant.server, server_mac=grant.server_mac)


def _ip(lease: DhcpLease) -> str:
    return lease.grant.address.partition("/")[0]


def _with_client_id(mac: str, request: Any, number: int) -> Any:
    """Identify the client by `mac`, which the server knows, even if the interface's address has changed."""
    request.dhcp["xid"] = number
    request.dhcp["chaddr"] = mac
    request.dhcp["options"]["client_id"] = {"type": _ETHERNET, "key": mac}
    return request


async def _answer(server: Any, request: Any, wanted: _ExpectedAnswers) -> Any:
    """Repeat the request until there is an answer of the wanted kind."""
    while True:
        await server.put(request)
        try:
            async with asyncio.timeout(_REPEAT_SECONDS):
                return await _received(server, request.dhcp["xid"], wanted)
        except TimeoutError:
            continue


async def _received(server: Any, number: int, wanted: _ExpectedAnswers) -> Any:
    """The first wanted answer to the exchange `number`. Others are dropped: any host may send them."""
    while True:
        with suppress(*_UNREADABLE):
            answer = await server.get()
            options = answer.dhcp["options"]
            kind, by = options.get("message_type"), options.get("server_id")
            if answer.dhcp["xid"] == number and kind in wanted and wanted[kind] in (None, by):
                return answer
