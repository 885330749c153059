"""The life of one DHCP lease (RFC 2131, section 4.4) as a pure state machine.

`advance_lease` takes the lease, the time, the place of its address (`AddressState`) and perhaps an answer,
and returns the lease afterwards with the actions to take, in order. All times are seconds of one clock
that never jumps and goes on while the machine sleeps (time since boot). A lease never outlives the boot
in which it was given, nor does a pod.

- Until T1 no request is sent. From T1 requests go to the server that gave the lease (RENEWING), from T2 by
  broadcast to any server (REBINDING). Without an answer the next request comes after half of the time
  left in the state, but not before 60 s.
- A lease that no server prolonged is EXPIRED at its end: the address is removed, since another host may
  have it, and requested again. The server's NAK makes it REFUSED for good: a pod does not change its address.
- A restarted plugin, and an interface that does not have the address, send INIT-REBOOT.
- An answer counts only if it was requested after the grant that is in force, and a grant only for the
  same address.

Invariant: the interface has the address only while the lease is in force. The kernel gets the end of the
lease as the address's lifetime, so the address goes even while the plugin is away.

`read_grant` and `classless_routes` read an acknowledgement as pyroute2 decodes it (RFC 2131, 2132, 3442).
T1 and T2 default to 0.5 and 0.875 of the lease.
"""

import ipaddress
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.core.domains.network_config import LINK_SCOPE, UNIVERSE_SCOPE, RouteConfig
from rackloom.core.nics.attachment import NicValue

# The state machine.


REPEAT_SECONDS = 60.0
"""Between two unanswered requests of one state, unless that ends before (RFC 2131, 4.4.5)."""


class LeaseAction(StrEnum):
    """The action of a step. The first three are ways to request the address, by their states of RFC 2131."""

    REBOOT = "INIT-REBOOT"
    """By a broadcast that names the requested address: the interface need not have it."""
    RENEW = "RENEWING"
    """By a message to the server that gave the lease."""
    REBIND = "REBINDING"
    """By a broadcast: any server may prolong it."""
    REMOVE = "remove the address"
    SET = "let it have the address until the lease ends"
    """By the kernel, so that the address goes even while the plugin is away."""
    REPORT = "report the state"


REQUEST_ACTIONS = frozenset({LeaseAction.REBOOT, LeaseAction.RENEW, LeaseAction.REBIND})


class AddressState(StrEnum):
    """The place of the interface, and whether it has the address."""

    HOST = "on the host, without it"
    BARE = "in the pod, without it"
    LOOSE = "in the pod, with it, for another time than its lease lasts"
    SET = "in the pod, with it, for as long as its lease lasts"


_ASSIGNED = frozenset({AddressState.LOOSE, AddressState.SET})


class RequestFailure(StrEnum):
    """The outcome of a request without a grant."""

    NO = "refused"
    NOTHING = "unanswered"


class DhcpGrant(NicValue, frozen=True, kw_only=True):
    """The content of a server's acknowledgement. Seconds count from the request."""

    address: str
    """With its prefix length."""
    server: str
    """Its identifier (option 54)."""
    server_mac: str
    """The source of its frame: the server itself, or the relay before it."""
    seconds: float
    """For ever is 2^32 - 1: no boot lasts 136 years."""
    renew_after: float
    rebind_after: float


class DhcpAnswer(NicValue, frozen=True, kw_only=True):
    """The outcome of the request that was sent at `asked_at`."""

    asked_at: float
    result: DhcpGrant | RequestFailure


class LeaseState(StrEnum):
    """The state of a lease."""

    HELD = "held"
    SILENT = "silent"
    """In force, but the last request was not answered: unknown whether it will be prolonged."""
    EXPIRED = "expired"
    """Not prolonged: another machine may have the address. It is requested again."""
    REFUSED = "refused"
    """Refused by the server that gave it (NAK). Final, since a pod does not change its address."""


LOST_STATES = frozenset({LeaseState.EXPIRED, LeaseState.REFUSED})


class DhcpLease(NicValue, frozen=True, kw_only=True):
    """One address, for as long as its claim is prepared."""

    grant: DhcpGrant
    mac: str
    """The hardware address of the request: the pod's interface may have another one."""
    since: float
    """The start of the grant: the time of the request, not of the answer."""
    ask_at: float
    """When the next request is due."""
    asked_at: float = 0.0
    checked: bool = True
    """Whether it was requested since the plugin started."""
    silent_since: float | None = None
    """When the first request was sent of those that were not answered."""
    state: LeaseState = msgspec.field(default=LeaseState.HELD, name="outlook")

    @property
    def renew_at(self) -> float:
        """T1."""
        return self.since + self.grant.renew_after

    @property
    def rebind_at(self) -> float:
        """T2."""
        return self.since + self.grant.rebind_after

    @property
    def until(self) -> float:
        """From then on the address must not be used."""
        return self.since + self.grant.seconds


class LeaseStep(msgspec.Struct, frozen=True, kw_only=True):
    """The lease afterwards, and the actions to take, in this order."""

    lease: DhcpLease
    todo: tuple[LeaseAction, ...]


def new_lease(grant: DhcpGrant, mac: str, asked_at: float) -> DhcpLease:
    """A lease that was just given."""
    return DhcpLease(
        grant=grant, mac=mac, since=asked_at, asked_at=asked_at, ask_at=asked_at + grant.renew_after
    )


def restored_lease(lease: DhcpLease) -> DhcpLease:
    """A lease after a restart of the plugin: it is requested at once, as it may be lost by now."""
    return msgspec.structs.replace(lease, checked=False, ask_at=0.0)


def advance_lease(
    lease: DhcpLease, now: float, address: AddressState, answer: DhcpAnswer | None = None
) -> LeaseStep:
    """The next step: time has passed, and perhaps an answer came."""
    # The order matters. An answer that came in time counts before the lease can expire, and a lease that
    # expires has its address removed before anything is reported or requested.
    after = _with_answer(lease, answer)
    if after.state not in LOST_STATES and now >= after.until:
        after = msgspec.structs.replace(after, state=LeaseState.EXPIRED, ask_at=now)
    after, requests = _with_request(after, now, address)
    reports = (LeaseAction.REPORT,) if after.state is not lease.state else ()
    return LeaseStep(lease=after, todo=(*_address_actions(after, address), *reports, *requests))


def next_due_at(lease: DhcpLease) -> float:
    """When the next step is due, if no answer comes before."""
    if lease.state is LeaseState.REFUSED:
        return float("inf")
    return lease.ask_at if lease.state in LOST_STATES else min(lease.ask_at, lease.until)


def _with_answer(lease: DhcpLease, answer: DhcpAnswer | None) -> DhcpLease:
    if answer is None:
        return lease
    if isinstance(answer.result, DhcpGrant):
        # A grant counts only for the same address, from after the newest grant, and not after a refusal.
        offered, held = (granted.address.partition("/")[0] for granted in (answer.result, lease.grant))
        if offered != held or lease.state is LeaseState.REFUSED or answer.asked_at < lease.since:
            return lease
        kept = msgspec.structs.replace(answer.result, address=lease.grant.address)
        return new_lease(kept, lease.mac, answer.asked_at)
    if answer.asked_at <= lease.since or lease.state is LeaseState.REFUSED:
        # The request was sent before this grant, so the grant has answered it.
        return lease
    if answer.result is RequestFailure.NO:
        return msgspec.structs.replace(lease, state=LeaseState.REFUSED, silent_since=None)
    since = answer.asked_at if lease.silent_since is None else lease.silent_since
    state = LeaseState.SILENT if lease.state is LeaseState.HELD else lease.state
    return msgspec.structs.replace(lease, state=state, silent_since=since)


def _with_request(
    lease: DhcpLease, now: float, address: AddressState
) -> tuple[DhcpLease, tuple[LeaseAction, ...]]:
    if lease.state is LeaseState.REFUSED or now < lease.ask_at:
        return lease, ()
    asked = msgspec.structs.replace(lease, asked_at=now, checked=True, ask_at=_next_request_at(lease, now))
    return asked, (_request_action(lease, now, address),)


def _request_action(lease: DhcpLease, now: float, address: AddressState) -> LeaseAction:
    """RENEWING and REBINDING are answered by unicast to the address, so the interface must have it."""
    # After a restart of the plugin the server may have forgotten the lease, which INIT-REBOOT checks.
    if address not in _ASSIGNED or lease.state in LOST_STATES or not lease.checked:
        return LeaseAction.REBOOT
    return LeaseAction.RENEW if now < lease.rebind_at else LeaseAction.REBIND


def _next_request_at(lease: DhcpLease, now: float) -> float:
    """When to repeat an unanswered request: after half of the time left in the state (RFC 2131, 4.4.5)."""
    if lease.state in LOST_STATES:
        return now + REPEAT_SECONDS
    if now < lease.renew_at:
        return lease.renew_at
    # RENEWING ends at T2, and REBINDING at the end of the lease.
    end = lease.rebind_at if now < lease.rebind_at else lease.until
    return min(end, now + max(REPEAT_SECONDS, (end - now) / 2))


def _address_actions(lease: DhcpLease, address: AddressState) -> tuple[LeaseAction, ...]:
    if lease.state in LOST_STATES:
        return (LeaseAction.REMOVE,) if address in _ASSIGNED else ()
    return (LeaseAction.SET,) if address in (AddressState.BARE, AddressState.LOOSE) else ()


# Reading a server's acknowledgement.


_T1, _T2 = 0.5, 0.875
"""Of the lease, if the server does not set them (RFC 2131, 4.4.5)."""
LEAST_RENEWAL_SECONDS = 60.0
"""From a grant to the request that prolongs it, unless half of the lease is less."""


def read_grant(acknowledgement: Any) -> DhcpGrant:
    """The grant in an acknowledgement. Raises `KeyError` and `ValueError`."""
    options = acknowledgement.dhcp["options"]
    ipv4_interface = ipaddress.IPv4Interface(f"{acknowledgement.dhcp['yiaddr']}/{options['subnet_mask']}")
    seconds = _unsigned(options["lease_time"])
    if not seconds:
        raise ValueError("its lease lasts no time")
    renew, rebind = renewal_times(seconds, options.get("renewal_time"), options.get("rebinding_time"))
    return DhcpGrant(
        address=str(ipv4_interface),
        server=options["server_id"],
        server_mac=acknowledgement.eth_src,
        seconds=seconds,
        renew_after=renew,
        rebind_after=rebind,
    )


def renewal_times(seconds: float, renewal: int | None, rebinding: int | None) -> tuple[float, float]:
    """T1 and T2: the values of options 58 and 59, unless they are out of order or too soon."""
    renew = seconds * _T1 if renewal is None else float(_unsigned(renewal))
    rebind = seconds * _T2 if rebinding is None else float(_unsigned(rebinding))
    # RFC 2131, 4.4.5 requires this order. Servers that break it get the defaults.
    if not 0 < renew < rebind < seconds:
        return seconds * _T1, seconds * _T2
    renew = max(renew, min(LEAST_RENEWAL_SECONDS, seconds * _T1))
    return renew, rebind if renew < rebind else seconds * _T2


def _unsigned(value: int) -> int:
    """The library reads times as signed numbers."""
    return value & 0xFFFFFFFF


def classless_routes(data: Sequence[int]) -> tuple[RouteConfig, ...]:
    """Option 121 (RFC 3442): prefix length, as many bytes of network as it needs, gateway. `ValueError`."""
    found, left = [], bytes(data)
    while left:
        length = left[0]
        used = (length + 7) // 8
        network, gateway = left[1 : 1 + used], left[1 + used : 5 + used]
        if length > 32 or len(gateway) < 4:
            raise ValueError("its routes (option 121) are cut short")
        found.append(_classless_route(network.ljust(4, b"\0"), length, gateway))
        left = left[5 + used :]
    return tuple(found)


def _classless_route(network: bytes, length: int, gateway: bytes) -> RouteConfig:
    """A gateway of zeros is none: the network is on the link itself."""
    destination = str(ipaddress.IPv4Interface((network, length)).network)
    if not any(gateway):
        return RouteConfig(destination=destination, scope=LINK_SCOPE)
    return RouteConfig(
        destination=destination, gateway=str(ipaddress.IPv4Address(gateway)), scope=UNIVERSE_SCOPE
    )
