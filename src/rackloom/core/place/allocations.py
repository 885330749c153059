"""What allocations hold: how many more machines an organisation may use, and what is promised to tenants.

An allocation says how many machines of an instance type an organisation may use. Trays that are reserved
for it and idle will be used, so they count as well: machines in use and idle reserved ones together may
not exceed what its allocations hold. A new instance on one of its own reserved trays changes nothing of
that sum, and is possible as long as the machines in use alone do not exceed it.

What is promised to tenants is the sum over all of them of what each may still use. A tenant that uses more
than it was allocated takes nothing from the promise to another.
"""

from collections.abc import Hashable, Mapping
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
