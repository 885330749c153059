"""string.format: `%s %d %f %e %b %x %X %o %%`, as the strings library had it in its second version."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.library.conversions import show_double
from rackloom.claim.allocate.cel.library.times import show_duration, show_timestamp
from rackloom.claim.allocate.cel.values import Duration, Timestamp, TypeName, keys, type_name

CLAUSE = re.compile(r"%(?:(%)|(?:\.([0-9]*))?(.)?)", re.DOTALL)
"""One clause: a percent sign, or precision and verb."""

VERB_TYPES: dict[str, tuple[str, ...]] = {
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
"""Names of the types that each verb takes; of strings, %f and %e take only those that name no number."""

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
    for clause in CLAUSE.finditer(template):
        out.append(template[at : clause.start()])
        at = clause.end()
        if clause[1]:
            out.append("%")
            continue
        verb = verb_of(clause, used, len(args))
        if type_name(args[used]) not in VERB_TYPES[verb]:
            raise not_formattable(verb, type_name(args[used]))
        precision = None if clause[2] is None else int(clause[2] or "0")
        out.append(_VERBS[verb](args[used], precision))
        used += 1
    return "".join(out) + template[at:]


def verb_of(clause: re.Match[str], position: int, count: int) -> str:
    """The verb of a clause that takes argument `position` of `count`. Raises EvaluationError."""
    if position >= count:
        raise EvaluationError(f"index {position} out of range")
    verb = clause[3]
    if verb is None:
        raise EvaluationError("unexpected end of string")
    if verb not in VERB_TYPES:
        raise EvaluationError(f'could not parse formatting clause: unrecognized formatting clause "{verb}"')
    return verb


def not_formattable(verb: str, kind: str) -> EvaluationError:
    """A verb met a type it does not take."""
    takes = ", ".join(VERB_TYPES[verb])
    return EvaluationError(f"error during formatting: %{verb} can only be used on {takes}, was given {kind}")


def _string(value: Any, _: int | None) -> str:
    match value:
        case str():
            return value
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return _map(value)
    return _scalar(value)


def _scalar(value: Any) -> str:
    match value:
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


def _map(value: dict[Any, Any]) -> str:
    pairs = []
    for key, item in zip(keys(value), value.values(), strict=True):
        if not isinstance(key, bool | int | str):
            raise EvaluationError(f"no formatting function for map key of type {type_name(key)}")
        pairs.append((_literal(key), _literal(item)))
    return "{" + ", ".join(f"{key}:{item}" for key, item in sorted(pairs, key=lambda pair: pair[0])) + "}"


def _literal(value: Any) -> str:
    """A value inside a list or map, written as CEL would read it."""
    if type_name(value) not in VERB_TYPES["s"]:
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
    return _string(value, None)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")
    for ours, theirs in _GO_ESCAPES.items():
        quoted = quoted.replace(ours, theirs)
    return re.sub(r"\\u00([01][0-9a-f])", r"\\x\1", quoted)


def _number(value: Any) -> float:
    if isinstance(value, float):
        return value
    if value not in _NO_NUMBER:
        raise not_formattable("f", "string")
    return _NO_NUMBER[value]


def _special(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "\u221e" if value > 0 else "-\u221e"


def _fixed(value: Any, precision: int | None) -> str:
    number = _number(value)
    if not math.isfinite(number):
        return _special(number)
    return f"{number:,.{_PRECISION if precision is None else precision}f}"


def _scientific(value: Any, precision: int | None) -> str:
    """Six digits and a power of ten. What is written as precision is the width, as upstream has it."""
    width = _PRECISION if precision is None else precision
    number = _number(value)
    if not math.isfinite(number):
        return _special(number).rjust(width)
    digits, power = f"{number:.{_PRECISION}e}".split("e")
    shown = power.removeprefix("+").translate(_SUPERSCRIPT)
    return f"{digits}\u00d710{shown}".rjust(width)


def _integer(style: str) -> Callable[[Any, int | None], str]:
    return lambda value, _: format(int(value), style)


def _hex(style: str) -> Callable[[Any, int | None], str]:
    def show(value: Any, _: int | None) -> str:
        if isinstance(value, int):
            return format(int(value), style)
        raw = (value.encode() if isinstance(value, str) else value).hex()
        return str(raw.upper() if style == "X" else raw)

    return show


_VERBS: dict[str, Callable[[Any, int | None], str]] = {
    "s": _string,
    "d": _integer("d"),
    "f": _fixed,
    "e": _scientific,
    "b": _integer("b"),
    "o": _integer("o"),
    "x": _hex("x"),
    "X": _hex("X"),
}
