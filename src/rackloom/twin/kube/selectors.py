"""Label and field selectors, as list and watch take them."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube import answers

Match = Callable[[Object], bool]
_Labels = Mapping[str, str]
_SET = re.compile(r"^(?P<key>[^\s!=(),]+)\s+(?P<how>in|notin)\s+\((?P<values>[^()]*)\)$")
_EQUALITY = re.compile(r"^(?P<key>[^\s!=(),]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s!=(),]*)$")
_PRESENCE = re.compile(r"^(?P<not>!?)\s*(?P<key>[^\s!=(),]+)$")


@lru_cache(maxsize=10_000)
def matcher(labels: str, fields: str) -> Match:
    """What an object must satisfy; the same for the same selectors.

    Raises `Rejected` (400) on a selector that cannot be read.
    """
    wanted_labels = [_label(term) for term in _terms(labels)]
    wanted_fields = [_field(term) for term in _terms(fields)]

    def match(obj: Object) -> bool:
        have: _Labels = obj["metadata"].get("labels") or {}
        return all(term(have) for term in wanted_labels) and all(term(obj) for term in wanted_fields)

    return match


def check_fields(kind: Kind, fields: str, known: Collection[str]) -> None:
    """Raise `Rejected` (400) where a type cannot be selected by a field: a server has few of them."""
    always = ("metadata.name", "metadata.namespace") if kind.namespaced else ("metadata.name",)
    for term in _terms(fields):
        found = _EQUALITY.match(term)
        if found is None:
            raise answers.bad_request(f"invalid selector: '{fields}'; can't understand '{term}'")
        if found["key"] not in (*always, *known):
            raise answers.bad_request(f"field label not supported: {found['key']}")


def required_fields(fields: str) -> dict[str, str]:
    """The fields that a selector wants to have exactly one value, by path."""
    found = [_EQUALITY.match(term) for term in _terms(fields)]
    return {one["key"]: one["value"] for one in found if one is not None and one["how"] != "!="}


def _terms(selector: str) -> list[str]:
    """Split at the commas that are not within parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _label(term: str) -> Callable[[_Labels], bool]:
    if found := _SET.match(term):
        values = {value.strip() for value in found["values"].split(",")}
        return _one_of(found["key"], values, negate=found["how"] == "notin")
    if found := _EQUALITY.match(term):
        return _one_of(found["key"], {found["value"]}, negate=found["how"] == "!=")
    if found := _PRESENCE.match(term):
        key, absent = found["key"], bool(found["not"])
        return lambda have: (key in have) is not absent
    raise answers.bad_request(f"unable to parse requirement: {term!r}")


def _one_of(key: str, values: set[str], *, negate: bool) -> Callable[[_Labels], bool]:
    """A label that is absent satisfies every negative requirement."""
    return lambda have: (have.get(key) in values) is not negate


def _field(term: str) -> Match:
    found = _EQUALITY.match(term)
    if found is None:
        raise answers.bad_request(f"invalid selector: can't understand '{term}'")
    path, value, negate = found["key"].split("."), found["value"], found["how"] == "!="
    return lambda obj: (_text_at(obj, path) == value) is not negate


def _text_at(obj: Any, path: list[str]) -> str:
    for part in path:
        obj = obj.get(part, "") if isinstance(obj, Mapping) else ""
    return str(obj).lower() if isinstance(obj, bool) else str(obj)
