"""String functions. Positions count characters, not bytes."""

from typing import Any

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library

STRINGS = Library()
_add = STRINGS.add

_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space as Unicode defines it; Python's own strip takes control characters too."""

_UPPER = {upper: upper + 32 for upper in range(65, 91)}
_LOWER = {lower: upper for upper, lower in _UPPER.items()}
_ESCAPES = str.maketrans(
    {
        "\a": "\\a",
        "\b": "\\b",
        "\f": "\\f",
        "\n": "\\n",
        "\r": "\\r",
        "\t": "\\t",
        "\v": "\\v",
        "\\": "\\\\",
        '"': '\\"',
    }
)


@_add("contains_string", "string.contains(string) -> bool")
def _contains(text: str, part: str) -> bool:
    return part in text


@_add("starts_with_string", "string.startsWith(string) -> bool")
def _starts_with(text: str, part: str) -> bool:
    return text.startswith(part)


@_add("ends_with_string", "string.endsWith(string) -> bool")
def _ends_with(text: str, part: str) -> bool:
    return text.endswith(part)


@_add("string_char_at_int", "string.charAt(int) -> string")
def _char_at(text: str, at: int) -> str:
    if not 0 <= at <= len(text):
        raise EvaluationError(f"index out of range: {at}")
    return text[at : at + 1]


@_add("string_index_of_string", "string.indexOf(string) -> int")
def _index_of(text: str, part: str) -> int:
    return text.find(part)


@_add("string_index_of_string_int", "string.indexOf(string, int) -> int")
def _index_of_from(text: str, part: str, start: int) -> int:
    if not part:
        return start
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    return text.find(part, start)


@_add("string_last_index_of_string", "string.lastIndexOf(string) -> int")
def _last_index_of(text: str, part: str) -> int:
    return text.rfind(part)


@_add("string_last_index_of_string_int", "string.lastIndexOf(string, int) -> int")
def _last_index_of_until(text: str, part: str, last: int) -> int:
    if not part:
        return last
    if last < 0:
        raise EvaluationError(f"index out of range: {last}")
    return -1 if last >= len(text) else text.rfind(part, 0, last + len(part))


@_add("string_lower_ascii", "string.lowerAscii() -> string")
def _lower(text: str) -> str:
    return text.translate(_UPPER)


@_add("string_upper_ascii", "string.upperAscii() -> string")
def _upper(text: str) -> str:
    return text.translate(_LOWER)


@_add("string_replace_string_string", "string.replace(string, string) -> string")
def _replace(text: str, old: str, new: str) -> str:
    return text.replace(old, new)


@_add("string_replace_string_string_int", "string.replace(string, string, int) -> string")
def _replace_some(text: str, old: str, new: str, count: int) -> str:
    return text.replace(old, new, count if count >= 0 else -1)


@_add("string_split_string", "string.split(string) -> list<string>")
def _split(text: str, separator: str) -> list[str]:
    return text.split(separator) if separator else list(text)


@_add("string_split_string_int", "string.split(string, int) -> list<string>")
def _split_some(text: str, separator: str, count: int) -> list[str]:
    if count == 0:
        return []
    if count < 0:
        return _split(text, separator)
    if separator:
        return text.split(separator, count - 1)
    return [*text[: count - 1], text[count - 1 :]] if len(text) > count - 1 else list(text)


@_add("string_substring_int", "string.substring(int) -> string")
def _substring_from(text: str, start: int) -> str:
    if not 0 <= start <= len(text):
        raise EvaluationError(f"index out of range: {start}")
    return text[start:]


@_add("string_substring_int_int", "string.substring(int, int) -> string")
def _substring(text: str, start: int, end: int) -> str:
    if start > end:
        raise EvaluationError(f"invalid substring range. start: {start}, end: {end}")
    for position in (start, end):
        if not 0 <= position <= len(text):
            raise EvaluationError(f"index out of range: {position}")
    return text[start:end]


@_add("string_trim", "string.trim() -> string")
def _trim(text: str) -> str:
    return text.strip(_SPACE)


@_add("list_join", "list<string>.join() -> string")
def _join(items: list[str]) -> str:
    return _join_with(items, "")


@_add("list_join_string", "list<string>.join(string) -> string")
def _join_with(items: list[Any], separator: str) -> str:
    for item in items:
        if not isinstance(item, str):
            raise EvaluationError("no such overload")
    return separator.join(items)


@_add("strings_quote", "strings.quote(string) -> string")
def _quote(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
