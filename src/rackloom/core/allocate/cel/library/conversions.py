"""Conversions between basic types, and functions that read, print and take apart times.

Each conversion is exact or an error. Texts are read and printed as Go does: doubles by their shortest
digits, durations as seconds, timestamps in RFC 3339. Durations accept Go's units from ns to h. Time
zones are names of the tz database or offsets such as +05:30. The database is loaded when a selector
first names a zone.
"""

import datetime as dt
import math
import re
from collections.abc import Callable
from decimal import Decimal

from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.library.operators import as_timestamp
from rackloom.core.allocate.cel.types import cel_function, declare_functions
from rackloom.core.allocate.cel.values import (
    INT64_MAX,
    INT64_MIN,
    UINT64_MAX,
    Duration,
    Timestamp,
    TypeName,
    Uint,
    in_int64,
    in_uint64,
    type_name,
)

# Timestamps and durations.


_SECOND = 10**9
_UNITS = {
    "ns": 1,
    "us": 10**3,
    "\u00b5s": 10**3,
    "\u03bcs": 10**3,
    "ms": 10**6,
    "s": _SECOND,
    "m": 60 * _SECOND,
    "h": 3600 * _SECOND,
}
_DURATION_STEP = re.compile(
    r"([0-9]+)(?:\.([0-9]*))?(ns|us|\u00b5s|\u03bcs|ms|s|m|h)|\.([0-9]+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)"
)
_DATE_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]+))?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)
_OFFSET = re.compile(r"([+-]?)([0-9]+):([+-]?[0-9]+)")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def parse_duration(text: str) -> Duration:
    """Read `1h30m`, `1.5s`, `-250ms`, `0`. Raises EvaluationError."""
    body = text[1:] if text[:1] in ("+", "-") else text
    if body == "0":
        return Duration(0)
    at, nanos = 0, 0
    while at < len(body):
        step = _DURATION_STEP.match(body, at)
        if step is None:
            break
        whole, fraction, unit, only_fraction, other_unit = step.groups()
        size = _UNITS[unit or other_unit]
        part = fraction or only_fraction or ""
        nanos += int(whole or "0") * size + int(part or "0") * size // 10 ** len(part)
        at = step.end()
    if not body or at < len(body) or nanos > 2**63 - (text[:1] != "-"):
        raise EvaluationError(f"type conversion error from 'string' to 'google.protobuf.Duration': {text!r}")
    return Duration(-nanos if text[0] == "-" else nanos)


def parse_timestamp(text: str) -> Timestamp:
    """Read an RFC 3339 date and time. Raises EvaluationError."""
    parts = _DATE_TIME.fullmatch(text)
    if parts is None:
        raise _not_a_time(text)
    numbers = [int(part) for part in parts.groups()[:6]]
    fraction, sign, hours, minutes = parts.groups()[6:]
    if int(hours or 0) > 24 or int(minutes or 0) > 60:
        raise _not_a_time(text)
    try:
        moment = dt.datetime(*numbers, tzinfo=dt.UTC)  # type: ignore[arg-type, misc]
    except ValueError:
        raise _not_a_time(text) from None
    east = (int(hours or 0) * 3600 + int(minutes or 0) * 60) * (-1 if sign == "-" else 1)
    seconds = int((moment - _EPOCH).total_seconds()) - east
    return as_timestamp(seconds * _SECOND + int((fraction or "")[:9].ljust(9, "0")))


def _not_a_time(text: str) -> EvaluationError:
    return EvaluationError(f"type conversion error from 'string' to 'google.protobuf.Timestamp': {text!r}")


def show_duration(value: Duration) -> str:
    """`5400s`, `0.25s`."""
    seconds = abs(value.nanos) // _SECOND + (abs(value.nanos) % _SECOND) / 1e9
    shown = format(Decimal(repr(float(seconds))), "f")
    shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    return ("-" if value.nanos < 0 else "") + shown + "s"


def show_timestamp(value: Timestamp) -> str:
    """RFC 3339 in UTC, with as many digits of a second as needed."""
    moment = _as_datetime(value)
    fraction = f"{value.nanos % _SECOND:09d}".rstrip("0")
    return moment.strftime(f"{moment.year:04d}-%m-%dT%H:%M:%S") + (f".{fraction}" if fraction else "") + "Z"


def _as_datetime(value: Timestamp) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=value.nanos // _SECOND)


def _in_zone(moment: dt.datetime, name: str) -> dt.datetime:
    """The moment as clocks show it in a named zone, or at an offset such as +05:30."""
    # Loads slowly, and no other function needs it.
    import zoneinfo

    try:
        if ":" in name:
            parts = _OFFSET.fullmatch(name)
            if parts is None:
                raise EvaluationError(f"invalid time zone offset {name!r}")
            sign, hours, minutes = parts.groups()
            east = int(hours) * 60 + int(minutes)
            return moment + dt.timedelta(minutes=-east if sign == "-" else east)
        return moment.astimezone(zoneinfo.ZoneInfo(name or "UTC"))
    except OverflowError:
        raise EvaluationError("timestamp overflow") from None
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise EvaluationError(f"unknown time zone {name}") from None


_TIME_PARTS: dict[str, tuple[str, Callable[[dt.datetime, int], int]]] = {
    "getFullYear": ("year", lambda moment, nanos: moment.year),
    "getMonth": ("month", lambda moment, nanos: moment.month - 1),
    "getDayOfYear": ("day_of_year", lambda moment, nanos: moment.timetuple().tm_yday - 1),
    "getDayOfMonth": ("day_of_month", lambda moment, nanos: moment.day - 1),
    "getDate": ("day_of_month_1_based", lambda moment, nanos: moment.day),
    "getDayOfWeek": ("day_of_week", lambda moment, nanos: moment.isoweekday() % 7),
    "getHours": ("hours", lambda moment, nanos: moment.hour),
    "getMinutes": ("minutes", lambda moment, nanos: moment.minute),
    "getSeconds": ("seconds", lambda moment, nanos: moment.second),
    "getMilliseconds": ("milliseconds", lambda moment, nanos: nanos % _SECOND // 10**6),
}
_DURATION_PARTS = {
    "getHours": 3600 * _SECOND,
    "getMinutes": 60 * _SECOND,
    "getSeconds": _SECOND,
    "getMilliseconds": 10**6,
}


def _declare_time_part(name: str) -> None:
    label, take = _TIME_PARTS[name]

    def of(value: Timestamp) -> int:
        return take(_as_datetime(value), value.nanos)

    def within(value: Timestamp, zone: str) -> int:
        return take(_in_zone(_as_datetime(value), zone), value.nanos)

    suffix = "_tz" if name == "getSeconds" else "_with_tz"
    cel_function(f"timestamp_to_{label}", f"timestamp.{name}() -> int")(of)
    cel_function(f"timestamp_to_{label}{suffix}", f"timestamp.{name}(string) -> int")(within)


def _declare_duration_part(name: str) -> None:
    def of(value: Duration) -> int:
        return abs(value.nanos) // _DURATION_PARTS[name] * (-1 if value.nanos < 0 else 1)

    cel_function(f"duration_to_{_TIME_PARTS[name][0]}", f"duration.{name}() -> int")(of)


for _getter in _TIME_PARTS:
    _declare_time_part(_getter)
for _getter in _DURATION_PARTS:
    _declare_duration_part(_getter)


# Conversions.


_INT = re.compile(r"[+-]?[0-9]+")
_UINT = re.compile(r"[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DIGIT_GAP = re.compile(r"(?<=[0-9])_(?=[0-9])")
_HEX_FLOAT = re.compile(r"[+-]?0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+")
_SPECIAL = re.compile(r"[+-]?(inf|infinity)|nan", re.IGNORECASE)
_EXPONENT_FROM = 6
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


for _name, _id in (
    ("bool", "bool_to_bool"),
    ("bytes", "bytes_to_bytes"),
    ("double", "double_to_double"),
    ("duration", "duration_to_duration"),
    ("int", "int64_to_int64"),
    ("string", "string_to_string"),
    ("timestamp", "timestamp_to_timestamp"),
    ("uint", "uint64_to_uint64"),
):
    declare_functions((_id, f"{_name}({_name}) -> {_name}", lambda value: value))


def _conversion_error(text: str, kind: str) -> EvaluationError:
    return EvaluationError(f"type conversion error from 'string' to '{kind}': {text!r}")


@cel_function("string_to_bool", "bool(string) -> bool")
def _bool(text: str) -> bool:
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise _conversion_error(text, "bool")


@cel_function("string_to_double", "double(string) -> double")
def _double_of_text(text: str) -> float:
    text = _DIGIT_GAP.sub("", text)
    if _FLOAT.fullmatch(text) or _SPECIAL.fullmatch(text):
        value = float(text)
        if math.isinf(value) and not _SPECIAL.fullmatch(text):
            raise _conversion_error(text, "double")
        return value
    if _HEX_FLOAT.fullmatch(text):
        try:
            return float.fromhex(text)
        except OverflowError:
            raise _conversion_error(text, "double") from None
    raise _conversion_error(text, "double")


@cel_function("double_to_int64", "int(double) -> int")
def _int_of_double(value: float) -> int:
    if math.isnan(value) or not float(INT64_MIN) < value < float(INT64_MAX):
        raise EvaluationError("integer overflow")
    return int(value)


@cel_function("string_to_int64", "int(string) -> int")
def _int_of_text(text: str) -> int:
    if not _INT.fullmatch(text) or not INT64_MIN <= int(text) <= INT64_MAX:
        raise _conversion_error(text, "int")
    return int(text)


@cel_function("double_to_uint64", "uint(double) -> uint")
def _uint_of_double(value: float) -> Uint:
    if math.isnan(value) or not 0 <= value < 2.0**64:
        raise EvaluationError("unsigned integer overflow")
    return Uint(value)


@cel_function("string_to_uint64", "uint(string) -> uint")
def _uint_of_text(text: str) -> Uint:
    if not _UINT.fullmatch(text) or int(text) > UINT64_MAX:
        raise _conversion_error(text, "uint")
    return Uint(text)


@cel_function("bytes_to_string", "string(bytes) -> string")
def _text_of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise EvaluationError("invalid UTF-8 in bytes, cannot convert to string") from None


@cel_function("double_to_string", "string(double) -> string")
def show_double(value: float) -> str:
    """The shortest digits that read back the same, with an exponent from a million on."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    shown = "".join(map(str, digits))
    power = len(shown) + int(exponent) - 1
    minus = "-" if sign else ""
    if power < -4 or power >= _EXPONENT_FROM:
        mantissa = shown[0] + ("." + shown[1:] if len(shown) > 1 else "")
        return f"{minus}{mantissa}e{'-' if power < 0 else '+'}{abs(power):02d}"
    return minus + format(abs(Decimal(repr(value))).normalize(), "f")


declare_functions(
    ("to_dyn", "dyn(A) -> dyn", lambda value: value),
    ("type", "type(A) -> type<A>", lambda value: TypeName(type_name(value))),
    ("string_to_bytes", "bytes(string) -> bytes", lambda text: text.encode()),
    ("duration_to_int64", "int(duration) -> int", lambda value: value.nanos),
    ("int64_to_uint64", "uint(int) -> uint", in_uint64),
    ("bool_to_string", "string(bool) -> string", lambda value: "true" if value else "false"),
    ("duration_to_string", "string(duration) -> string", show_duration),
    ("int64_to_double", "double(int) -> double", float),
    ("uint64_to_double", "double(uint) -> double", float),
    ("timestamp_to_int64", "int(timestamp) -> int", lambda value: value.nanos // 10**9),
    ("uint64_to_int64", "int(uint) -> int", lambda value: in_int64(int(value))),
    ("int64_to_string", "string(int) -> string", str),
    ("uint64_to_string", "string(uint) -> string", lambda value: str(int(value))),
    ("timestamp_to_string", "string(timestamp) -> string", show_timestamp),
    ("int64_to_duration", "duration(int) -> duration", Duration),
    ("string_to_duration", "duration(string) -> duration", parse_duration),
    ("int64_to_timestamp", "timestamp(int) -> timestamp", lambda seconds: as_timestamp(seconds * 10**9)),
    ("string_to_timestamp", "timestamp(string) -> timestamp", parse_timestamp),
)
