"""The fields of an object as server-side apply sees them: sets of paths, and what can be done along one.

A path is a tuple of elements as metadata.managedFields spells them: `f:name` is a key of a map, `k:{...}` an
item of a list that merges by keys, `v:...` a member of a set (FieldsV1).
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rackloom.claim.kube.api import Object
from rackloom.twin.kube.shapes import Shape

Path = tuple[str, ...]
Fields = frozenset[Path]

ABSENT: Any = object()
"""What `find` answers where a path leads nowhere."""

_OF_NOBODY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "selfLink")
_OF_THE_SERVER = ("managedFields", "deletionTimestamp", "deletionGracePeriodSeconds", "generateName")


def owned_fields(obj: Object, shape: Shape) -> Fields:
    """The fields of `obj` that somebody can own: not its type, its name, nor what the server sets."""
    return frozenset(owned_values(obj, shape))


def owned_values(obj: Object, shape: Shape) -> dict[Path, Any]:
    """The fields that somebody can own, with their values; an item of a list stands for itself (True)."""
    body = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind", "metadata")}
    metadata = {
        key: value
        for key, value in obj.get("metadata", {}).items()
        if key not in _OF_NOBODY and key not in _OF_THE_SERVER
    }
    if metadata:
        body["metadata"] = metadata
    return dict(_leaves(body, shape, "", ())) if body else {}


def _leaves(value: Any, shape: Shape, at: str, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value and at not in shape.atoms:
        for key, child in value.items():
            yield from _leaves(child, shape, f"{at}.{key}" if at else key, (*path, f"f:{key}"))
        return
    keys = shape.merging(at) if isinstance(value, list) and value else None
    if keys is None:
        yield path, value
        return
    for item in value:
        here = (*path, element_of(item, keys))
        yield here, True
        if keys:
            yield from _leaves(item, shape, at, here)


def element_of(item: Any, keys: tuple[str, ...]) -> str:
    """How a path names one item of a merging list."""
    if not keys:
        return f"v:{msgspec.json.encode(item).decode()}"
    found = {key: item[key] for key in keys if key in item}
    return f"k:{msgspec.json.encode(found, order='sorted').decode()}"


def find(value: Any, path: Path) -> Any:
    """The value that a path leads to, or ABSENT."""
    for element in path:
        value = _step(value, element)
        if value is ABSENT:
            return ABSENT
    return value


def _step(value: Any, element: str) -> Any:
    if element.startswith("f:"):
        return value.get(element[2:], ABSENT) if isinstance(value, dict) else ABSENT
    index = _position(value, element)
    return ABSENT if index is None else value[index]


def _position(items: Any, element: str) -> int | None:
    if not isinstance(items, list):
        return None
    wanted = json.loads(element[2:])
    for index, item in enumerate(items):
        if item == wanted or (element[0] == "k" and wanted.items() <= item.items()):
            return index
    return None


def remove(obj: Any, path: Path) -> None:
    """Take a field out of `obj` (in place), and the maps and lists that it leaves empty.

    A field by which its list merges stays: it is the item's name.
    """
    if _is_key(path):
        return
    parents = [obj]
    for element in path[:-1]:
        parents.append(_step(parents[-1], element))
        if parents[-1] is ABSENT:
            return
    for parent, element in zip(reversed(parents), reversed(path), strict=True):
        _drop(parent, element)
        if parent:
            return


def _is_key(path: Path) -> bool:
    above = path[-2] if len(path) > 1 else ""
    return above.startswith("k:") and path[-1][2:] in json.loads(above[2:])


def _drop(parent: Any, element: str) -> None:
    if element.startswith("f:"):
        parent.pop(element[2:], None)
        return
    index = _position(parent, element)
    if index is not None:
        del parent[index]


def merge(live: Any, applied: Any, shape: Shape, at: str = "") -> Any:
    """`applied` laid over `live`: maps by key, merging lists by theirs, everything else replaced."""
    if isinstance(live, dict) and isinstance(applied, dict) and at not in shape.atoms:
        laid = {
            key: merge(live.get(key), value, shape, f"{at}.{key}" if at else key)
            for key, value in applied.items()
        }
        return {**live, **laid}
    keys = shape.merging(at) if isinstance(live, list) and isinstance(applied, list) else None
    return applied if keys is None else _merge_items(live, applied, shape, at, keys)


def _merge_items(live: list[Any], applied: list[Any], shape: Shape, at: str, keys: tuple[str, ...]) -> Any:
    merged = {element_of(item, keys): item for item in live}
    for item in applied:
        element = element_of(item, keys)
        merged[element] = merge(merged.get(element), item, shape, at) if keys else item
    return list(merged.values())


def encode(paths: Iterable[Path]) -> dict[str, Any]:
    """FieldsV1: nested maps, with `.` where an item of a list is itself owned."""
    nested: dict[str, Any] = {}
    for path in sorted(paths):
        here = nested
        for element in path:
            here = here.setdefault(element, {})
        if path[-1][0] == "k":
            here["."] = {}
    return nested


def decode(nested: dict[str, Any], path: Path = ()) -> Fields:
    """The paths of a FieldsV1."""
    if not nested:
        return frozenset({path})
    found: set[Path] = set()
    for element, below in nested.items():
        found |= {path} if element == "." else decode(below, (*path, element))
    return frozenset(found)


def told(path: Path) -> str:
    """A path as conflict messages spell it: `.spec.nodes[name="a"].index`."""
    return "".join(_told(element) for element in path)


def _told(element: str) -> str:
    if element.startswith("f:"):
        return f".{element[2:]}"
    if element.startswith("v:"):
        return f"[={element[2:]}]"
    keys = json.loads(element[2:])
    return f"[{','.join(f'{key}={json.dumps(value)}' for key, value in keys.items())}]"
