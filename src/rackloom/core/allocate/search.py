"""First fit: depth-first search for the first complete assignment, in upstream's order.

The search takes claims, requests, alternatives and devices in their order and backtracks
chronologically. Within a request, device positions rise, so each set of devices is seen once. Mode All
takes a list of devices that was fixed before the search, completely or not at all. Levels are
generators on an explicit stack, so depth does not depend on Python's recursion limit. `proceed` is
called before every step and bounds the search.

The answer, including errors, is that of upstream's exhaustive search, but a search without hope ends
sooner. After some dead ends it creates `PruningBounds`, which then

- refuses a branch when a count in `bounds` shows that it has no answer,
- remembers states that failed (nogoods), with symmetric groups counted by kind, and refuses them again,
- skips a device that is interchangeable with one that already failed at this level.

Errors need care. An expression may fail on some device, and that counts only when the search reaches it.
Requests from the first one that can fail onwards are left out of every count. Up to the last request of
mode All that meets a constraint, no branch counts as a copy of another, because which device comes
first decides between refusal and error.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain

from rackloom.core.allocate.bounds import OpenAlternative, Relaxation
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import Alternatives, RequestAlternative
from rackloom.core.allocate.outcome import AllocationStopped, CauseKind
from rackloom.core.allocate.problem import AllocationProblem, FoundAnswer
from rackloom.core.allocate.symmetry import DeviceSymmetry

# Pruning: counts and failed states. A position is (request, alternative, devices picked, next device).


SearchPosition = tuple[int, ...]
"""The position of the search: request, and within it alternative, devices picked, next position."""


class PruningBounds:
    """Decides from counts and remembered failures that a branch has no answer."""

    def __init__(self, problem: AllocationProblem, plan: Sequence[Alternatives]) -> None:
        asks = tuple(chain.from_iterable(plan))
        constraints = tuple(dict.fromkeys(chain.from_iterable(map(problem.ledger.constraints, asks))))
        self._plan = plan
        self._problem = problem
        self._ledger = ledger = problem.ledger
        self._symmetry = DeviceSymmetry(problem, asks, constraints)
        self._relaxation = Relaxation(problem, asks, constraints, self._symmetry)
        failing = [index for index, choice in enumerate(plan) if self._may_fail(choice)]
        # An error counts only when the search reaches it, so no count may look past the first such request.
        self._horizon = min(failing, default=len(plan))
        # Whether mode All ends in a refusal or in an error depends on which device of its list comes first.
        # Up to the last such request, no branch counts as a copy of another.
        self._ordered_until = 1 + max(
            (index for index, choice in enumerate(plan) if self._all_may_fail(choice)), default=-1
        )
        self._last = {
            constraint: index
            for index, choice in enumerate(plan)
            for ask in choice
            for constraint in ledger.constraints(ask)
        }
        self._constraints = constraints
        self._nogoods: set[Hashable] = set()
        self._conditions: dict[tuple[int, int, int], Hashable] = {}
        self._version = -1
        self._may_be_hopeless = True

    def mark(self, index: int, candidate: CandidateDevice) -> Hashable:
        """Equal for devices that are interchangeable at this moment and for `plan[index:]`."""
        if index < self._ordered_until:
            return candidate
        position = candidate.position
        group = self._group(index, self._symmetry.group[position], 0)
        return self._symmetry.shape[position], self._ledger.mark(candidate), group

    def failed(self, point: SearchPosition) -> None:
        """Remember that nothing was found at this point in this state."""
        # A subtree without an answer makes the next count worth its price.
        self._may_be_hopeless = True
        # A nogood holds for every later state with an equal key: what follows depends on nothing else.
        if point[0] >= self._ordered_until:
            self._nogoods.add((point, self._state(point)))

    def hopeless(self, point: SearchPosition, index: int, current: OpenAlternative | None = None) -> bool:
        """Whether the requests from `index` on, and the rest of `current`, surely cannot all be met."""
        if self._nogoods and (point, self._state(point)) in self._nogoods:
            return True
        # After a count that found hope, the search goes on uncounted to the next dead end. Counting at
        # every step costs more than it saves.
        if point[0] >= self._horizon or not self._may_be_hopeless:
            return False
        need = self._problem.devices_needed
        options = [((ask, need(ask), 0) for ask in choice) for choice in self._plan[index : self._horizon]]
        open_requests = [*([(current,)] if current else []), *map(tuple, options)]
        # Admin access ignores use: such a request does not compete with others.
        self._may_be_hopeless = not self._relaxation.possible(
            [choice for choice in open_requests if not any(ask.admin for ask, _, _ in choice)]
        )
        return self._may_be_hopeless

    def _may_fail(self, choice: Alternatives) -> bool:
        """Whether the request may end in an error: a failing expression, or a constraint on mode All."""
        if self._all_may_fail(choice):
            return True
        for ask in choice:
            for candidate in self._problem.candidates:
                verdict = self._problem.eligibility.verdict(ask, candidate)
                if isinstance(verdict, AllocationStopped):
                    return True
                # Attributes are derived only of devices that the selectors let through.
                if not ask.derived or verdict is not None:
                    continue
                try:
                    for constraint in self._ledger.constraints(ask):
                        constraint.values(ask, candidate)
                except AllocationStopped:
                    return True
        return False

    def _all_may_fail(self, choice: Alternatives) -> bool:
        return any(ask.everything and self._ledger.constraints(ask) for ask in choice)

    def _state(self, point: SearchPosition) -> Hashable:
        """The state that later steps depend on: the number of groups of each kind in each condition."""
        # Groups of one kind are copies of each other, so their number counts and not their names. Device
        # order matters only through `start`, below which the current request takes no more devices.
        index, start = point[0], point[3] if len(point) > 1 else 0
        groups = range(len(self._symmetry.members))
        return (
            frozenset(Counter(self._group(index, group, start) for group in groups).items()),
            self._ledger.count_of(self._plan[index][0].claim),
            tuple(constraint.started for constraint in self._constraints if self._last[constraint] >= index),
        )

    def _group(self, index: int, group: int, start: int) -> Hashable:
        """The condition of a group: its kind, the changes to its devices, and which of them come later."""
        # Conditions change with every entry and undo. In between, many points need the same ones.
        if self._version != self._ledger.version:
            self._version = self._ledger.version
            self._conditions.clear()
        key = (index, group, start)
        if key not in self._conditions:
            self._conditions[key] = self._condition(*key)
        return self._conditions[key]

    def _condition(self, index: int, group: int, start: int) -> Hashable:
        symmetry, mark = self._symmetry, self._ledger.mark
        devices = Counter(
            (symmetry.shape[member], mark(self._problem.candidates[member]), member >= start)
            for member in symmetry.members[group]
        )
        # A constraint that covers no later request no longer matters, so its values are left out.
        values = tuple(
            symmetry.ranks_of(group, number, constraint.values_so_far())
            for number, constraint in enumerate(self._constraints)
            if self._last[constraint] >= index and constraint.started
        )
        return symmetry.kind[group], frozenset(devices.items()), values


# The depth-first search itself.


_DEAD_ENDS = 40
"""This number of dead ends costs about as much as the bounds."""

Frame = Iterator["Frame | None"]
"""A level of the search: yields the level below once per way to go on, or None when all is chosen."""


class FirstFitSearch:
    """One search. `chosen` and the entries of the ledger are the answer once `run` returned True."""

    def __init__(
        self,
        problem: AllocationProblem,
        proceed: Callable[[], bool],
        plan: Sequence[Alternatives] | None = None,
    ) -> None:
        """`plan` is a part of the problem's requests. The default is all of them."""
        self._problem = problem
        self._plan = problem.plan if plan is None else plan
        self._ledger = problem.ledger
        self._proceed = proceed
        self._bounds: PruningBounds | None = None
        self._dead_ends = 0
        self.chosen: list[RequestAlternative] = []
        self.steps = 0

    def run(self) -> bool:
        """Whether all can be met. Raises AllocationStopped on an error, or if `proceed` returns False."""
        # Each frame yields the level below it once per way to go on. Exhausting a frame is backtracking:
        # the frame undoes its own entries before it ends, so the ledger always holds the current path.
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

    @property
    def answer(self) -> FoundAnswer:
        """The answer, once `run` returned True."""
        return FoundAnswer(tuple(self.chosen), tuple(self._ledger.entries), self.steps)

    def _look_ahead(self) -> bool:
        """Create the bounds after some dead ends. True if they show that there is no answer at all."""
        self._dead_ends += 1
        if self._bounds is not None or self._dead_ends < _DEAD_ENDS:
            return False
        # Symmetry is computed from the state before the search. Undoing and entering the same assignments
        # again, in order, restores the ledger exactly, so the frames on the stack notice nothing.
        entries = list(self._ledger.entries)
        self._ledger.clear()
        self._bounds = PruningBounds(self._problem, self._plan)
        if self._plan and self._bounds.hopeless((0,), 0):
            return True
        for entry in entries:
            self._ledger.enter(entry.ask, entry.candidate)
        return False

    def _choose(self, index: int) -> Frame:
        """One level per request: its alternatives in order."""
        if index == len(self._plan):
            yield None
            return
        point = (index,)
        if self._bounds is not None and self._bounds.hopeless(point, index):
            return
        for ask in self._plan[index]:
            if not self._problem.has_room(ask):
                continue
            del self.chosen[index:]
            self.chosen.append(ask)
            yield self._take_all(ask, index) if ask.everything else self._pick(ask, index, 0, 0)
        self._failed(point)

    def _take_all(self, ask: RequestAlternative, index: int) -> Frame:
        """Every device of a fixed list, or none."""
        before = len(self._ledger.entries)
        for candidate in self._problem.everything[ask]:
            cause = self._ledger.enter(ask, candidate)
            if cause is None:
                continue
            self._ledger.clear(before)
            # Upstream reports a broken constraint as an error here. A device that is in use only refuses.
            if cause.kind in (CauseKind.CONSTRAINT, CauseKind.ATTRIBUTE_MISSING):
                raise AllocationStopped(
                    f"claim {ask.claim_name}, request {ask.name}: asks for all devices, but {candidate.id}"
                    " would break a constraint of the claim"
                )
            return
        yield self._choose(index + 1)
        self._ledger.clear(before)

    def _pick(self, ask: RequestAlternative, index: int, picked: int, start: int) -> Frame:
        """One level per device of a request: positions rise, so each set of devices is seen once."""
        if picked == ask.count:
            yield self._choose(index + 1)
            return
        point = (index, self._plan[index].index(ask), picked, start)
        current = (ask, ask.count - picked, start)
        if self._bounds is not None and self._bounds.hopeless(point, index + 1, current):
            return
        # Devices are tried in upstream's order. A device with the mark of one that failed at this level
        # would lead to a copy of the same subtree.
        walked: set[Hashable] = set()
        for candidate in self._problem.candidates[start:]:
            if walked and self._mark(index, candidate) in walked:
                continue
            # Use is checked first: no selector runs on a device that is in use.
            if (
                self._ledger.in_use(ask, candidate) is None
                and self._problem.eligibility.matches(ask, candidate)
                and self._ledger.enter(ask, candidate) is None
            ):
                yield self._pick(ask, index, picked + 1, candidate.position + 1)
                self._ledger.strike()
                walked.add(self._mark(index, candidate))
        self._failed(point)

    def _mark(self, index: int, candidate: CandidateDevice) -> Hashable:
        """The mark of a device. A step that failed with it fails with every device of the same mark."""
        return candidate if self._bounds is None else self._bounds.mark(index, candidate)

    def _failed(self, point: tuple[int, ...]) -> None:
        if self._bounds is not None:
            self._bounds.failed(point)
