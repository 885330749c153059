"""What makes one valid answer better than another: a value whose fields are compared in their order."""

import msgspec


class Cost(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """Less is better; a field decides only where all before it are equal."""

    alternatives: int
    """Steps down the lists of `firstAvailable`, over all requests."""
    broken: int
    """NUMA nodes, PCIe roots and NVLink cliques of which, afterwards, a part is in use and a part is free."""
    room: int
    """What was left, before, in the counter sets that are drawn from; thousandths of a whole set.

    Small means packed: partitions come from the sets that are used the most already.
    """
    apart: int
    """Over pairs of devices of two requests of a claim: 0 below one PCIe root, 1 on one NUMA node, else 2."""
    unlinked: int
    """Pairs of devices of a claim that both publish NVLink cliques but have none in common."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How good an answer of mode best is."""

    cost: Cost
    proved: bool
    """Whether no valid answer costs less. False where the search was cut short."""
