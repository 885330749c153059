"""Choose a clique for each colocation group: depth-first backtracking with nogood recording.

`choose_cliques` minimises lexicographically: fewest cliques, then fewest free regions closed, then
tightest fit. The ranking decides the order of candidates. After a first solution the search is repeated
with one clique less, until it fails or reaches the lower bound of the weight bounds. `can_choose_cliques`
stops at the first solution.

When groups in one clique compete for trays, all of them are assigned anew and jointly; where that search
gives up, they are assigned in turn.

`NogoodTable` records choices that led nowhere. Whether the remaining groups fit depends only on who is in
which clique, and neither equal groups nor equal cliques are told apart, so one record covers all
symmetric choices. A choice is encoded as one integer with a digit per possible clique content, which is
updated incrementally.

Each search may run into 400 dead ends; further ones are charged to the budget of the gang. A search that
exhausts both ends without a solution, although there may be one.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from rackloom.core.place.search.clique_ranking import CliqueRanking, WeightBound, weight_bounds
from rackloom.core.place.search.joint_assignment import SearchBudget
from rackloom.core.place.search.site_capacity import SiteCapacity, ordered_needs
from rackloom.core.place.search.tray_assignment import (
    ColocationGroup,
    MembersByNeed,
    TrayAssignments,
    TrialPlacement,
    add_members,
    assign,
    assign_best_fit,
    assign_jointly,
    joint_assignment,
    members_by_need,
    spare_trays,
    unassign,
)

FREE_DEAD_ENDS = 400
"""Dead ends that each search has for itself: subgroups of unlike sizes can be packed in exponentially many
ways."""


class CliqueChoice(NamedTuple):
    """One subgroup in its clique."""

    subgroup: ColocationGroup
    clique: str
    assignments: TrayAssignments


def choose_cliques(
    trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
) -> list[CliqueChoice] | None:
    """A clique for each subgroup, in their order; None, and nothing is assigned, where none was found."""
    search = CliqueSearch(trial, subgroups, spares, budget)
    best = search.run()
    # Equal subgroups fill the fewest cliques at once, so the loop mostly ends at its first condition.
    while best is not None and (cliques := len({choice.clique for choice in best})) > 1:
        if cliques <= search.min_cliques():
            break
        fewer = search.run(most=cliques - 1)
        if fewer is None:
            for choice in best:
                assign(trial, choice.assignments)
            break
        best = fewer
    return best


def can_choose_cliques(
    trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
) -> bool:
    """Whether there is a clique for each subgroup; the solution stays in the trial."""
    return CliqueSearch(trial, subgroups, spares, budget).run() is not None


class _CliqueContent(NamedTuple):
    """What a search has put into one clique."""

    subgroups: tuple[ColocationGroup, ...] = ()
    assignments: tuple[TrayAssignments, ...] = ()
    """One for each subgroup."""


class CliqueSearch:
    """A depth-first search with a bounded number of dead ends; its solution stays in the trial."""

    def __init__(
        self, trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
    ) -> None:
        """No member of the gang is assigned yet."""
        self._trial = trial
        self._subgroups = subgroups
        self._spares = spares
        self._budget = budget
        self._ranking = CliqueRanking(trial, subgroups, spares, budget)
        self._nogoods = NogoodTable(trial.capacity, members_by_need(subgroups))
        self._inside: dict[str, _CliqueContent] = {}
        self._steps: list[tuple[str, _CliqueContent]] = []
        """The clique of each subgroup so far, and what was in it before."""

    def min_cliques(self) -> int:
        """A lower bound for the cliques that the subgroups take."""
        return max([bound.min_cliques() for bound in self._bounds])

    def run(self, most: int | None = None) -> list[CliqueChoice] | None:
        """A clique for each subgroup, in their order; None where none was found.

        `most` cliques may be used, fewer than in a run before, whose solution is undone. The nogoods of that
        run hold here too: what failed with more cliques fails with fewer.
        """
        self._undo_all()
        # Invariant: the trial, the ranking and the nogood table all have the choices of `_steps`, and
        # candidates[n] yields the cliques not yet tried for subgroup n, given the choices before it.
        candidates: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._steps) < len(self._subgroups):
            if len(candidates) == len(self._steps):
                candidates.append(self._ranking.best_first(len(self._steps), most))
            if self._advance(candidates[-1]):
                continue
            dead_ends += 1
            if not self._steps or (
                dead_ends > FREE_DEAD_ENDS and not self._budget.charge_dead_end(len(self._ranking.inside))
            ):
                self._undo_all()
                return None
            # Every clique failed for the next subgroup, so nothing follows from the choices that stand.
            self._nogoods.add()
            self._ranking.prune_by(self._bounds)
            candidates.pop()
            self._undo()
        assignments = {clique: iter(inside.assignments) for clique, inside in self._inside.items()}
        return [
            CliqueChoice(subgroup, clique, next(assignments[clique]))
            for subgroup, (clique, _) in zip(self._subgroups, self._steps, strict=True)
        ]

    @cached_property
    def _bounds(self) -> list[WeightBound]:
        """Computed at the first dead end: mostly the first choices fit, and no bound is needed."""
        return weight_bounds(self._trial.capacity, self._subgroups, self._spares)

    def _advance(self, cliques: Iterator[str]) -> bool:
        """Put the next subgroup into the first of the cliques that takes it."""
        subgroup = self._subgroups[len(self._steps)]
        shape = [(part.need, part.members) for part in subgroup]
        for clique in cliques:
            inside = self._ranking.inside.get(clique, {})
            if self._nogoods and self._nogoods.has(clique, add_members(inside, shape)):
                continue
            before = self._inside.get(clique, _CliqueContent())
            assignments = self._add_to_clique(clique, before, subgroup)
            if assignments is not None:
                self._steps.append((clique, before))
                self._set(clique, _CliqueContent((*before.subgroups, subgroup), assignments))
                return True
        return False

    def _add_to_clique(
        self, clique: str, before: _CliqueContent, subgroup: ColocationGroup
    ) -> tuple[TrayAssignments, ...] | None:
        """Assign one more subgroup in a clique; None, and nothing changes, where it does not fit."""
        subgroups = (*before.subgroups, subgroup)
        wanted = members_by_need(subgroups)
        if self._ranking.is_counting_exact(clique, wanted):
            beside = assign_best_fit(self._trial, clique, subgroup)
            if beside is not None:
                return (*before.assignments, beside)
        answer = joint_assignment(self._trial, clique, wanted, self._spares, self._budget)
        if answer is not None and answer.loads is not None:
            for assignments in before.assignments:
                unassign(self._trial, assignments)
            return assign_jointly(self._trial, clique, subgroups, answer.loads)
        # The joint search gave up or found nothing. Assigning in turn may miss a solution, but makes no
        # wrong one.
        beside = assign_best_fit(self._trial, clique, subgroup)
        if beside is None:
            return None
        found = (*before.assignments, beside)
        if self._spares and len(spare_trays(self._trial, clique, found)) < self._spares:
            unassign(self._trial, beside)
            return None
        return found

    def _undo_all(self) -> None:
        while self._steps:
            self._undo()

    def _undo(self) -> None:
        """Take back the newest choice, and what a joint assignment moved of earlier members."""
        clique, before = self._steps.pop()
        for assignments in self._inside[clique].assignments:
            unassign(self._trial, assignments)
        for assignments in before.assignments:
            assign(self._trial, assignments)
        self._set(clique, before)

    def _set(self, clique: str, inside: _CliqueContent) -> None:
        self._inside[clique] = inside
        wanted = members_by_need(inside.subgroups)
        self._ranking.changed(clique, wanted)
        self._nogoods.changed(clique, wanted)


# Recorded dead ends.


class NogoodTable:
    """Choices for the first subgroups after which the others could not be placed.

    A choice is a number with one digit for each pair of a kind of clique and a content: how many cliques of
    that kind have that content. Cliques whose trays have equal vacancies are of one kind. So choices that
    differ only in which of equal cliques has which of equal subgroups have the same number, and a step
    changes the digits of one clique only.
    """

    def __init__(self, capacity: SiteCapacity, wanted: MembersByNeed) -> None:
        """No nogood yet, and no member in a clique; the gang has the members `wanted`."""
        self._capacity = capacity
        self._needs = ordered_needs(wanted)
        self._bits = len(capacity.cliques).bit_length()
        """Of a digit: it counts up to all cliques, so it never carries over."""
        self._ones: dict[Hashable, int] = {}
        """A one in each digit."""
        self._counted: dict[str, int] = {}
        """What each clique adds to the choice."""
        self._changed: dict[str, MembersByNeed] = {}
        """What is not counted yet: most searches come to no dead end."""
        self._choice = 0
        self._nogoods: set[int] = set()

    def __len__(self) -> int:
        return len(self._nogoods)

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now."""
        self._changed[clique] = inside

    def add(self) -> None:
        """Record that the present choice leads nowhere."""
        self._count()
        self._nogoods.add(self._choice)

    def has(self, clique: str, inside: MembersByNeed) -> bool:
        """Whether the present choice with these members in a clique instead is recorded."""
        if not self._nogoods:
            return False
        self._count()
        added = self._ones.get(self._digit(clique, inside))
        return added is not None and self._choice - self._counted.get(clique, 0) + added in self._nogoods

    def _count(self) -> None:
        for clique, inside in self._changed.items():
            added = 0
            if inside:
                added = self._ones.setdefault(self._digit(clique, inside), 1 << self._bits * len(self._ones))
            self._choice += added - self._counted.get(clique, 0)
            self._counted[clique] = added
        self._changed.clear()

    def _digit(self, clique: str, inside: MembersByNeed) -> Hashable:
        return self._kinds[clique], frozenset(inside.items())

    @cached_property
    def _kinds(self) -> dict[str, int]:
        """A number for each clique, the same where their trays have equal vacancies."""
        numbers: dict[Hashable, int] = {}
        return {
            clique: numbers.setdefault(
                tuple(sorted(self._capacity.vacancies(clique, self._needs))), len(numbers)
            )
            for clique in self._capacity.cliques
        }
