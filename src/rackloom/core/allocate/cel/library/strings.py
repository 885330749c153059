"""String functions: search and split, regular expressions, and `format`.

Positions count characters, not bytes. `compiled_pattern` loads the regular expression engine on first
use, because few selectors have patterns.

`format_string` implements `%s %d %f %e %b %x %X %o %%` as the second version of cel-go's strings
library does, including its treatment of `%e`: it takes the written precision as width. The checker uses
FORMAT_CLAUSE and FORMAT_VERB_TYPES to validate literal format strings beforehand.
"""

import json
import math
import operator
import re
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.library.conversions import show_double, show_duration, show_timestamp
from rackloom.core.allocate.cel.types import cel_function, declare_functions
from rackloom.core.allocate.cel.values import Duration, Timestamp, TypeName, map_keys, type_name

if TYPE_CHECKING:
    from rackloom.core.allocate.cel.regex import Regex


# String functions.


_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space as Unicode defines it. Python's own strip takes control characters too."""

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


def _lower_ascii(text: str) -> str:
    return text.lower() if text.isascii() else text.translate(_UPPER)


def _upper_ascii(text: str) -> str:
    return text.upper() if text.isascii() else text.translate(_LOWER)


declare_functions(
    ("contains_string", "string.contains(string) -> bool", operator.contains),
    ("starts_with_string", "string.startsWith(string) -> bool", str.startswith),
    ("ends_with_string", "string.endsWith(string) -> bool", str.endswith),
    ("string_index_of_string", "string.indexOf(string) -> int", str.find),
    ("string_last_index_of_string", "string.lastIndexOf(string) -> int", str.rfind),
    ("string_lower_ascii", "string.lowerAscii() -> string", _lower_ascii),
    ("string_upper_ascii", "string.upperAscii() -> string", _upper_ascii),
    ("string_replace_string_string", "string.replace(string, string) -> string", str.replace),
    ("string_replace_string_string_int", "string.replace(string, string, int) -> string", str.replace),
    ("string_trim", "string.trim() -> string", lambda text: text.strip(_SPACE)),
    ("strings_quote", "strings.quote(string) -> string", lambda text: f'"{text.translate(_ESCAPES)}"'),
)


@cel_function("string_char_at_int", "string.charAt(int) -> string")
def _char_at(text: str, at: int) -> str:
    if not 0 <= at <= len(text):
        raise EvaluationError(f"index out of range: {at}")
    return text[at : at + 1]


@cel_function("string_index_of_string_int", "string.indexOf(string, int) -> int")
def _index_of_from(text: str, part: str, start: int) -> int:
    if not part:
        return start
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    return text.find(part, start)


@cel_function("string_last_index_of_string_int", "string.lastIndexOf(string, int) -> int")
def _last_index_of_until(text: str, part: str, last: int) -> int:
    if not part:
        return last
    if last < 0:
        raise EvaluationError(f"index out of range: {last}")
    return -1 if last >= len(text) else text.rfind(part, 0, last + len(part))


@cel_function("string_split_string", "string.split(string) -> list<string>")
def _split(text: str, separator: str) -> list[str]:
    return text.split(separator) if separator else list(text)


@cel_function("string_split_string_int", "string.split(string, int) -> list<string>")
def _split_some(text: str, separator: str, count: int) -> list[str]:
    if count == 0:
        return []
    if count < 0:
        return _split(text, separator)
    if separator:
        return text.split(separator, count - 1)
    return [*text[: count - 1], text[count - 1 :]] if len(text) > count - 1 else list(text)


@cel_function("string_substring_int", "string.substring(int) -> string")
def _substring_from(text: str, start: int) -> str:
    if not 0 <= start <= len(text):
        raise EvaluationError(f"index out of range: {start}")
    return text[start:]


@cel_function("string_substring_int_int", "string.substring(int, int) -> string")
def _substring(text: str, start: int, end: int) -> str:
    if start > end:
        raise EvaluationError(f"invalid substring range. start: {start}, end: {end}")
    for position in (start, end):
        if not 0 <= position <= len(text):
            raise EvaluationError(f"index out of range: {position}")
    return text[start:end]


@cel_function("list_join", "list<string>.join() -> string")
@cel_function("list_join_string", "list<string>.join(string) -> string")
def _join(items: list[Any], separator: str = "") -> str:
    for item in items:
        if not isinstance(item, str):
            raise EvaluationError("no such overload")
    return separator.join(items)


# Regular expressions: matches, find and findAll.


def compiled_pattern(pattern: str) -> "Regex":
    """The compiled pattern. Raises EvaluationError if Go would refuse it."""
    # Few selectors have patterns: claims without any do not load the engine.
    from rackloom.core.allocate.cel.regex import compiled_regex

    try:
        return compiled_regex(pattern)
    except ValueError as error:
        raise EvaluationError(f"error parsing regexp: {error}") from None


@cel_function("matches", "matches(string, string) -> bool")
@cel_function("matches_string", "string.matches(string) -> bool")
def _matches(text: str, pattern: str) -> bool:
    return compiled_pattern(pattern).search(text)


@cel_function("string_find_string", "string.find(string) -> string")
def _find_match(text: str, pattern: str) -> str:
    return next(compiled_pattern(pattern).find_all(text), "")


@cel_function("string_find_all_string", "string.findAll(string) -> list<string>")
def _find_all_matches(text: str, pattern: str) -> list[str]:
    return list(compiled_pattern(pattern).find_all(text))


@cel_function("string_find_all_string_int", "string.findAll(string, int) -> list<string>")
def _find_some_matches(text: str, pattern: str, limit: int) -> list[str]:
    return list(islice(compiled_pattern(pattern).find_all(text), limit if limit >= 0 else None))


# The format function.


FORMAT_CLAUSE = re.compile(r"%(?:(%)|(?:\.([0-9]*))?(.)?)", re.DOTALL)
"""One clause: a percent sign, or precision and verb."""

FORMAT_VERB_TYPES: dict[str, tuple[str, ...]] = {
    "s": (
        *("list", "map", "int", "uint", "double", "bool", "string", "bytes", "type", "null_type"),
        *("google.protobuf.Timestamp", "google.protobuf.Duration"),
    ),
    "d": ("int", "uint"),
    "f": ("double", "string"),
    "e": ("double", "string"),
    "b": ("int", "uint", "bool"),
    "o": ("int", "uint"),
    "x": ("int", "uint", "string", "bytes"),
    "X": ("int", "uint", "string", "bytes"),
}
"""Names of the types that each verb takes. Of strings, %f and %e take only those in `_NO_NUMBER`."""

_PRECISION = 6
_NO_NUMBER = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SUPERSCRIPT = str.maketrans(
    "0123456789-+", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b "
)
_GO_ESCAPES = {"\\u0007": "\\a", "\\u000b": "\\v"}


def format_string(template: str, args: list[Any]) -> str:
    """`template` with each clause replaced by its argument."""
    out: list[str] = []
    at = used = 0
    for clause in FORMAT_CLAUSE.finditer(template):
        out.append(template[at : clause.start()])
        at = clause.end()
        if clause[1]:
            out.append("%")
            continue
        verb = format_verb(clause, used, len(args))
        if type_name(args[used]) not in FORMAT_VERB_TYPES[verb]:
            raise not_formattable(verb, type_name(args[used]))
        precision = None if clause[2] is None else int(clause[2] or "0")
        out.append(_VERBS[verb](args[used], precision))
        used += 1
    return "".join(out) + template[at:]


def format_verb(clause: re.Match[str], position: int, count: int) -> str:
    """The verb of a clause that takes argument `position` of `count`. Raises EvaluationError."""
    if position >= count:
        raise EvaluationError(f"index {position} out of range")
    verb = clause[3]
    if verb is None:
        raise EvaluationError("unexpected end of string")
    if verb not in FORMAT_VERB_TYPES:
        raise EvaluationError(f'could not parse formatting clause: unrecognized formatting clause "{verb}"')
    return verb


def not_formattable(verb: str, kind: str) -> EvaluationError:
    """A verb met a type it does not take."""
    takes = ", ".join(FORMAT_VERB_TYPES[verb])
    return EvaluationError(f"error during formatting: %{verb} can only be used on {takes}, was given {kind}")


def _show_any(value: Any, _: int | None) -> str:
    match value:
        case str():
            return value
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return f"[{', '.join(map(_show_literal, value))}]"
        case dict():
            pairs = []
            for key, item in zip(map_keys(value), value.values(), strict=True):
                if not isinstance(key, bool | int | str):
                    raise EvaluationError(f"no formatting function for map key of type {type_name(key)}")
                pairs.append((_show_literal(key), _show_literal(item)))
            # Sorted by the text of the key: a map has no order in CEL.
            pairs.sort(key=lambda pair: pair[0])
            return "{" + ", ".join(f"{key}:{item}" for key, item in pairs) + "}"
        case float():
            return show_double(value)
        case int():
            return str(int(value))
        case bytes():
            return value.decode(errors="replace")
        case Timestamp():
            return show_timestamp(value)
        case Duration():
            return show_duration(value)
    return value.name if isinstance(value, TypeName) else ""


def _show_literal(value: Any) -> str:
    """A value inside a list or map, written as CEL would read it."""
    if type_name(value) not in FORMAT_VERB_TYPES["s"]:
        raise EvaluationError(f"error during formatting: no formatting function for {type_name(value)}")
    match value:
        case str():
            return _quoted(value)
        case bytes():
            return "b" + _quoted(value.decode(errors="replace"))
        case float():
            return f"{value:.{_PRECISION}f}" if math.isfinite(value) else _quoted(show_double(value))
        case Timestamp():
            return f'timestamp("{show_timestamp(value)}")'
        case Duration():
            return f'duration("{show_duration(value)}")'
    return _show_any(value, None)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")
    for ours, theirs in _GO_ESCAPES.items():
        quoted = quoted.replace(ours, theirs)
    return re.sub(r"\\u00([01][0-9a-f])", r"\\x\1", quoted)


def _as_number(value: Any) -> float:
    if isinstance(value, float):
        return value
    if value not in _NO_NUMBER:
        raise not_formattable("f", "string")
    return _NO_NUMBER[value]


def _show_non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "\u221e" if value > 0 else "-\u221e"


def _show_fixed(value: Any, precision: int | None) -> str:
    number = _as_number(value)
    if not math.isfinite(number):
        return _show_non_finite(number)
    return f"{number:,.{_PRECISION if precision is None else precision}f}"


def _show_scientific(value: Any, precision: int | None) -> str:
    """Six digits and a power of ten. The written precision is the width, as upstream has it."""
    width = _PRECISION if precision is None else precision
    number = _as_number(value)
    if not math.isfinite(number):
        return _show_non_finite(number).rjust(width)
    digits, power = f"{number:.{_PRECISION}e}".split("e")
    shown = power.removeprefix("+").translate(_SUPERSCRIPT)
    return f"{digits}\u00d710{shown}".rjust(width)


def _show_integer(style: str) -> Callable[[Any, int | None], str]:
    return lambda value, _: format(int(value), style)


def _show_hex(style: str) -> Callable[[Any, int | None], str]:
    def show(value: Any, _: int | None) -> str:
        if isinstance(value, int):
            return format(int(value), style)
        raw = (value.encode() if isinstance(value, str) else value).hex()
        return str(raw.upper() if style == "X" else raw)

    return show


_VERBS: dict[str, Callable[[Any, int | None], str]] = {
    "s": _show_any,
    "d": _show_integer("d"),
    "f": _show_fixed,
    "e": _show_scientific,
    "b": _show_integer("b"),
    "o": _show_integer("o"),
    "x": _show_hex("x"),
    "X": _show_hex("X"),
}
