"""Merge patches (RFC 7386) and JSON patches (RFC 6902) as pure functions of values.

In a merge patch null removes a key, an object merges, and anything else replaces. A JSON patch is
applied operation by operation. Its size is bounded as in k8s.io/apiserver: ten thousand operations, and
three mebibytes that `copy` may add up to. A patch that cannot be read is refused with 400, and one that
does not apply with 422.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rackloom.lab.kube import refusals
from rackloom.lab.kube.managed_fields import clone

OPERATIONS = 10_000
COPIED_BYTES = 3 << 20
"""The operations of a JSON patch, and the bytes that they may copy (k8s.io/apiserver, handlers/patch.go)."""


class _Operation(msgspec.Struct, frozen=True):
    """One of RFC 6902. A `value` that is not given is null."""

    op: str
    path: str
    value: Any = None
    source: str = msgspec.field(name="from", default="")


def merge_patch(target: Any, patch: Any) -> Any:
    """The result of a merge patch on `target`: null removes, an object merges, anything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(target: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """The result of the operations on `target`.

    Raises:
        Rejected: (400) they are no operations, or (422) one does not apply, or they copy too much.
        KubeError: (413) there are too many.
    """
    target, copied = clone(target), 0
    for operation in _read_operations(operations):
        if operation.op == "copy":
            copied += len(msgspec.json.encode(_value_at(target, _pointer_parts(operation.source))))
            if copied > COPIED_BYTES:
                raise _refused(f"what it copies, {copied} bytes, exceeds the limit {COPIED_BYTES}")
        target = _apply_operation(target, operation)
    return target


def _read_operations(operations: Sequence[Mapping[str, Any]]) -> list[_Operation]:
    if len(operations) > OPERATIONS:
        message = f"the allowed maximum operations in a JSON patch is {OPERATIONS}, got {len(operations)}"
        raise refusals.too_large(message)
    try:
        return msgspec.convert(operations, list[_Operation])
    except msgspec.ValidationError as error:
        raise refusals.bad_request(f"the body of the request is no JSON patch: {error}") from error


def _apply_operation(target: Any, operation: _Operation) -> Any:
    op, path = operation.op, _pointer_parts(operation.path)
    match op:
        case "add" | "replace" | "remove":
            return _edited(target, path, op, clone(operation.value))
        case "test":
            if _value_at(target, path) != operation.value:
                raise _refused(f"testing path {operation.path!r} failed")
            return target
        case "copy" | "move":
            source = _pointer_parts(operation.source)
            value = clone(_value_at(target, source))
            if op == "move":
                target = _edited(target, source, "remove", None)
            return _edited(target, path, "add", value)
    raise _refused(f"unknown operation {op!r}")


def _pointer_parts(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise _refused(f"the path {pointer!r} does not begin with a slash")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _refused(why: str) -> Exception:
    error = refusals.bad_request(f"the server rejected our request due to an error in our request: {why}")
    error.code, error.reason = 422, "Invalid"
    return error


def _value_at(target: Any, path: list[str]) -> Any:
    for part in path:
        target = _child_of(target, part)
    return target


def _child_of(target: Any, part: str) -> Any:
    try:
        return target[_child_key(target, part)]
    except (KeyError, IndexError, TypeError):
        raise _refused(f"the path has no {part!r}") from None


_INDEX_DIGITS = 9
"""Of the index of a list: no list is longer."""


def _edited(target: Any, path: list[str], op: Literal["add", "replace", "remove"], value: Any) -> Any:
    """`target`, changed in place. A path of no parts leads to the whole of it."""
    if not path:
        return value
    *above, part = path
    parent = _value_at(target, above)
    if not isinstance(parent, list | dict):
        raise _refused(f"the path has no {part!r}")
    if op != "add":
        _child_of(parent, part)
    if op == "remove":
        del parent[_child_key(parent, part)]
    elif op == "replace" or isinstance(parent, dict):
        parent[_child_key(parent, part)] = value
    else:
        parent.insert(len(parent) if part == "-" else _index(part, len(parent)), value)
    return target


def _child_key(target: Any, part: str) -> Any:
    return _index(part, len(target) - 1) if isinstance(target, list) else part


def _index(part: str, limit: int) -> int:
    if not (part.isascii() and part.isdigit() and len(part) <= _INDEX_DIGITS and int(part) <= limit):
        raise _refused(f"index {part[:_INDEX_DIGITS]} is out of bounds")
    return int(part)
