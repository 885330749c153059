"""Whether a branch of the search still has hope, without walking it.

A branch is given up when it is a copy of one that failed, or when a count shows that it has no answer. Each
count is a relaxation: it leaves rules out, never adds one, so what it refuses has no answer. Selectors may
fail with an error, which counts only if the search gets there, so requests from the first one that could fail
onwards are left out of every count.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

from rackloom.claim.allocate.alike import Alike
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.eligibility import Eligibility
from rackloom.claim.allocate.ledger import Ledger
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.relax import Option, Relaxation
from rackloom.claim.allocate.requests import Ask, Choice

Place = tuple[int, ...]
"""Where the search stands: request, and within it alternative, devices picked, next position."""


class Outlook:
    """What can be told of a search from its books alone."""

    def __init__(
        self,
        plan: Sequence[Choice],
        candidates: Sequence[Candidate],
        everything: Mapping[Ask, Sequence[Candidate]],
        eligibility: Eligibility,
        ledger: Ledger,
    ) -> None:
        asks = tuple(chain.from_iterable(plan))
        constraints = tuple(dict.fromkeys(chain.from_iterable(map(ledger.constraints, asks))))
        self._plan = plan
        self._candidates = candidates
        self._everything = everything
        self._ledger = ledger
        self._alike = Alike(candidates, asks, constraints, eligibility, ledger)
        self._relaxation = Relaxation(asks, candidates, constraints, self._alike, eligibility, ledger)
        failing = [index for index, choice in enumerate(plan) if self._may_fail(choice, eligibility)]
        self._horizon = min(failing, default=len(plan))
        # Whether mode All ends in a refusal or in an error depends on which device of its list comes first:
        # up to there, no branch is a copy of another.
        self._ordered_until = 1 + max(
            (index for index, choice in enumerate(plan) if self._all_may_fail(choice)), default=-1
        )
        self._last = {
            one: max(
                n for n, choice in enumerate(plan) if any(one in ledger.constraints(ask) for ask in choice)
            )
            for one in constraints
        }
        self._constraints = constraints
        self._dead: set[Hashable] = set()
        self._known: dict[tuple[int, int, int], Hashable] = {}
        self._known_at = -1
        self._doubt = True

    def mark(self, index: int, candidate: Candidate) -> Hashable:
        """Equal for devices of which, at this moment and for `plan[index:]`, one is as good as the other."""
        if index < self._ordered_until:
            return candidate
        position = candidate.position
        group = self._group(index, self._alike.group[position], 0)
        return self._alike.shape[position], self._ledger.mark(candidate), group

    def failed(self, place: Place) -> None:
        """Remember that nothing was found at this place in this state."""
        self._doubt = True
        if place[0] >= self._ordered_until:
            self._dead.add((place, self._state(place)))

    def hopeless(self, place: Place, index: int, current: Option | None = None) -> bool:
        """Whether the requests from `index` on, and the rest of `current`, surely cannot all be met."""
        if (place, self._state(place)) in self._dead:
            return True
        # Where there was hope, the way is walked on until it ends: counting at every step costs more.
        if place[0] >= self._horizon or not self._doubt:
            return False
        options = [*([(current,)] if current else []), *map(self._options, self._plan[index : self._horizon])]
        self._doubt = not self._relaxation.possible(
            [choice for choice in options if not any(ask.admin for ask, _, _ in choice)]
        )
        return self._doubt

    def _may_fail(self, choice: Choice, eligibility: Eligibility) -> bool:
        """Whether a selector fails on some device, or mode All meets a constraint, which is an error too."""
        return self._all_may_fail(choice) or any(
            isinstance(eligibility.verdict(ask, one), Stop) for ask in choice for one in self._candidates
        )

    def _all_may_fail(self, choice: Choice) -> bool:
        return any(ask.everything and self._ledger.constraints(ask) for ask in choice)

    def _options(self, choice: Choice) -> tuple[Option, ...]:
        return tuple((ask, len(self._everything[ask]) if ask.everything else ask.count, 0) for ask in choice)

    def _state(self, place: Place) -> Hashable:
        """All that the future depends on: how many groups of each kind are in which condition."""
        index, start = place[0], place[3] if len(place) > 1 else 0
        groups = range(len(self._alike.members))
        claim = self._plan[index][0].claim
        return (
            frozenset(Counter(self._group(index, group, start) for group in groups).items()),
            sum(entry.ask.claim == claim for entry in self._ledger.entries),
            tuple(one.started for one in self._constraints if self._last[one] >= index),
        )

    def _group(self, index: int, group: int, start: int) -> Hashable:
        """The condition of a group: its kind, what was done to its devices, and which of them come later."""
        if self._known_at != self._ledger.version:
            self._renew()
        key = (index, group, start)
        if key not in self._known:
            self._known[key] = self._condition(*key)
        return self._known[key]

    def _renew(self) -> None:
        self._known_at = self._ledger.version
        self._known.clear()

    def _condition(self, index: int, group: int, start: int) -> Hashable:
        alike, mark = self._alike, self._ledger.mark
        devices = Counter(
            (alike.shape[one], mark(self._candidates[one]), one >= start) for one in alike.members[group]
        )
        ranks = alike.ranks[group]
        seen = tuple(
            frozenset(ranks[link] for value in one.seen() if (link := ("value", number, value)) in ranks)
            for number, one in enumerate(self._constraints)
            if self._last[one] >= index and one.started
        )
        return alike.kind[group], frozenset(devices.items()), seen
