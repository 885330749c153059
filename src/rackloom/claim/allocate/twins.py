"""Devices of which, for the ranking too, one is as good as the other: only one of them is tried.

Groups and shapes are those of `Alike`, with PCIe roots as one more tie: four roots of a NUMA node, each with
a GPU and a NIC, are four copies. NUMA nodes and cliques keep their names, so they stay apart.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

from rackloom.claim.allocate.alike import Alike
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.constraints import Constraint
from rackloom.claim.allocate.eligibility import Eligibility
from rackloom.claim.allocate.ledger import Ledger
from rackloom.claim.allocate.names import PCIE_ROOT
from rackloom.claim.allocate.ranking import Ranking
from rackloom.claim.allocate.requests import Choice


class Twins:
    """Classes of copies, as things stand."""

    def __init__(
        self,
        plan: Sequence[Choice],
        candidates: Sequence[Candidate],
        eligibility: Eligibility,
        ledger: Ledger,
        ranking: Ranking,
    ) -> None:
        asks = tuple(chain.from_iterable(plan))
        self._constraints = tuple(dict.fromkeys(chain.from_iterable(map(ledger.constraints, asks))))
        ties = (*self._constraints, Constraint(PCIE_ROOT, (), distinct=False, lists=True))
        self._ledger = ledger
        self._alike = Alike(candidates, asks, ties, eligibility, ledger)
        places = ranking.places
        self._shape = [
            (shape, places[position].numa, places[position].cliques, ranking.used[position])
            for position, shape in enumerate(self._alike.shape)
        ]

    def classes(self, allowed: Sequence[Candidate]) -> list[list[Candidate]]:
        """`allowed` by class, in order of their first members."""
        holders: dict[int, list[Hashable]] = {}
        for entry in self._ledger.entries:
            where = (entry.ask.claim, entry.ask.request)
            holders.setdefault(entry.candidate.position, []).append(where)
        open_ = {one.position for one in allowed}
        fate = [
            (self._shape[position], tuple(holders.get(position, ())), position in open_)
            for position in range(len(self._shape))
        ]
        conditions = {group: self._condition(group, fate) for group in {self._alike.group[p] for p in open_}}
        found: dict[Hashable, list[Candidate]] = {}
        for one in allowed:
            mark = fate[one.position], conditions[self._alike.group[one.position]]
            found.setdefault(mark, []).append(one)
        return list(found.values())

    def _condition(self, group: int, fate: Sequence[Hashable]) -> Hashable:
        """How the devices of a group fare, and which of its values constraints have seen."""
        ranks = self._alike.ranks[group]
        return (
            frozenset(Counter(fate[position] for position in self._alike.members[group]).items()),
            tuple(
                _ranked(one.seen(), number, ranks) if one.started else None
                for number, one in enumerate(self._constraints)
            ),
        )


def _ranked(seen: Iterable[Hashable], number: int, ranks: dict[tuple[Hashable, ...], int]) -> Hashable:
    links = (("value", number, value) for value in seen)
    return frozenset(ranks[link] for link in links if link in ranks)
