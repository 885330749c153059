"""The life of one DHCP lease (RFC 2131, 4.4): what it was, the time and what was heard -> what to do. Pure.

All times are seconds of one clock that never jumps and goes on while the machine sleeps: the time since boot.
A lease never outlives the boot in which it was given, since a pod does not either.
"""

from enum import StrEnum

import msgspec

from rackloom.claim.node.nic.settings import Setting

LEAST_SECONDS = 60.0
"""Between two unanswered requests of one state, unless that ends before (RFC 2131, 4.4.5)."""


class Do(StrEnum):
    """What a step asks for. The first three are ways to ask for the address, by their states of RFC 2131."""

    REBOOT = "INIT-REBOOT"
    """By a broadcast that names the address as wished for: no interface can be counted on to have it."""
    RENEW = "RENEWING"
    """By a message to the server that gave it."""
    REBIND = "REBINDING"
    """By a broadcast: any server may prolong it."""
    REMOVE = "remove the address"
    SET = "let it have the address until the lease ends"
    """By the kernel, so that the address goes also while the plugin is away."""
    TELL = "tell how it stands"


ASKS = frozenset({Do.REBOOT, Do.RENEW, Do.REBIND})


class Seat(StrEnum):
    """Where the interface is, and whether it has the address."""

    HOST = "on the host, without it"
    BARE = "in the pod, without it"
    LOOSE = "in the pod, with it, for another time than its lease lasts"
    SET = "in the pod, with it, for as long as its lease lasts"


_WITH = frozenset({Seat.LOOSE, Seat.SET})


class Said(StrEnum):
    """What else than a grant may come of a request."""

    NO = "refused"
    NOTHING = "unanswered"


class Grant(Setting, frozen=True, kw_only=True):
    """What a server's acknowledgement says. Seconds count from when it was asked."""

    address: str
    """With its prefix length."""
    server: str
    """Its identifier (option 54)."""
    server_mac: str
    """From where its frame came: the server itself, or the relay before it."""
    seconds: float
    """For ever is 2^32 - 1: no boot lasts 136 years."""
    renew_after: float
    rebind_after: float


class Answer(Setting, frozen=True, kw_only=True):
    """What came of the request that was sent at `asked_at`."""

    asked_at: float
    said: Grant | Said


class Outlook(StrEnum):
    """How a lease stands."""

    HELD = "held"
    SILENT = "silent"
    """Still ours, but the last request was not answered: unknown whether it will be prolonged."""
    EXPIRED = "expired"
    """Nobody has prolonged it: the address may be another's. It is asked for again."""
    REFUSED = "refused"
    """The server that gave it said that it is not ours. For good: a pod does not change its address."""


LOST = frozenset({Outlook.EXPIRED, Outlook.REFUSED})


class Lease(Setting, frozen=True, kw_only=True):
    """One address, for as long as its claim is prepared."""

    grant: Grant
    mac: str
    """As whom it was asked for: the pod's interface may have another."""
    since: float
    """From when the grant counts: when it was asked for, not when the answer came."""
    ask_at: float
    """When the next request is due."""
    asked_at: float = 0.0
    checked: bool = True
    """Whether it was asked for in this life of the plugin."""
    silent_since: float | None = None
    """When the first request was sent of those that were not answered."""
    outlook: Outlook = Outlook.HELD

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


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The lease afterwards, and what to do, in this order."""

    lease: Lease
    todo: tuple[Do, ...]


def began(grant: Grant, mac: str, asked_at: float) -> Lease:
    """A lease that was just given."""
    return Lease(grant=grant, mac=mac, since=asked_at, asked_at=asked_at, ask_at=asked_at + grant.renew_after)


def woken(lease: Lease) -> Lease:
    """A lease as a new life of the plugin finds it: it asks at once whether it still stands."""
    return msgspec.structs.replace(lease, checked=False, ask_at=0.0)


def step(lease: Lease, now: float, seat: Seat, answer: Answer | None = None) -> Step:
    """Go on: time has passed, and perhaps an answer came."""
    after = _aged(_heard(lease, answer), now)
    after, asks = _asking(after, now, seat)
    tells = (Do.TELL,) if after.outlook is not lease.outlook else ()
    return Step(lease=after, todo=(*_moves(after, seat), *tells, *asks))


def due_at(lease: Lease) -> float:
    """When something is due next, if nothing is heard until then."""
    if lease.outlook is Outlook.REFUSED:
        return float("inf")
    return lease.ask_at if lease.outlook in LOST else min(lease.ask_at, lease.until)


def _heard(lease: Lease, answer: Answer | None) -> Lease:
    if answer is None:
        return lease
    if isinstance(answer.said, Grant):
        return _granted(lease, answer.said, answer.asked_at)
    if answer.asked_at <= lease.since or lease.outlook is Outlook.REFUSED:
        # It was asked before this grant, which answers it.
        return lease
    if answer.said is Said.NO:
        return msgspec.structs.replace(lease, outlook=Outlook.REFUSED, silent_since=None)
    since = answer.asked_at if lease.silent_since is None else lease.silent_since
    outlook = Outlook.SILENT if lease.outlook is Outlook.HELD else lease.outlook
    return msgspec.structs.replace(lease, outlook=outlook, silent_since=since)


def _granted(lease: Lease, grant: Grant, asked_at: float) -> Lease:
    """Of another address than ours, or after a server's no, a grant is none."""
    if _ip(grant) != _ip(lease.grant) or lease.outlook is Outlook.REFUSED or asked_at < lease.since:
        return lease
    kept = msgspec.structs.replace(grant, address=lease.grant.address)
    return began(kept, lease.mac, asked_at)


def _ip(grant: Grant) -> str:
    return grant.address.partition("/")[0]


def _aged(lease: Lease, now: float) -> Lease:
    if lease.outlook in LOST or now < lease.until:
        return lease
    return msgspec.structs.replace(lease, outlook=Outlook.EXPIRED, ask_at=now)


def _asking(lease: Lease, now: float, seat: Seat) -> tuple[Lease, tuple[Do, ...]]:
    if lease.outlook is Outlook.REFUSED or now < lease.ask_at:
        return lease, ()
    asked = msgspec.structs.replace(lease, asked_at=now, checked=True, ask_at=_next(lease, now))
    return asked, (_way(lease, now, seat),)


def _way(lease: Lease, now: float, seat: Seat) -> Do:
    """Only an interface that has the address can hear what is sent to it."""
    if seat not in _WITH or lease.outlook in LOST or not lease.checked:
        return Do.REBOOT
    return Do.RENEW if now < lease.rebind_at else Do.REBIND


def _next(lease: Lease, now: float) -> float:
    """When to ask again if nobody answers: after half of what is left of the state (RFC 2131, 4.4.5)."""
    if lease.outlook in LOST:
        return now + LEAST_SECONDS
    if now < lease.renew_at:
        return lease.renew_at
    end = lease.rebind_at if now < lease.rebind_at else lease.until
    return min(end, now + max(LEAST_SECONDS, (end - now) / 2))


def _moves(lease: Lease, seat: Seat) -> tuple[Do, ...]:
    if lease.outlook in LOST:
        return (Do.REMOVE,) if seat in _WITH else ()
    return (Do.SET,) if seat in (Seat.BARE, Seat.LOOSE) else ()
