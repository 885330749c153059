"""Messages that an expression may build, such as `google.protobuf.Int32Value{value: 1}`.

The API server's environment declares protobuf's well-known types. None of them stays a message: each becomes
a value of CEL at once, as cel-go has it. A wrapper becomes the number, string or bool in it. `Timestamp` and
`Duration` become the time that they mean. `Value`, `Struct` and `ListValue` become their JSON values, and
every number in JSON is a double. A field that is not set has the default of protobuf.

Two well-known types are left out, `Any` and `Empty`, and so is the enum `NullValue`: no selector has a use
for them. Upstream, a message of `kubernetes.DRADevice` passes the type check and fails at run time. Here
the check refuses it. A timestamp outside the years 1 to 9999 is an error here, but upstream makes it a
value that equals no other.
"""

import base64
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.library.conversions import show_duration, show_timestamp
from rackloom.core.allocate.cel.types import CelType
from rackloom.core.allocate.cel.values import (
    INT64_MAX,
    INT64_MIN,
    TYPE_NAMES,
    BoolKey,
    Duration,
    OptionalValue,
    Timestamp,
    Uint,
)

_SECOND = 10**9
_EXACT = 2**53 - 1
"""The largest integer that JSON's doubles hold with all below it. Larger ones become strings."""
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, which protobuf's timestamps may have."""


class MessageType(msgspec.Struct, frozen=True):
    """A message: its fields, the type of the value that it becomes, and how it becomes one."""

    fields: Mapping[str, CelType]
    result: CelType
    build: Callable[[Mapping[str, Any]], Any]
    """From the fields that are set. Raises EvaluationError."""


def _scalar(wanted: type, low: int | None = None, high: int | None = None) -> Callable[[str, Any], Any]:
    """Takes a value of the type, within the range that the field of the message has."""

    def convert(field: str, value: Any) -> Any:
        number: Any = value  # Any, because a type checker misreads the comparison of classes.
        if type(value) is not wanted:
            found = TYPE_NAMES[type(value)]
            raise EvaluationError(
                f"field type conversion error for {field}: unsupported value of type {found}"
            )
        if low is not None and high is not None and not low <= number <= high:
            raise EvaluationError(f"field type conversion error for {field} value type: integer overflow")
        return number

    return convert


_BOOL, _BYTES, _DOUBLE, _STRING = map(_scalar, (bool, bytes, float, str))
_INT32 = _scalar(int, -(2**31), 2**31 - 1)
_INT64 = _scalar(int)
_UINT32 = _scalar(Uint, 0, 2**32 - 1)
_UINT64 = _scalar(Uint)


def _float32(field: str, value: Any) -> float:
    exact = _DOUBLE(field, value)
    try:
        return float(struct.unpack("<f", struct.pack("<f", exact))[0])
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def _wrapper(name: str, type_: CelType, convert: Callable[[str, Any], Any], default: Any) -> MessageType:
    def build(fields: Mapping[str, Any]) -> Any:
        return convert(f"{name}.value", fields["value"]) if "value" in fields else default

    return MessageType({"value": type_}, types.wrapper_of(type_), build)


def _nanos(name: str, fields: Mapping[str, Any]) -> tuple[int, int]:
    seconds = _INT64(f"{name}.seconds", fields.get("seconds", 0))
    return seconds, seconds * _SECOND + _INT32(f"{name}.nanos", fields.get("nanos", 0))


def _timestamp(fields: Mapping[str, Any]) -> Timestamp:
    seconds, nanos = _nanos("google.protobuf.Timestamp", fields)
    if not _FIRST_SECOND <= seconds <= _LAST_SECOND:
        raise EvaluationError("timestamp overflow")
    return Timestamp(nanos)


def _duration(fields: Mapping[str, Any]) -> Duration:
    _, nanos = _nanos("google.protobuf.Duration", fields)
    return Duration(min(max(nanos, INT64_MIN), INT64_MAX))


def _json(value: Any) -> Any:
    """A value as protobuf's JSON types hold it."""
    match value:
        case None | bool() | float() | str():
            return value
        case int():  # Uint is an int, too.
            return float(value) if -_EXACT <= value <= _EXACT else str(int(value))
        case bytes():
            return base64.b64encode(value).decode()
        case Timestamp():
            return show_timestamp(value)
        case Duration():
            return show_duration(value)
        case OptionalValue():
            return _json(value.value) if value.present else None
        case list():
            return list(map(_json, value))
        case dict():
            fields = {}
            for key, inner in value.items():
                # JSON has texts for keys and nothing else.
                if not isinstance(key, str):
                    found = "bool" if isinstance(key, BoolKey) else TYPE_NAMES[type(key)]
                    raise EvaluationError(f"type conversion error from {found} to 'string'")
                fields[key] = _json(inner)
            return fields
    raise EvaluationError(f"type conversion error from '{TYPE_NAMES[type(value)]}' to JSON")


def _json_container(wanted: type) -> Callable[[str, Any], Any]:
    """Takes a list or a map with JSON values."""

    def convert(field: str, value: Any) -> Any:
        if not isinstance(value, wanted):
            found = TYPE_NAMES[type(value)]
            raise EvaluationError(
                f"field type conversion error for {field} value type: unsupported type {found}"
            )
        return _json(value)

    return convert


def _container(name: str, field: str, type_: CelType, wanted: type) -> MessageType:
    convert = _json_container(wanted)

    def build(fields: Mapping[str, Any]) -> Any:
        return convert(f"{name}.{field}", fields[field]) if field in fields else wanted()

    return MessageType({field: type_}, type_, build)


_VALUE_FIELDS: dict[str, tuple[CelType, Callable[[str, Any], Any]]] = {
    "null_value": (types.INT, lambda field, value: None),
    "number_value": (types.DOUBLE, _DOUBLE),
    "string_value": (types.STRING, _STRING),
    "bool_value": (types.BOOL, _BOOL),
    "struct_value": (types.map_of(types.STRING, types.DYN), _json_container(dict)),
    "list_value": (types.list_of(types.DYN), _json_container(list)),
}


def _value(fields: Mapping[str, Any]) -> Any:
    """The alternative that was set last, or null if none was set."""
    result = None
    for field, value in fields.items():
        result = _VALUE_FIELDS[field][1](f"google.protobuf.Value.{field}", value)
    return result


_WRAPPERS: tuple[tuple[str, CelType, Callable[[str, Any], Any], Any], ...] = (
    ("BoolValue", types.BOOL, _BOOL, False),
    ("BytesValue", types.BYTES, _BYTES, b""),
    ("DoubleValue", types.DOUBLE, _DOUBLE, 0.0),
    ("FloatValue", types.DOUBLE, _float32, 0.0),
    ("Int32Value", types.INT, _INT32, 0),
    ("Int64Value", types.INT, _INT64, 0),
    ("StringValue", types.STRING, _STRING, ""),
    ("UInt32Value", types.UINT, _UINT32, Uint(0)),
    ("UInt64Value", types.UINT, _UINT64, Uint(0)),
)
_TIME_FIELDS = {"seconds": types.INT, "nanos": types.INT}
_STRUCT, _LIST = types.map_of(types.STRING, types.DYN), types.list_of(types.DYN)

MESSAGES: dict[str, MessageType] = {
    **{
        f"google.protobuf.{name}": _wrapper(f"google.protobuf.{name}", type_, convert, default)
        for name, type_, convert, default in _WRAPPERS
    },
    "google.protobuf.Timestamp": MessageType(_TIME_FIELDS, types.TIMESTAMP, _timestamp),
    "google.protobuf.Duration": MessageType(_TIME_FIELDS, types.DURATION, _duration),
    "google.protobuf.Value": MessageType(
        {name: type_ for name, (type_, _) in _VALUE_FIELDS.items()}, types.DYN, _value
    ),
    "google.protobuf.Struct": _container("google.protobuf.Struct", "fields", _STRUCT, dict),
    "google.protobuf.ListValue": _container("google.protobuf.ListValue", "values", _LIST, list),
}
"""By full name."""
