"""Merge patches (RFC 7386) and JSON patches (RFC 6902) as functions of values; neither changes its input."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rackloom.twin.kube import answers


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
    """What the operations make of `target`. Raises `Rejected` (422) where one does not apply."""
    for operation in operations:
        target = _one(target, operation)
    return target


def _one(target: Any, operation: Mapping[str, Any]) -> Any:
    op, path = operation.get("op"), _parts(operation.get("path", ""))
    match op:
        case "add" | "replace" | "remove":
            return _edit(target, path, _EDITS[op], operation.get("value"))
        case "test":
            if _at(target, path) != operation.get("value"):
                raise _refused(f"testing path {operation['path']!r} failed")
            return target
        case "copy" | "move":
            source = _parts(operation.get("from", ""))
            value = _at(target, source)
            kept = _edit(target, source, _remove, None) if op == "move" else target
            return _edit(kept, path, _add, value)
    raise _refused(f"unknown operation {op!r}")


def _parts(pointer: str) -> list[str]:
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
        return target[int(part)] if isinstance(target, list) else target[part]
    except (KeyError, IndexError, ValueError, TypeError):
        raise _refused(f"the path has no {part!r}") from None


_Edit = Callable[[Any, str, Any], None]


def _edit(target: Any, path: list[str], edit: _Edit, value: Any) -> Any:
    if not path:
        return value
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
    if not part.isdigit() or int(part) > limit:
        raise _refused(f"index {part} is out of bounds")
    return int(part)


def _replace(target: Any, part: str, value: Any) -> None:
    _child(target, part)
    target[int(part) if isinstance(target, list) else part] = value


def _remove(target: Any, part: str, _: Any) -> None:
    _child(target, part)
    del target[int(part) if isinstance(target, list) else part]


_EDITS: Mapping[str, _Edit] = {"add": _add, "replace": _replace, "remove": _remove}
