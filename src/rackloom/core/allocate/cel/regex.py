"""Runs RE2 patterns in bounded time: Python's engine where it is safe, otherwise an NFA simulation.

A pattern whose backtracking is provably small for the text at hand runs in Python's `re`. The bound
multiplies the ways through the pattern and raises the text length to the number of open-ended
repetitions. Every other pattern is simulated state by state (Thompson's construction, Pike's
simulation) in time proportional to the text. Threads are kept in order of preference, which gives RE2's
leftmost-first match.

The module is loaded only when an expression has a pattern. `compiled_regex` caches compiled patterns.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rackloom.core.allocate.cel.regex_syntax import (
    Alternation,
    CharacterSet,
    Concatenation,
    PositionAssertion,
    RegexTree,
    Repetition,
    parse_regex,
)

_MAX_BACKTRACKING = 100_000
"""Steps that Python's engine may need at worst before the simulation takes over."""
_MAX_PROGRAM = 100_000


class Regex:
    """A compiled pattern."""

    __slots__ = ("_native", "_program", "_repeats", "_tree", "_ways")

    def __init__(self, pattern: str) -> None:
        self._tree = parse_regex(pattern)
        self._ways, self._repeats = _choices(self._tree)
        self._native: re.Pattern[str] | None = None
        self._program: list[_Step] | None = None

    def search(self, text: str) -> bool:
        """Whether the pattern matches anywhere."""
        return next(self.spans(text), None) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Leftmost matches that do not overlap, as start and end."""
        at, last_end = 0, -1
        while at <= len(text):
            found = self._first(text, at)
            if found is None:
                return
            start, end = found
            if end != at or start != last_end:
                yield found
            last_end = end
            at = end if end > at else at + 1

    def _first(self, text: str, at: int) -> tuple[int, int] | None:
        if self._ways * (len(text) - at + 1) ** (self._repeats + 1) <= _MAX_BACKTRACKING:
            if self._native is None:
                self._native = re.compile(_native(self._tree))
            found = self._native.search(text, at)
            return None if found is None else found.span()
        if self._program is None:
            self._program = _program(self._tree)
        return _simulate(self._program, text, at)


@functools.lru_cache(maxsize=1024)
def compiled_regex(pattern: str) -> Regex:
    """The pattern, ready to run. ValueError where RE2 would refuse it."""
    return Regex(pattern)


def _choices(tree: RegexTree) -> tuple[float, int]:
    """How many ways through the pattern there are, and how many open-ended repetitions multiply them."""
    match tree:
        case CharacterSet():
            return (float("inf") if tree.properties else 1), 0
        case PositionAssertion():
            return 1, 0
        case Concatenation():
            parts = [_choices(part) for part in tree.parts]
            ways = 1.0
            for part, _ in parts:
                ways *= part
            return ways, sum(repeats for _, repeats in parts)
        case Alternation():
            parts = [_choices(option) for option in tree.options]
            return sum(ways for ways, _ in parts), max(repeats for _, repeats in parts)
        case Repetition():
            return _repeat_choices(tree)


def _repeat_choices(tree: Repetition) -> tuple[float, int]:
    ways, repeats = _choices(tree.body)
    if tree.high == 1:
        return ways + 1, repeats
    if ways > 1 or repeats or not isinstance(tree.body, CharacterSet | Concatenation):
        return float("inf"), 0
    return (1, 1) if tree.high is None else (tree.high - tree.low + 1, 0)


_NATIVE_ASSERTIONS = {
    "text_start": r"\A",
    "text_end": r"\Z",
    "line_start": r"(?m:^)",
    "line_end": r"(?m:$)",
    "word": r"(?a:\b)",
    "no_word": r"(?a:\B)",
}


def _native(tree: RegexTree) -> str:
    """The same pattern as Python writes it."""
    match tree:
        case CharacterSet():
            return _native_chars(tree)
        case PositionAssertion():
            return _NATIVE_ASSERTIONS[tree.kind]
        case Concatenation():
            return "".join(
                f"(?:{_native(part)})" if isinstance(part, Alternation) else _native(part)
                for part in tree.parts
            )
        case Alternation():
            return "|".join(map(_native, tree.options))
        case Repetition():
            high = "" if tree.high is None else tree.high
            return f"(?:{_native(tree.body)}){{{tree.low},{high}}}{'' if tree.greedy else '?'}"


def _native_chars(chars: CharacterSet) -> str:
    body = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in chars.ranges)
    found = f"[{'^' if chars.negated else ''}{body}]"
    return f"(?i:{found})" if chars.fold else found


@dataclass(slots=True)
class _Step:
    """One state of the simulation: what it consumes or asserts, and where it goes, best choice first."""

    test: CharacterSet | PositionAssertion | None
    next: tuple[int, ...]


def _program(tree: RegexTree) -> list[_Step]:
    """States of the pattern; the last one accepts."""
    steps: list[_Step] = []
    _emit(tree, steps)
    steps.append(_Step(None, ()))
    return steps


def _emit(tree: RegexTree, steps: list[_Step]) -> None:
    if len(steps) > _MAX_PROGRAM:
        raise ValueError("expression too large")
    match tree:
        case CharacterSet() | PositionAssertion():
            steps.append(_Step(tree, (len(steps) + 1,)))
        case Concatenation():
            for part in tree.parts:
                _emit(part, steps)
        case Alternation():
            _emit_choice(tree, steps)
        case Repetition():
            _emit_repeat(tree, steps)


def _emit_choice(tree: Alternation, steps: list[_Step]) -> None:
    split = _Step(None, ())
    steps.append(split)
    leaps = []
    for option in tree.options:
        split.next = (*split.next, len(steps))
        _emit(option, steps)
        leap = _Step(None, ())
        steps.append(leap)
        leaps.append(leap)
    for leap in leaps:
        leap.next = (len(steps),)


def _emit_repeat(tree: Repetition, steps: list[_Step]) -> None:
    for _ in range(tree.low):
        _emit(tree.body, steps)
    if tree.high is None:
        split = _Step(None, ())
        start = len(steps)
        steps.append(split)
        _emit(tree.body, steps)
        steps.append(_Step(None, (start,)))
        split.next = _preferring(tree.greedy, start + 1, len(steps))
        return
    splits = []
    for _ in range(tree.high - tree.low):
        split = _Step(None, ())
        splits.append((split, len(steps) + 1))
        steps.append(split)
        _emit(tree.body, steps)
    for split, inside in splits:
        split.next = _preferring(tree.greedy, inside, len(steps))


def _preferring(greedy: bool, inside: int, outside: int) -> tuple[int, ...]:
    return (inside, outside) if greedy else (outside, inside)


def _simulate(program: list[_Step], text: str, at: int) -> tuple[int, int] | None:
    """The leftmost match from `at` on, preferring earlier choices, in one pass over the text."""
    found: tuple[int, int] | None = None
    threads: dict[int, int] = {}
    for here in range(at, len(text) + 1):
        if found is None:
            _follow(program, 0, here, text, here, threads)
        if not threads:
            return found
        following: dict[int, int] = {}
        for state, start in threads.items():
            step = program[state]
            if isinstance(step.test, CharacterSet):
                if here < len(text) and step.test.accepts(text[here]):
                    _follow(program, state + 1, start, text, here + 1, following)
            elif state == len(program) - 1:
                found = (start, here)
                break
        threads = following
    return found


def _follow(
    program: list[_Step], state: int, start: int, text: str, here: int, threads: dict[int, int]
) -> None:
    """Add `state` and all states reachable from it without reading, in order of preference."""
    pending = [state]
    while pending:
        current = pending.pop()
        if current in threads:
            continue
        threads[current] = start
        step = program[current]
        if isinstance(step.test, CharacterSet) or (
            step.test is not None and not _holds(step.test, text, here)
        ):
            continue
        pending.extend(reversed(step.next))


def _holds(assertion: PositionAssertion, text: str, at: int) -> bool:
    match assertion.kind:
        case "text_start":
            return at == 0
        case "text_end":
            return at == len(text)
        case "line_start":
            return at == 0 or text[at - 1] == "\n"
        case "line_end":
            return at == len(text) or text[at] == "\n"
    boundary = _is_word(text, at - 1) != _is_word(text, at)
    return boundary is (assertion.kind == "word")


def _is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and text[at].isascii() and (text[at].isalnum() or text[at] == "_")
