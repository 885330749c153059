"""Whom the pods of jobs that may move are never beside: anti-affinity binds them wherever they go."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import owner_of
from rackloom.claim.place.reading.neighbours import Known, Reaches, keys_of, known_there
from rackloom.claim.place.reading.observed import is_on_a_node
from rackloom.claim.place.reading.pods import Json
from rackloom.claim.place.values import Hold


class Foes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one job."""

    nodes: frozenset[str] = frozenset()
    """Where they keep it off; all nodes, if they may move and share no clique or zone with it."""
    owners: frozenset[str] = frozenset()
    """Whose they are, perhaps its own."""


class _Alike(msgspec.Struct, frozen=True):
    """Pods that are alike to others."""

    known: Known
    nodes: Mapping[str, list[str]]
    """By owner, the node of each pod."""


def foes_of(
    holds: Iterable[Hold], nodes: Iterable[Json], pods: Iterable[Json], labels: Labels
) -> dict[str, Foes]:
    """By owner of what may move; one that has no foes is missing."""
    holding: dict[str, set[str]] = defaultdict(set)
    for hold in holds:
        if hold.movable:
            holding[hold.owner].add(hold.tray)
    if not holding:
        return {}
    everywhere = list(nodes)
    likes = _likes([one for one in pods if is_on_a_node(one)], labels)
    book = _Book(holding, Reaches(everywhere), frozenset(one["metadata"]["name"] for one in everywhere))
    for one, other in combinations_with_replacement(likes, 2):
        if (one.known.apart or other.known.apart) and (by := set(one.known.barred_by(other.known))):
            book.enter(one, other, by)
            book.enter(other, one, by)
    return book.found


class _Book:
    """What is found of each job."""

    def __init__(
        self, holding: Mapping[str, Collection[str]], reaches: Reaches, everywhere: frozenset[str]
    ) -> None:
        self.found: dict[str, Foes] = {}
        self._holding = holding
        self._reaches = reaches
        self._everywhere = everywhere

    def enter(self, mine: _Alike, theirs: _Alike, by: Collection[str]) -> None:
        there = {foe: self._around(nodes, by) for foe, nodes in theirs.nodes.items()}
        for owner in self._holding.keys() & mine.nodes.keys():
            is_alone = mine is theirs and len(mine.nodes[owner]) == 1
            foes = there.keys() - {owner} if is_alone else there.keys()
            if foes:
                self._add(owner, {foe: there[foe] for foe in foes}, is_wide=any(by))

    def _add(self, owner: str, there: Mapping[str, frozenset[str]], *, is_wide: bool) -> None:
        # The trays of its own members are free once they leave; those of its launchers are not.
        trays = {**there, owner: there.get(owner, frozenset()).difference(self._holding[owner])}
        before, is_lost = (
            self.found.get(owner, Foes()),
            is_wide and not self._holding.keys().isdisjoint(there),
        )
        nodes = self._everywhere if is_lost else before.nodes.union(*trays.values())
        self.found[owner] = Foes(nodes=before.nodes | nodes, owners=before.owners.union(there))

    def _around(self, nodes: Iterable[str], by: Collection[str]) -> frozenset[str]:
        return frozenset(one for node in set(nodes) for one in self._reaches.around(node, by))


def _likes(pods: Sequence[Json], labels: Labels) -> Iterator[_Alike]:
    """By labels that anybody reads."""
    everybody = [(known_there(pod, labels.host), pod) for pod in pods]
    read = {key for one, _ in everybody for term in one.apart for key in keys_of(term.selector)}
    found: dict[bytes, _Alike] = {}
    for one, pod in everybody:
        bare = replace(one, labels={key: value for key, value in one.labels.items() if key in read})
        key = msgspec.json.encode(bare, order="deterministic")
        alike = found.setdefault(key, _Alike(bare, defaultdict(list)))
        alike.nodes[owner_of(pod, labels)].append(pod["spec"]["nodeName"])
    yield from found.values()
