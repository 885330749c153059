"""Where a device sits, as far as its driver publishes it: NUMA node, PCIe root, NVLink clique.

Cliques have no standard name: drivers call them clique or cliqueID in their own domain. A list of cliques may
name single links, each a clique of two.
"""

from collections.abc import Hashable, Iterable

import msgspec

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.constraints import Values, values_of
from rackloom.claim.allocate.names import NIC_NUMA_NODE, NUMA_NODE, PCIE_ROOT

_CLIQUES = ("cliqueID", "clique")

Unit = tuple[Hashable, ...]
"""What is in use or free as a whole: a device, or a counter set with all the partitions cut from it."""


class Place(msgspec.Struct, frozen=True):
    """What a device shares with its neighbours; empty where it is not published."""

    numa: Values
    roots: Values
    cliques: Values

    def groups(self) -> Iterable[tuple[str, Hashable]]:
        """The groups that the device is in, over all drivers of the node."""
        for kind, values in (("numa", self.numa), ("root", self.roots), ("clique", self.cliques)):
            yield from ((kind, value) for value in values)


def place_of(one: Candidate) -> Place:
    """Where the device sits."""
    return Place(
        numa=_numa(one),
        roots=_first_known(one, (PCIE_ROOT,)),
        cliques=_first_known(one, [f"{one.id.driver}/{name}" for name in _CLIQUES]),
    )


def units_of(one: Candidate) -> tuple[Unit, ...]:
    """What comes into use with the device."""
    sets = {use.counter_set for use in one.device.consumes_counters}
    return tuple((*one.pool.key, "counters", name) for name in sorted(sets)) or ((*one.id,),)


def _numa(one: Candidate) -> Values:
    """The device's own node: a list names that first, then its neighbours (KEP-6072)."""
    for name in (NUMA_NODE, NIC_NUMA_NODE):
        found = one.attribute(name)
        if found is not None:
            return frozenset([("int", found.ints[0])]) if found.ints else values_of(found, lists=False)
    return frozenset()


def _first_known(one: Candidate, names: Iterable[str]) -> Values:
    found = next((has for name in names if (has := one.attribute(name)) is not None), None)
    return frozenset() if found is None else values_of(found, lists=True)
