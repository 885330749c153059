"""Regular expressions: matches, find and findAll."""

from typing import TYPE_CHECKING

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library

if TYPE_CHECKING:
    from rackloom.claim.allocate.cel.regex import Regex

PATTERNS = Library()
_add = PATTERNS.add


def regex(pattern: str) -> "Regex":
    """The compiled pattern. Raises EvaluationError where RE2 would refuse it."""
    # Few selectors have patterns, and what reads them takes longest to load of the whole library.
    from rackloom.claim.allocate.cel.regex import compiled

    try:
        return compiled(pattern)
    except ValueError as error:
        raise EvaluationError(f"error parsing regexp: {error}") from None


@_add("matches", "matches(string, string) -> bool")
@_add("matches_string", "string.matches(string) -> bool")
def _matches(text: str, pattern: str) -> bool:
    return regex(pattern).search(text)


@_add("string_find_string", "string.find(string) -> string")
def _find(text: str, pattern: str) -> str:
    found = next(regex(pattern).spans(text), None)
    return "" if found is None else text[found[0] : found[1]]


@_add("string_find_all_string", "string.findAll(string) -> list<string>")
def _find_all(text: str, pattern: str) -> list[str]:
    return _find_some(text, pattern, -1)


@_add("string_find_all_string_int", "string.findAll(string, int) -> list<string>")
def _find_some(text: str, pattern: str, limit: int) -> list[str]:
    spans = list(regex(pattern).spans(text))
    return [text[start:end] for start, end in (spans if limit < 0 else spans[:limit])]
