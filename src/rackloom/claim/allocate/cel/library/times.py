"""Timestamps and durations: reading, printing and taking apart."""

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.library.operators import as_timestamp
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import Duration, Timestamp

TIMES = Library()
_add = TIMES.add

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
_STEP = re.compile(
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
        step = _STEP.match(body, at)
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
    moment = _moment(value)
    fraction = f"{value.nanos % _SECOND:09d}".rstrip("0")
    return moment.strftime(f"{moment.year:04d}-%m-%dT%H:%M:%S") + (f".{fraction}" if fraction else "") + "Z"


def _moment(value: Timestamp) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=value.nanos // _SECOND)


def _local(moment: dt.datetime, name: str) -> dt.datetime:
    """The moment as clocks show it in a named zone, or at an offset such as +05:30."""
    # Loads slowly, and no other function needs it.
    import zoneinfo

    try:
        if ":" in name:
            return moment + _offset(name)
        return moment.astimezone(zoneinfo.ZoneInfo(name or "UTC"))
    except OverflowError:
        raise EvaluationError("timestamp overflow") from None
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise EvaluationError(f"unknown time zone {name}") from None


def _offset(name: str) -> dt.timedelta:
    parts = _OFFSET.fullmatch(name)
    if parts is None:
        raise EvaluationError(f"invalid time zone offset {name!r}")
    sign, hours, minutes = parts.groups()
    east = int(hours) * 60 + int(minutes)
    return dt.timedelta(minutes=-east if sign == "-" else east)


_PARTS: dict[str, tuple[str, Callable[[dt.datetime, int], int]]] = {
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
_LENGTHS = {
    "getHours": 3600 * _SECOND,
    "getMinutes": 60 * _SECOND,
    "getSeconds": _SECOND,
    "getMilliseconds": 10**6,
}


def _part(name: str) -> None:
    label, take = _PARTS[name]

    def of(value: Timestamp) -> int:
        return take(_moment(value), value.nanos)

    def within(value: Timestamp, zone: str) -> int:
        return take(_local(_moment(value), zone), value.nanos)

    suffix = "_tz" if name == "getSeconds" else "_with_tz"
    _add(f"timestamp_to_{label}", f"timestamp.{name}() -> int")(of)
    _add(f"timestamp_to_{label}{suffix}", f"timestamp.{name}(string) -> int")(within)


def _length(name: str) -> None:
    def of(value: Duration) -> int:
        return abs(value.nanos) // _LENGTHS[name] * (-1 if value.nanos < 0 else 1)

    _add(f"duration_to_{_PARTS[name][0]}", f"duration.{name}() -> int")(of)


for _name in _PARTS:
    _part(_name)
for _name in _LENGTHS:
    _length(_name)
