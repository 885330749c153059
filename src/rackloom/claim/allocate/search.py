"""First fit: the first complete choice in the order of claims, requests, alternatives and devices.

The answer is that of an exhaustive depth-first search. What differs is how soon a search without hope ends:
after the first dead end, an `Outlook` refuses branches by counting, and branches that mirror one that already
failed are not walked again. Neither ever skips the branch that holds the answer, nor one that would run into
an error.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.causes import Kind
from rackloom.claim.allocate.eligibility import Eligibility
from rackloom.claim.allocate.ledger import Ledger
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.outlook import Outlook
from rackloom.claim.allocate.requests import MAX_RESULTS, Ask, Choice

Frame = Iterator["Frame | None"]
"""A level of the search: yields the level below once per way to go on, or None when all is chosen."""


class Search:
    """One search. `chosen` and the entries of the ledger hold the answer once `run` returned True."""

    def __init__(
        self,
        plan: Sequence[Choice],
        candidates: Sequence[Candidate],
        everything: Mapping[Ask, Sequence[Candidate]],
        eligibility: Eligibility,
        ledger: Ledger,
        proceed: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._candidates = candidates
        self._everything = everything
        self._eligibility = eligibility
        self._ledger = ledger
        self._proceed = proceed
        self._outlook: Outlook | None = None
        self.chosen: list[Ask] = []
        self.steps = 0

    def run(self) -> bool:
        """Whether all can be had. Raises Stop for an error, and when `proceed` says no."""
        stack = [self._choose(0)]
        while stack:
            self.steps += 1
            if not self._proceed():
                raise Stop("the search was stopped before it came to an answer", undecided=True)
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
        self._outlook = Outlook(
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

    def _need(self, ask: Ask) -> int | None:
        """Devices that the ask takes; None where there are none to take."""
        return (len(self._everything[ask]) or None) if ask.everything else ask.count

    def _results(self, ask: Ask) -> int:
        return sum(entry.ask.claim == ask.claim for entry in self._ledger.entries)

    def _take_all(self, ask: Ask, index: int) -> Frame:
        """Every device of a fixed list, or none."""
        before = len(self._ledger.entries)
        for candidate in self._everything[ask]:
            cause = self._ledger.enter(ask, candidate)
            if cause is None:
                continue
            self._strike_to(before)
            if cause.kind in (Kind.CONSTRAINT, Kind.ATTRIBUTE_MISSING):
                raise Stop(
                    f"claim {ask.claim_name}, request {ask.name}: asks for all devices, but {candidate.id}"
                    " would break a constraint of the claim"
                )
            return
        yield self._choose(index + 1)
        self._strike_to(before)

    def _pick(self, ask: Ask, index: int, picked: int, start: int) -> Frame:
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

    def _mark(self, index: int, candidate: Candidate) -> Hashable:
        """What did not work with a device will not work with one that has the same mark."""
        return candidate if self._outlook is None else self._outlook.mark(index, candidate)

    def _taken(self, ask: Ask, candidate: Candidate) -> bool:
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
