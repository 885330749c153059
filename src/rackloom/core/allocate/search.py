"""First fit: depth-first search for the first complete assignment, in upstream's order.

The search takes claims, requests, alternatives and devices in their order and backtracks
chronologically. Within a request, device positions rise, so each set of devices is seen once. Mode All
takes a list of devices that was fixed before the search, completely or not at all. Levels are
generators on an explicit stack, so depth does not depend on Python's recursion limit. `proceed` is
asked before every step and bounds the search.

The answer, including errors, is that of upstream's exhaustive search. What differs is how soon a search
without hope ends. The first dead end creates `PruningBounds`, which then

- refuses a branch when a count in `bounds` shows that it has no answer;
- remembers states that failed (nogoods), with symmetric groups counted by kind, and refuses them again;
- skips a device that is interchangeable with one that already failed at this level.

Errors need care. A selector may fail on some device, and that counts only when the search reaches it.
Requests from the first one that can fail onwards are left out of every count. Up to the last request of
mode All that meets a constraint, no branch counts as a copy of another, because which device comes
first decides between refusal and error.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain

from rackloom.core.allocate.bounds import OpenAlternative, Relaxation
from rackloom.core.allocate.eligibility import CandidateDevice, Eligibility
from rackloom.core.allocate.inputs import MAX_RESULTS, Alternatives, RequestAlternative
from rackloom.core.allocate.ledger import AllocationLedger
from rackloom.core.allocate.outcome import AllocationStopped, CauseKind
from rackloom.core.allocate.symmetry import DeviceSymmetry

# Pruning: counts and failed states. A position is (request, alternative, devices picked, next device).


SearchPosition = tuple[int, ...]
"""Where the search stands: request, and within it alternative, devices picked, next position."""


class PruningBounds:
    """What can be told of a search from its books alone."""

    def __init__(
        self,
        plan: Sequence[Alternatives],
        candidates: Sequence[CandidateDevice],
        everything: Mapping[RequestAlternative, Sequence[CandidateDevice]],
        eligibility: Eligibility,
        ledger: AllocationLedger,
    ) -> None:
        asks = tuple(chain.from_iterable(plan))
        constraints = tuple(dict.fromkeys(chain.from_iterable(map(ledger.constraints, asks))))
        self._plan = plan
        self._candidates = candidates
        self._everything = everything
        self._ledger = ledger
        self._alike = DeviceSymmetry(candidates, asks, constraints, eligibility, ledger)
        self._relaxation = Relaxation(asks, candidates, constraints, self._alike, eligibility, ledger)
        failing = [index for index, choice in enumerate(plan) if self._may_fail(choice, eligibility)]
        self._horizon = min(failing, default=len(plan))
        # Whether mode All ends in a refusal or in an error depends on which device of its list comes first:
        # up to there, no branch is a copy of another.
        self._ordered_until = 1 + max(
            (index for index, choice in enumerate(plan) if self._all_may_fail(choice)), default=-1
        )
        self._last = {
            constraint: max(
                n
                for n, choice in enumerate(plan)
                if any(constraint in ledger.constraints(ask) for ask in choice)
            )
            for constraint in constraints
        }
        self._constraints = constraints
        self._dead: set[Hashable] = set()
        self._known: dict[tuple[int, int, int], Hashable] = {}
        self._known_at = -1
        self._doubt = True

    def mark(self, index: int, candidate: CandidateDevice) -> Hashable:
        """Equal for devices of which, at this moment and for `plan[index:]`, one is as good as the other."""
        if index < self._ordered_until:
            return candidate
        position = candidate.position
        group = self._group(index, self._alike.group[position], 0)
        return self._alike.shape[position], self._ledger.mark(candidate), group

    def failed(self, place: SearchPosition) -> None:
        """Remember that nothing was found at this place in this state."""
        self._doubt = True
        if place[0] >= self._ordered_until:
            self._dead.add((place, self._state(place)))

    def hopeless(self, place: SearchPosition, index: int, current: OpenAlternative | None = None) -> bool:
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

    def _may_fail(self, choice: Alternatives, eligibility: Eligibility) -> bool:
        """Whether a selector fails on some device, or mode All meets a constraint, which is an error too."""
        return self._all_may_fail(choice) or any(
            isinstance(eligibility.verdict(ask, candidate), AllocationStopped)
            for ask in choice
            for candidate in self._candidates
        )

    def _all_may_fail(self, choice: Alternatives) -> bool:
        return any(ask.everything and self._ledger.constraints(ask) for ask in choice)

    def _options(self, choice: Alternatives) -> tuple[OpenAlternative, ...]:
        return tuple((ask, len(self._everything[ask]) if ask.everything else ask.count, 0) for ask in choice)

    def _state(self, place: SearchPosition) -> Hashable:
        """All that the future depends on: how many groups of each kind are in which condition."""
        index, start = place[0], place[3] if len(place) > 1 else 0
        groups = range(len(self._alike.members))
        claim = self._plan[index][0].claim
        return (
            frozenset(Counter(self._group(index, group, start) for group in groups).items()),
            sum(entry.ask.claim == claim for entry in self._ledger.entries),
            tuple(constraint.started for constraint in self._constraints if self._last[constraint] >= index),
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
            (alike.shape[member], mark(self._candidates[member]), member >= start)
            for member in alike.members[group]
        )
        ranks = alike.ranks[group]
        seen = tuple(
            frozenset(
                ranks[link] for value in constraint.seen() if (link := ("value", number, value)) in ranks
            )
            for number, constraint in enumerate(self._constraints)
            if self._last[constraint] >= index and constraint.started
        )
        return alike.kind[group], frozenset(devices.items()), seen


# The depth-first search itself.


Frame = Iterator["Frame | None"]
"""A level of the search: yields the level below once per way to go on, or None when all is chosen."""


class FirstFitSearch:
    """One search. `chosen` and the entries of the ledger hold the answer once `run` returned True."""

    def __init__(
        self,
        plan: Sequence[Alternatives],
        candidates: Sequence[CandidateDevice],
        everything: Mapping[RequestAlternative, Sequence[CandidateDevice]],
        eligibility: Eligibility,
        ledger: AllocationLedger,
        proceed: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._candidates = candidates
        self._everything = everything
        self._eligibility = eligibility
        self._ledger = ledger
        self._proceed = proceed
        self._outlook: PruningBounds | None = None
        self.chosen: list[RequestAlternative] = []
        self.steps = 0

    def run(self) -> bool:
        """Whether all can be had. Raises Stop for an error, and when `proceed` says no."""
        stack = [self._choose(0)]
        while stack:
            self.steps += 1
            if not self._proceed():
                raise AllocationStopped("the search was stopped before it came to an answer", undecided=True)
            try:
                below = next(stack[-1])
            except StopIteration:
                stack.pop()
                if self._look_ahead():
                    return False
                continue
            if below is None:
                return True
            stack.append(below)
        return False

    def _look_ahead(self) -> bool:
        """The straight way failed: from now on it pays to look before walking. Whether all hope is gone."""
        if self._outlook is not None:
            return False
        entries = list(self._ledger.entries)
        self._ledger.clear()
        self._outlook = PruningBounds(
            self._plan, self._candidates, self._everything, self._eligibility, self._ledger
        )
        if self._plan and self._outlook.hopeless((0,), 0):
            return True
        for entry in entries:
            self._ledger.enter(entry.ask, entry.candidate)
        return False

    def _choose(self, index: int) -> Frame:
        """One level per request: its alternatives in order."""
        if index == len(self._plan):
            yield None
            return
        place = (index,)
        if self._outlook is not None and self._outlook.hopeless(place, index):
            return
        for ask in self._plan[index]:
            need = self._need(ask)
            if need is None or self._results(ask) + need > MAX_RESULTS:
                continue
            del self.chosen[index:]
            self.chosen.append(ask)
            yield self._take_all(ask, index) if ask.everything else self._pick(ask, index, 0, 0)
        self._failed(place)

    def _need(self, ask: RequestAlternative) -> int | None:
        """Devices that the ask takes; None where there are none to take."""
        return (len(self._everything[ask]) or None) if ask.everything else ask.count

    def _results(self, ask: RequestAlternative) -> int:
        return sum(entry.ask.claim == ask.claim for entry in self._ledger.entries)

    def _take_all(self, ask: RequestAlternative, index: int) -> Frame:
        """Every device of a fixed list, or none."""
        before = len(self._ledger.entries)
        for candidate in self._everything[ask]:
            cause = self._ledger.enter(ask, candidate)
            if cause is None:
                continue
            self._strike_to(before)
            if cause.kind in (CauseKind.CONSTRAINT, CauseKind.ATTRIBUTE_MISSING):
                raise AllocationStopped(
                    f"claim {ask.claim_name}, request {ask.name}: asks for all devices, but {candidate.id}"
                    " would break a constraint of the claim"
                )
            return
        yield self._choose(index + 1)
        self._strike_to(before)

    def _pick(self, ask: RequestAlternative, index: int, picked: int, start: int) -> Frame:
        """One level per device of a request: positions rise, so each set of devices is seen once."""
        if picked == ask.count:
            yield self._choose(index + 1)
            return
        place = (index, self._plan[index].index(ask), picked, start)
        current = (ask, ask.count - picked, start)
        if self._outlook is not None and self._outlook.hopeless(place, index + 1, current):
            return
        walked: set[Hashable] = set()
        for candidate in self._candidates[start:]:
            if self._mark(index, candidate) not in walked and self._taken(ask, candidate):
                yield self._pick(ask, index, picked + 1, candidate.position + 1)
                self._ledger.strike()
                walked.add(self._mark(index, candidate))
        self._failed(place)

    def _mark(self, index: int, candidate: CandidateDevice) -> Hashable:
        """What did not work with a device will not work with one that has the same mark."""
        return candidate if self._outlook is None else self._outlook.mark(index, candidate)

    def _taken(self, ask: RequestAlternative, candidate: CandidateDevice) -> bool:
        """Enters the device if it can be had. Use is asked first: a selector may fail on a device."""
        return (
            self._ledger.in_use(ask, candidate) is None
            and self._eligibility.matches(ask, candidate)
            and self._ledger.enter(ask, candidate) is None
        )

    def _failed(self, place: tuple[int, ...]) -> None:
        if self._outlook is not None:
            self._outlook.failed(place)

    def _strike_to(self, length: int) -> None:
        while len(self._ledger.entries) > length:
            self._ledger.strike()
