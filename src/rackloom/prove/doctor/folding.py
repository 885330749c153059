"""Consequences under their cause: one broken thing is one finding, whatever it breaks elsewhere."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.prove.doctor.findings import Finding, State, badness, worst_severity
from rackloom.prove.doctor.names import EXPLAINS, SILENT

_CAUSES: Mapping[str, tuple[str, ...]] = {
    effect: tuple(cause for cause, effects in EXPLAINS.items() if effect in effects)
    for effect in {one for effects in EXPLAINS.values() for one in effects}
}


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that are nobody's consequence, the worst first, each with what follows from it.

    A cause is as bad as the worst of what follows. What is only unknown explains no failure, but for silence.
    """
    ordered = sorted(findings, key=badness)
    index = _index(ordered)
    under: defaultdict[int, list[int]] = defaultdict(list)
    roots: list[int] = []
    for number, one in enumerate(ordered):
        cause = _cause(one, ordered, index)
        if cause is None:
            roots.append(number)
        else:
            under[cause].append(number)
    told = (_with_consequences(ordered[root], [ordered[at] for at in _below(root, under)]) for root in roots)
    return tuple(sorted(told, key=badness))


def _index(findings: list[Finding]) -> Mapping[tuple[str, str], int]:
    """The first finding of each check at each place."""
    found: dict[tuple[str, str], int] = {}
    for number, one in enumerate(findings):
        for place in one.where:
            found.setdefault((one.check, place), number)
    return found


def _cause(one: Finding, ordered: list[Finding], index: Mapping[tuple[str, str], int]) -> int | None:
    found = {
        place: cause for place in one.where if (cause := _cause_at(place, one, ordered, index)) is not None
    }
    unexplained = [side for side in one.sides if not found.keys() >= set(side)]
    if len(unexplained) > 1:
        return None
    return min(found.values(), key=lambda cause: _order_of(ordered[cause], one), default=None)


def _cause_at(
    place: str, one: Finding, ordered: list[Finding], index: Mapping[tuple[str, str], int]
) -> int | None:
    """The first check in order that explains it there."""
    for check in _CAUSES.get(one.check, ()):
        cause = index.get((check, place))
        if cause is not None and _explains(ordered[cause], one):
            return cause
    return None


def _order_of(cause: Finding, effect: Finding) -> int:
    return _CAUSES[effect.check].index(cause.check)


def _explains(cause: Finding, effect: Finding) -> bool:
    return cause.state is State.FAILS or effect.state is State.UNKNOWN or cause.check in SILENT


def _below(root: int, under: Mapping[int, list[int]]) -> Iterator[int]:
    """All that follows, also from what follows."""
    for one in under.get(root, ()):
        yield one
        yield from _below(one, under)


def _with_consequences(cause: Finding, effects: list[Finding]) -> Finding:
    told = tuple(dict.fromkeys(f"{one.check}: {one.subject}" for one in effects))
    every = (cause, *effects)
    return msgspec.structs.replace(
        cause,
        consequences=told,
        severity=worst_severity(every),
        instances=max(one.instances for one in every),
    )
