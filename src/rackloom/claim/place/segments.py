"""What a segment size costs: trays that whole segments cannot use when some trays are down."""

from math import comb


def usable_share(trays: int, segment: int, down: float) -> float:
    """Expected share (0 to 1) of a clique's trays that whole segments use.

    Each tray is down with probability `down`, independently of the others.
    """
    return (
        sum(
            comb(trays, up) * (1 - down) ** up * down ** (trays - up) * (up // segment * segment)
            for up in range(trays + 1)
        )
        / trays
    )


def told(trays: int, segment: int, down: float) -> str:
    """`segments of 16 in cliques of 18: 2 trays stay outside; 88.8 % usable with 1 % of trays down`."""
    outside = trays % segment
    return (
        f"segments of {segment} in cliques of {trays}: {outside} trays stay outside;"
        f" {usable_share(trays, segment, down):.1%} usable with {down:.1%} of trays down"
        f" (segments of {trays}: {usable_share(trays, trays, down):.1%})"
    )
