"""Conversions between the basic types, each exact or an error."""

import math
import re
from decimal import Decimal
from typing import Any

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.library.operators import as_timestamp
from rackloom.claim.allocate.cel.library.times import (
    parse_duration,
    parse_timestamp,
    show_duration,
    show_timestamp,
)
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import (
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

CONVERSIONS = Library()
_add = CONVERSIONS.add

_INT = re.compile(r"[+-]?[0-9]+")
_UINT = re.compile(r"[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DIGIT_GAP = re.compile(r"(?<=[0-9])_(?=[0-9])")
_HEX_FLOAT = re.compile(r"[+-]?0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+")
_SPECIAL = re.compile(r"[+-]?(inf|infinity)|nan", re.IGNORECASE)
_EXPONENT_FROM = 6
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


def _same(value: Any) -> Any:
    return value


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
    _add(_id, f"{_name}({_name}) -> {_name}")(_same)
_add("to_dyn", "dyn(A) -> dyn")(_same)


def _refused(text: str, kind: str) -> EvaluationError:
    return EvaluationError(f"type conversion error from 'string' to '{kind}': {text!r}")


@_add("type", "type(A) -> type<A>")
def _type(value: Any) -> TypeName:
    return TypeName(type_name(value))


@_add("string_to_bool", "bool(string) -> bool")
def _bool(text: str) -> bool:
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise _refused(text, "bool")


@_add("string_to_bytes", "bytes(string) -> bytes")
def _bytes(text: str) -> bytes:
    return text.encode()


@_add("int64_to_double", "double(int) -> double")
@_add("uint64_to_double", "double(uint) -> double")
def _double(value: int) -> float:
    return float(value)


@_add("string_to_double", "double(string) -> double")
def _double_of_text(text: str) -> float:
    text = _DIGIT_GAP.sub("", text)
    if _FLOAT.fullmatch(text) or _SPECIAL.fullmatch(text):
        value = float(text)
        if math.isinf(value) and not _SPECIAL.fullmatch(text):
            raise _refused(text, "double")
        return value
    if _HEX_FLOAT.fullmatch(text):
        try:
            return float.fromhex(text)
        except OverflowError:
            raise _refused(text, "double") from None
    raise _refused(text, "double")


@_add("double_to_int64", "int(double) -> int")
def _int_of_double(value: float) -> int:
    if math.isnan(value) or not float(INT64_MIN) < value < float(INT64_MAX):
        raise EvaluationError("integer overflow")
    return int(value)


@_add("duration_to_int64", "int(duration) -> int")
def _int_of_duration(value: Duration) -> int:
    return value.nanos


@_add("string_to_int64", "int(string) -> int")
def _int_of_text(text: str) -> int:
    if not _INT.fullmatch(text) or not INT64_MIN <= int(text) <= INT64_MAX:
        raise _refused(text, "int")
    return int(text)


@_add("timestamp_to_int64", "int(timestamp) -> int")
def _int_of_timestamp(value: Timestamp) -> int:
    return value.nanos // 10**9


@_add("uint64_to_int64", "int(uint) -> int")
def _int_of_uint(value: Uint) -> int:
    return in_int64(int(value))


@_add("double_to_uint64", "uint(double) -> uint")
def _uint_of_double(value: float) -> Uint:
    if math.isnan(value) or not 0 <= value < 2.0**64:
        raise EvaluationError("unsigned integer overflow")
    return Uint(value)


@_add("int64_to_uint64", "uint(int) -> uint")
def _uint_of_int(value: int) -> Uint:
    return in_uint64(value)


@_add("string_to_uint64", "uint(string) -> uint")
def _uint_of_text(text: str) -> Uint:
    if not _UINT.fullmatch(text) or int(text) > UINT64_MAX:
        raise _refused(text, "uint")
    return Uint(text)


@_add("bool_to_string", "string(bool) -> string")
def _text_of_bool(value: bool) -> str:
    return "true" if value else "false"


@_add("bytes_to_string", "string(bytes) -> string")
def _text_of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise EvaluationError("invalid UTF-8 in bytes, cannot convert to string") from None


@_add("double_to_string", "string(double) -> string")
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


@_add("duration_to_string", "string(duration) -> string")
def _text_of_duration(value: Duration) -> str:
    return show_duration(value)


@_add("int64_to_string", "string(int) -> string")
@_add("uint64_to_string", "string(uint) -> string")
def _text_of_int(value: int) -> str:
    return str(int(value))


@_add("timestamp_to_string", "string(timestamp) -> string")
def _text_of_timestamp(value: Timestamp) -> str:
    return show_timestamp(value)


@_add("int64_to_duration", "duration(int) -> duration")
def _duration(nanos: int) -> Duration:
    return Duration(nanos)


@_add("string_to_duration", "duration(string) -> duration")
def _duration_of_text(text: str) -> Duration:
    return parse_duration(text)


@_add("int64_to_timestamp", "timestamp(int) -> timestamp")
def _timestamp(seconds: int) -> Timestamp:
    return as_timestamp(seconds * 10**9)


@_add("string_to_timestamp", "timestamp(string) -> timestamp")
def _timestamp_of_text(text: str) -> Timestamp:
    return parse_timestamp(text)
