"""The best of the valid answers: branch and bound, starting from the answer of the first fit.

A branch is left when it cannot cost less than the best answer so far. Devices are tried cheapest first, of
copies of each other only one. Whoever cuts the search short gets the best answer so far.
"""

from collections.abc import Callable, Sequence

import msgspec

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.causes import Cause
from rackloom.claim.allocate.cost import Cost, Standing
from rackloom.claim.allocate.desk import Desk
from rackloom.claim.allocate.ledger import Entry
from rackloom.claim.allocate.ranking import Ranking
from rackloom.claim.allocate.requests import MAX_RESULTS, Ask
from rackloom.claim.allocate.twins import Twins

MAX_TRIALS = 10_000
"""Devices tried in all, seconds for 32 of 128: a proof can take exponentially many."""


class Found(msgspec.Struct, frozen=True):
    """A complete answer."""

    chosen: tuple[Ask, ...]
    entries: tuple[Entry, ...]


class _CutShort(Exception):
    """No more trials are allowed."""


class Best:
    """One search for something better than `first`. The ledger of the desk must be empty."""

    def __init__(self, desk: Desk, first: Found, proceed: Callable[[], bool]) -> None:
        self._plan = desk.plan
        self._everything = desk.everything
        self._ledger = desk.ledger
        self._proceed = proceed
        self._ranking = Ranking(desk.candidates, desk.ledger)
        self._twins = Twins(self._plan, desk.candidates, desk.eligibility, desk.ledger, self._ranking)
        self._serving = {
            ask: [one for one in desk.candidates if self._could_serve(desk, ask, one)]
            for choice in self._plan
            for ask in choice
        }
        self._chosen: list[Ask] = []
        self.found = first
        self.cost = self._cost(first.chosen, first.entries)
        self.proved = False
        self.trials = 0

    def run(self) -> None:
        """Search; `found` is then the best answer that was seen."""
        try:
            self._choose(0)
        except _CutShort:
            return
        self.proved = True

    @property
    def standing(self) -> Standing:
        """How good what was found is."""
        return Standing(cost=self.cost, proved=self.proved)

    def _could_serve(self, desk: Desk, ask: Ask, one: Candidate) -> bool:
        """A device on which a selector fails is no error here: it is just not chosen."""
        selected = desk.eligibility.verdict(ask, one) is None
        return selected and not isinstance(desk.ledger.suits(ask, one), Cause)

    def _cost(self, chosen: Sequence[Ask], entries: Sequence[Entry], more: int = 0) -> Cost:
        steps_down = sum(choice.index(ask) for choice, ask in zip(self._plan, chosen, strict=False))
        return self._ranking.cost(steps_down, entries, more)

    def _bound(self, left: int) -> Cost:
        """What everything below costs at least, when the current request still takes `left` devices."""
        later = self._plan[len(self._chosen) :]
        most = left + sum(max(map(self._need, choice)) for choice in later)
        return self._cost(self._chosen, self._ledger.entries, most)

    def _need(self, ask: Ask) -> int:
        return len(self._everything[ask]) if ask.everything else ask.count

    def _choose(self, index: int) -> None:
        if index == len(self._plan):
            self._settle()
            return
        for ask in self._plan[index]:
            self._chosen.append(ask)
            need = self._need(ask)
            if self._fits(ask, need) and self._bound(need) < self.cost:
                self._give(ask, index, need)
            self._chosen.pop()

    def _fits(self, ask: Ask, need: int) -> bool:
        """Mode All is not met by nothing; and a claim holds so many devices, no more."""
        held = sum(entry.ask.claim == ask.claim for entry in self._ledger.entries)
        return held + need <= MAX_RESULTS and (need > 0 or not ask.everything)

    def _give(self, ask: Ask, index: int, need: int) -> None:
        if not ask.everything:
            self._pick(ask, index, need, self._serving[ask])
            return
        before = len(self._ledger.entries)
        if all(self._entered(ask, one) for one in self._everything[ask]):
            self._choose(index + 1)
        while len(self._ledger.entries) > before:
            self._ledger.strike()

    def _pick(self, ask: Ask, index: int, left: int, allowed: Sequence[Candidate]) -> None:
        """One device of a request. What was tried is left to no later branch: that has been seen."""
        if left == 0:
            self._choose(index + 1)
            return
        trials = self._trials(ask, left, allowed)
        for number, (bound, copies) in enumerate(trials):
            if bound >= self.cost:
                return
            self._ledger.enter(ask, copies[0])
            rest = [one for _, some in trials[number:] for one in some if one is not copies[0]]
            self._pick(ask, index, left - 1, rest)
            self._ledger.strike()

    def _trials(
        self, ask: Ask, left: int, allowed: Sequence[Candidate]
    ) -> list[tuple[Cost, list[Candidate]]]:
        """The devices that can be had, by class of copies, cheapest first."""
        trials = []
        for copies in self._twins.classes(allowed):
            if self._entered(ask, copies[0]):
                trials.append((self._bound(left - 1), copies))
                self._ledger.strike()
        return sorted(trials, key=lambda trial: trial[0])

    def _entered(self, ask: Ask, one: Candidate) -> bool:
        self.trials += 1
        if self.trials > MAX_TRIALS or not self._proceed():
            raise _CutShort
        return self._ledger.enter(ask, one) is None

    def _settle(self) -> None:
        """All is chosen: keep it if it costs less. Within a request, devices in order of position."""
        cost = self._cost(self._chosen, self._ledger.entries)
        if cost >= self.cost:
            return
        order = {ask: number for number, ask in enumerate(self._chosen)}
        entries = sorted(self._ledger.entries, key=lambda one: (order[one.ask], one.candidate.position))
        self.cost, self.found = cost, Found(tuple(self._chosen), tuple(entries))
