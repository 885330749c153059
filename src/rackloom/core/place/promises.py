"""Promises to tenants: machines by allocations, and trays by reservations.

An allocation says how many machines of an instance type an organisation may use. Trays that are reserved
for it and idle will be used, so they count as well: machines in use and idle reserved ones together may
not exceed what its allocations hold. A new instance on one of its own reserved trays changes nothing of
that sum, and is possible as long as the machines in use alone do not exceed it.

What is promised to tenants is the sum over all of them of what each may still use. A tenant that uses more
than it was allocated takes nothing from the promise to another.

A reservation keeps certain trays for one organisation until a time. `in_force` is the one rule of time: a
reservation counts before its time and not from then on. Whoever reads the records applies it, with the time
of that moment, so that a reservation ends without a write, also while no process of the site runs.

The choice of trays (`instance_trays`) gives a kept tray to no other organisation. The owner gets its own
reserved trays before others: otherwise it would use up trays that anybody may have while its own stay idle.
GPU memory comes first, however. A reserved tray in another domain is no reason to leave the domain of the
logical partition, or to spread what fits into one domain.

A reservation that shrinks gives up trays without an instance of its owner first, the last ones in order.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

Holder = TypeVar("Holder", bound=Hashable)
"""Whoever has an allocation: a tenant, or a tenant and an instance type."""


class AllocationUse(msgspec.Struct, frozen=True):
    """What an organisation may use of an instance type, and what it does."""

    allocated: int | None
    """None: it has no allocation of the type."""
    used: int
    """Machines that carry its instances."""
    idle: int
    """Machines that are reserved for it and carry none of its instances."""

    @property
    def unused(self) -> int:
        """How many more machines it may use, with those that are reserved for it; less than 0: too many."""
        return (self.allocated or 0) - self.used

    @property
    def unreserved(self) -> int:
        """How many more it may use or reserve besides those that are reserved; less than 0: too many."""
        return self.unused - self.idle

    def lacking(self, machines: int, reserved: int) -> int:
        """How many more must be allocated for new instances on `machines`, of which `reserved` are its own.

        `reserved` are trays that wait for this organisation and carry none of its instances yet.
        """
        beside = machines - reserved
        return max(0, beside - self.unreserved if beside else machines - self.unused)

    def largest_request(self, free: int, reserved: int) -> int:
        """The most of `free` machines, of which `reserved` are its own, for which nothing is lacking."""
        return max(0, min(free, self.unused, reserved + max(0, self.unreserved)))


def still_promised(allocated: Mapping[Holder, int], used: Mapping[Holder, int]) -> int:
    """How many machines are promised and not in use."""
    return sum(max(0, machines - used.get(holder, 0)) for holder, machines in allocated.items())


# Reserved trays.


class Reservation(msgspec.Struct, frozen=True):
    """Trays that are kept for an organisation."""

    id: str
    owner: str
    """The tenant."""
    until: float
    """Seconds since the epoch; from then on the trays are free."""


def in_force(reservations: Iterable[Reservation], now: float) -> dict[str, Reservation]:
    """The reservations that count now, by id."""
    return {reservation.id: reservation for reservation in reservations if now < reservation.until}


def owners_of_trays(
    counting: Mapping[str, Reservation], reservation_of_tray: Mapping[str, str]
) -> dict[str, str]:
    """Tray -> the organisation that it is kept for, where its reservation counts."""
    return {tray: counting[of].owner for tray, of in reservation_of_tray.items() if of in counting}


def given_up(trays: Sequence[str], in_use: Collection[str], keep: int) -> list[str]:
    """The trays that a reservation of `trays` gives up to keep `keep`: unused ones first, the last first."""
    last_first = trays[::-1]
    unused = [tray for tray in last_first if tray not in in_use]
    used = [tray for tray in last_first if tray in in_use]
    return (unused + used)[: max(0, len(trays) - keep)]
