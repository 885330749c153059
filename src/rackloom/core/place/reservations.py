"""Reserved trays: which organisation a tray waits for, until when, and which trays a reservation gives up.

A reservation keeps certain trays for one organisation until a time. `in_force` is the one rule of time: a
reservation counts before its time and not from then on. Whoever reads the records applies it, with the time
of that moment, so that a reservation ends without a write, also while no process of the site runs.

The choice of trays (`instance_trays`) gives a kept tray to no other organisation. The owner gets its own
reserved trays before others: otherwise it would use up trays that anybody may have while its own stay idle.
GPU memory comes first, however. A reserved tray in another domain is no reason to leave the domain of the
logical partition, or to spread what fits into one domain.

A reservation that shrinks gives up trays without an instance of its owner first, the last ones in order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec


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
