"""Merge patches (RFC 7386) and JSON patches (RFC 6902) as functions of values; neither changes its input."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rackloom.twin.kube import answers

OPERATIONS = 10_000
COPIED_BYTES = 3 << 20
"""The operations of a JSON patch, and what they may copy in sum (k8s.io/apiserver, handlers/patch.go)."""


class _Operation(msgspec.Struct, frozen=True):
    """One of RFC 6902. A `value` that is not given is null."""

    op: str
    path: str
    value: Any = None
    source: str = msgspec.field(name="from", default="")


def merge(target: Any, patch: Any) -> Any:
    """What a merge patch makes of `target`: null removes, an object merges, anything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def json_patch(target: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """What the operations make of `target`.

    Raises:
        Rejected: (400) they are no operations; (422) one does not apply, or they copy too much.
        KubeError: (413) there are too many.
    """
    copied = 0
    for operation in _read(operations):
        if operation.op == "copy":
            copied += len(msgspec.json.encode(_at(target, _parts(operation.source))))
            if copied > COPIED_BYTES:
                raise _refused(f"what it copies, {copied} bytes, exceeds the limit {COPIED_BYTES}")
        target = _one(target, operation)
    return target


def _read(operations: Sequence[Mapping[str, Any]]) -> list[_Operation]:
    if len(operations) > OPERATIONS:
        told = f"the allowed maximum operations in a JSON patch is {OPERATIONS}, got {len(operations)}"
        raise answers.too_large(told)
    try:
        return msgspec.convert(operations, list[_Operation])
    except msgspec.ValidationError as error:
        raise answers.bad_request(f"the body of the request is no JSON patch: {error}") from error


def _one(target: Any, operation: _Operation) -> Any:
    op, path = operation.op, _parts(operation.path)
    match op:
        case "add" | "replace" | "remove":
            return _edit(target, path, _EDITS[op], operation.value)
        case "test":
            if _at(target, path) != operation.value:
                raise _refused(f"testing path {operation.path!r} failed")
            return target
        case "copy" | "move":
            source = _parts(operation.source)
            value = _at(target, source)
            kept = _edit(target, source, _remove, None) if op == "move" else target
            return _edit(kept, path, _add, value)
    raise _refused(f"unknown operation {op!r}")


def _parts(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise _refused(f"the path {pointer!r} does not begin with a slash")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _refused(why: str) -> Exception:
    error = answers.bad_request(f"the server rejected our request due to an error in our request: {why}")
    error.code, error.reason = 422, "Invalid"
    return error


def _at(target: Any, path: list[str]) -> Any:
    for part in path:
        target = _child(target, part)
    return target


def _child(target: Any, part: str) -> Any:
    try:
        return target[_place(target, part)]
    except (KeyError, IndexError, TypeError):
        raise _refused(f"the path has no {part!r}") from None


_DIGITS = 9
"""Of the index of a list: no list is longer."""
_Edit = Callable[[Any, str, Any], None]


def _edit(target: Any, path: list[str], edit: _Edit, value: Any) -> Any:
    if not path:
        return value
    if not isinstance(target, list | Mapping):
        raise _refused(f"the path has no {path[0]!r}")
    changed = list(target) if isinstance(target, list) else dict(target)
    head, rest = path[0], path[1:]
    if rest:
        child = _edit(_child(target, head), rest, edit, value)
        _replace(changed, head, child)
    else:
        edit(changed, head, value)
    return changed


def _add(target: Any, part: str, value: Any) -> None:
    if not isinstance(target, list):
        target[part] = value
    elif part == "-":
        target.append(value)
    else:
        target.insert(_index(part, len(target)), value)


def _index(part: str, limit: int) -> int:
    if not (part.isascii() and part.isdigit() and len(part) <= _DIGITS and int(part) <= limit):
        raise _refused(f"index {part[:_DIGITS]} is out of bounds")
    return int(part)


def _place(target: Any, part: str) -> Any:
    return _index(part, len(target) - 1) if isinstance(target, list) else part


def _replace(target: Any, part: str, value: Any) -> None:
    _child(target, part)
    target[_place(target, part)] = value


def _remove(target: Any, part: str, _: Any) -> None:
    _child(target, part)
    del target[_place(target, part)]


_EDITS: Mapping[str, _Edit] = {"add": _add, "replace": _replace, "remove": _remove}
