"""Strategic merge patches: what kubectl sends for built-in types. Functions of values.

A merge patch, but lists may merge by a key of their elements, and directives of the patch say more:
`$patch: replace` or `delete`, `$retainKeys`, `$setElementOrder/LIST`, `$deleteFromPrimitiveList/LIST`.
The rules are those of k8s.io/apimachinery's strategicpatch, the order of elements included.
"""

from collections.abc import Mapping
from typing import Any

from rackloom.twin.kube import answers
from rackloom.twin.kube.merge_keys import MergeKeys

_PATCH, _RETAIN = "$patch", "$retainKeys"
_ORDER, _WITHOUT = "$setElementOrder/", "$deleteFromPrimitiveList/"
_Map = Mapping[str, Any]
_List = list[Any]


def merge(target: Any, patch: Any, keys: MergeKeys, at: str = "") -> Any:
    """What `patch` makes of the value at the path `at`. Raises `Rejected` (400) where it cannot be read."""
    if not isinstance(patch, Mapping):
        return patch
    directive = patch.get(_PATCH, "merge")
    if directive == "delete":
        return {}
    if directive == "replace":
        return _without_directive(patch)
    if directive != "merge":
        raise answers.bad_request(f"unknown patch type: {directive}")
    merged = _retained(target if isinstance(target, Mapping) else {}, patch)
    for name in _names(patch):
        _set(merged, name, patch, keys, f"{at}.{name}" if at else name)
    return merged


def _retained(target: _Map, patch: _Map) -> dict[str, Any]:
    if _RETAIN not in patch:
        return dict(target)
    kept = _listed(patch, _RETAIN)
    if any(name not in kept for name in _names(patch) if patch.get(name) is not None):
        raise answers.bad_request(f"{_RETAIN} must name every field of the patch")
    return {name: value for name, value in target.items() if name in kept}


def _names(patch: _Map) -> list[str]:
    """The fields that a patch says something of, each once."""
    told = (key.removeprefix(_ORDER).removeprefix(_WITHOUT) for key in patch)
    return [name for name in dict.fromkeys(told) if name not in (_PATCH, _RETAIN)]


def _set(merged: dict[str, Any], name: str, patch: _Map, keys: MergeKeys, at: str) -> None:
    if name in patch and patch[name] is None:
        merged.pop(name, None)
    elif name not in merged:
        # An order, or elements to take away, of a list that is not there say nothing.
        merged.update({name: _new(patch[name])} if name in patch else {})
    elif at in keys and isinstance(patch.get(name, []), list):
        have = merged.get(name)
        merged[name] = _merged_list(have if isinstance(have, list) else [], name, patch, keys, at)
    elif name in patch:
        merged[name] = merge(merged[name], patch[name], keys, at)


def _merged_list(have: _List, name: str, patch: _Map, keys: MergeKeys, at: str) -> _List:
    key, said = keys[at], patch.get(name, [])
    if key:
        _check_keyed(said, key, at)
    told = [one for one in said if _directive(one) is None]
    if any(_directive(one) == "replace" for one in said):
        return [_new(one) for one in told]
    merged = list(have)
    for one in told:
        _put(merged, one, key, keys, at)
    gone = [one.get(key) for one in said if _directive(one) == "delete"] + _listed(patch, _WITHOUT + name)
    merged = [one for one in merged if _id(one, key) not in gone]
    order = _listed(patch, _ORDER + name) if _ORDER + name in patch else told
    wanted = [_id(one, key) for one in order]
    _check_order([_id(one, key) for one in told], wanted, at)
    return _ordered(merged, wanted, [_id(one, key) for one in have], key)


def _put(merged: _List, told: Any, key: str, keys: MergeKeys, at: str) -> None:
    """Merge one element into the one of its key, or add it."""
    place = next((i for i, one in enumerate(merged) if _id(one, key) == _id(told, key)), None)
    if place is None:
        merged.append(_new(told))
    else:
        merged[place] = merge(merged[place], told, keys, at)


def _new(value: Any) -> Any:
    """What a patch says where nothing was: as it stands, directives and nulls aside.

    So an element that is marked to be deleted is added by its key alone, as a real server does.
    """
    if isinstance(value, Mapping):
        return {
            name: _new(one) for name, one in value.items() if one is not None and not name.startswith("$")
        }
    return [_new(one) for one in value] if isinstance(value, list) else value


def _check_order(told: _List, wanted: _List, at: str) -> None:
    places = [wanted.index(one) for one in told if one in wanted]
    if len(places) < len(told) or places != sorted(places):
        raise answers.bad_request(f"the order in the patch of {at} does not match its {_ORDER} list")


def _ordered(merged: _List, wanted: _List, before: _List, key: str) -> _List:
    """Those the patch names in its order; each other one before those that it stood in front of."""
    named = sorted(
        (one for one in merged if _id(one, key) in wanted), key=lambda one: wanted.index(_id(one, key))
    )
    others = [one for one in merged if _id(one, key) not in wanted]
    ordered: _List = []
    for one in named:
        while others and _stood_first(_id(others[0], key), _id(one, key), before):
            ordered.append(others.pop(0))
        ordered.append(one)
    return ordered + others


def _stood_first(one: Any, other: Any, before: _List) -> bool:
    return one in before and other in before and before.index(one) < before.index(other)


def _check_keyed(said: _List, key: str, at: str) -> None:
    """Each element has the key, but for the mark that the list is replaced as a whole."""
    if any(_directive(one) != "replace" and key not in one for one in said if isinstance(one, Mapping)):
        raise answers.bad_request(f"an element of {at} does not contain declared merge key: {key}")
    if not all(isinstance(one, Mapping) for one in said):
        raise answers.bad_request(f"an element of {at} is not an object")


def _directive(one: Any) -> Any:
    """What an element says is done: to itself (`delete`), or to the whole list (`replace`)."""
    return one.get(_PATCH) if isinstance(one, Mapping) else None


def _listed(patch: _Map, name: str) -> _List:
    value = patch.get(name, [])
    if not isinstance(value, list):
        raise answers.bad_request(f"{name} must be a list")
    return value


def _id(one: Any, key: str) -> Any:
    return one.get(key) if key and isinstance(one, Mapping) else one


def _without_directive(patch: _Map) -> dict[str, Any]:
    return {name: value for name, value in patch.items() if name != _PATCH}
