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
"""So many each search has: blocks of unlike sizes can be packed in exponentially many ways."""


class CliqueChoice(NamedTuple):
    """One block in its clique."""

    block: ColocationGroup
    clique: str
    sitting: TrayAssignments


def choose_cliques(
    board: TrialPlacement, blocks: Sequence[ColocationGroup], spares: int, effort: SearchBudget
) -> list[CliqueChoice] | None:
    """A clique for each block, in the order of the blocks; None, and nothing put, where none was found.

    Blocks that are alike fill as few cliques as can be at once; for others, fewer cliques are tried for.
    """
    choice = CliqueSearch(board, blocks, spares, effort)
    best = choice.run()
    if best is None or _cliques_used(best) == 1:
        return best
    fewest = choice.fewest()
    while (cliques := _cliques_used(best)) > fewest:
        fewer = choice.run(most=cliques - 1)
        if fewer is None:
            for one in best:
                assign(board, one.sitting)
            break
        best = fewer
    return best


def can_choose_cliques(
    board: TrialPlacement, blocks: Sequence[ColocationGroup], spares: int, effort: SearchBudget
) -> bool:
    """Whether there is a clique for each block, in however many; what was found stays on the board."""
    return CliqueSearch(board, blocks, spares, effort).run() is not None


def _cliques_used(chosen: Sequence[CliqueChoice]) -> int:
    return len({one.clique for one in chosen})


class _CliqueContent(NamedTuple):
    """What a search has put into one clique."""

    blocks: tuple[ColocationGroup, ...] = ()
    sittings: tuple[TrayAssignments, ...] = ()


class CliqueSearch:
    """A search that takes back its choices a bounded number of times; what it found stays on the board."""

    def __init__(
        self, board: TrialPlacement, blocks: Sequence[ColocationGroup], spares: int, effort: SearchBudget
    ) -> None:
        """The board has nobody of the gang yet."""
        self._board = board
        self._blocks = blocks
        self._spares = spares
        self._effort = effort
        self._ranking = CliqueRanking(board, blocks, spares, effort)
        self._dead_ends = NogoodTable(board.ground, members_by_need(blocks))
        self._inside: dict[str, _CliqueContent] = {}
        self._steps: list[tuple[str, _CliqueContent]] = []
        """The clique of each block so far, and what was in it before."""

    def fewest(self) -> int:
        """So many cliques the blocks take at least."""
        return max([scale.fewest() for scale in self._scales])

    def run(self, most: int | None = None) -> list[CliqueChoice] | None:
        """A clique for each block, in the order of the blocks; None where none was found.

        `most` cliques may be used, fewer than in a run before. What that found is taken off the board.
        """
        self._take_all_back()
        open_choices: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._steps) < len(self._blocks):
            if len(open_choices) == len(self._steps):
                open_choices.append(self._ranking.best_first(len(self._steps), most))
            if self._advance(open_choices[-1]):
                continue
            dead_ends += 1
            if not self._steps or (dead_ends > FREE_DEAD_ENDS and not self._bears_dead_end()):
                self._take_all_back()
                return None
            self._dead_ends.add()
            self._ranking.weigh(self._scales)
            open_choices.pop()
            self._take_back()
        return self._chosen()

    def _bears_dead_end(self) -> bool:
        return self._effort.bears_dead_end(len(self._ranking.inside))

    @cached_property
    def _scales(self) -> list[WeightBound]:
        """Mostly there is room for everybody at once, and nothing needs to be weighed."""
        return weight_bounds(self._board.ground, self._blocks, self._spares)

    def _chosen(self) -> list[CliqueChoice]:
        sittings = {clique: iter(inside.sittings) for clique, inside in self._inside.items()}
        return [
            CliqueChoice(block, clique, next(sittings[clique]))
            for block, (clique, _) in zip(self._blocks, self._steps, strict=True)
        ]

    def _advance(self, cliques: Iterator[str]) -> bool:
        block = self._blocks[len(self._steps)]
        for clique in cliques:
            before = self._inside.get(clique, _CliqueContent())
            if self._leads_nowhere(clique, block):
                continue
            sittings = self._joined(clique, before, block)
            if sittings is not None:
                self._steps.append((clique, before))
                self._set(clique, _CliqueContent((*before.blocks, block), sittings))
                return True
        return False

    def _leads_nowhere(self, clique: str, block: ColocationGroup) -> bool:
        if not self._dead_ends:
            return False
        inside = self._ranking.inside.get(clique, {})
        return self._dead_ends.has(clique, add_members(inside, ((part.need, part.members) for part in block)))

    def _joined(
        self, clique: str, before: _CliqueContent, block: ColocationGroup
    ) -> tuple[TrayAssignments, ...] | None:
        """Put one more block into a clique; None, and nothing changed, where it cannot be.

        Members that compete for trays are seated anew, all of them together.
        """
        blocks = (*before.blocks, block)
        wanted = members_by_need(blocks)
        if (
            self._ranking.counts(clique, wanted)
            and (beside := assign_best_fit(self._board, clique, block)) is not None
        ):
            return (*before.sittings, beside)
        answer = joint_assignment(self._board, clique, wanted, self._spares, self._effort)
        if answer is not None and answer.loads is not None:
            for sitting in before.sittings:
                unassign(self._board, sitting)
            return assign_jointly(self._board, clique, blocks, answer.loads)
        return self._in_turn(clique, before, block)

    def _in_turn(
        self, clique: str, before: _CliqueContent, block: ColocationGroup
    ) -> tuple[TrayAssignments, ...] | None:
        beside = assign_best_fit(self._board, clique, block)
        if beside is None:
            return None
        sittings = (*before.sittings, beside)
        if self._spares and len(spare_trays(self._board, clique, sittings)) < self._spares:
            unassign(self._board, beside)
            return None
        return sittings

    def _take_all_back(self) -> None:
        while self._steps:
            self._take_back()

    def _take_back(self) -> None:
        clique, before = self._steps.pop()
        for sitting in self._inside[clique].sittings:
            unassign(self._board, sitting)
        for sitting in before.sittings:
            assign(self._board, sitting)
        self._set(clique, before)

    def _set(self, clique: str, inside: _CliqueContent) -> None:
        self._inside[clique] = inside
        wanted = members_by_need(inside.blocks)
        self._ranking.changed(clique, wanted)
        self._dead_ends.changed(clique, wanted)


# Recorded dead ends.


class NogoodTable:
    """Choices for the first blocks with which the others were not placed. What fits depends on no more.

    Blocks that are alike may have changed places, and so may whole cliques that are alike. A choice is one
    number, with a digit for each thing that a clique can have inside: how many alike cliques have that. So
    the next choice is told from the last one by the digits of one clique, however many are in use.
    """

    def __init__(self, ground: SiteCapacity, wanted: MembersByNeed) -> None:
        """None yet, for a gang that wants so much, and nobody in a clique."""
        self._ground = ground
        self._needs = ordered_needs(wanted)
        self._bits = len(ground.cliques).bit_length()
        """Of a digit."""
        self._ones: dict[Hashable, int] = {}
        """A one in each digit."""
        self._counted: dict[str, int] = {}
        """What each clique adds to the choice."""
        self._changed: dict[str, MembersByNeed] = {}
        """What was not counted yet: most searches come to no dead end."""
        self._choice = 0
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now."""
        self._changed[clique] = inside

    def add(self) -> None:
        """Nothing comes of the choice that stands."""
        self._count()
        self._known.add(self._choice)

    def has(self, clique: str, inside: MembersByNeed) -> bool:
        """Whether it is known that nothing comes of the choice that stands with these in a clique instead."""
        if not self._known:
            return False
        self._count()
        one = self._ones.get(self._digit(clique, inside))
        return one is not None and self._choice - self._counted.get(clique, 0) + one in self._known

    def _count(self) -> None:
        for clique, inside in self._changed.items():
            now = self._one(self._digit(clique, inside)) if inside else 0
            self._choice += now - self._counted.get(clique, 0)
            self._counted[clique] = now
        self._changed.clear()

    def _one(self, digit: Hashable) -> int:
        if digit not in self._ones:
            self._ones[digit] = 1 << self._bits * len(self._ones)
        return self._ones[digit]

    def _digit(self, clique: str, inside: MembersByNeed) -> Hashable:
        return self._likeness[clique], frozenset(inside.items())

    @cached_property
    def _likeness(self) -> dict[str, int]:
        """A number for each clique, the same where their trays have the same left."""
        left = {
            clique: tuple(sorted(self._ground.vacancies(clique, self._needs)))
            for clique in self._ground.cliques
        }
        numbers = {trays: number for number, trays in enumerate(set(left.values()))}
        return {clique: numbers[trays] for clique, trays in left.items()}
