"""The parameters of a request: selectors, list and watch options, chunks, delete options.

Label and field selectors are parsed into predicates. A type supports few field selectors, and an
unknown one is refused, as on a real server. List and watch options follow Kubernetes 1.36, including
the combinations of resourceVersion, resourceVersionMatch and sendInitialEvents that are refused.

`Continuations` keeps the rest of a chunked list at the version of its first chunk. A token that is
older than the compacted history is expired (410).

`DeleteOptions`, `Binding` and `Eviction` are the bodies of deletes and of the subresources of pods.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rackloom.claim.kube.api import ObjectList
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube import refusals
from rackloom.lab.kube.store import NODE_NAME, OBJECT_NAME, ObjectStore, Trait

_LIST_OPTIONS_KIND = ResourceKind("meta.k8s.io", "", "ListOptions", "listoptions", namespaced=False)
_WRITE_OPTIONS_KIND = ResourceKind("meta.k8s.io", "", "PatchOptions", "patchoptions", namespaced=False)
_EXACT, _NOT_OLDER = "Exact", "NotOlderThan"
_MATCH, _INITIAL = "resourceVersionMatch", "sendInitialEvents"
_UNSUPPORTED_LIST_MATCH = f'Unsupported value: "{{}}": supported values: "{_EXACT}", "{_NOT_OLDER}", ""'
_UNSUPPORTED_WATCH_MATCH = f'Unsupported value: "{{}}": supported values: "{_NOT_OLDER}"'


_INTEGER_DIGITS = 20
"""Of the largest number of 64 bits."""


@dataclass(frozen=True, slots=True)
class ListOptions:
    """`version`: at least it, or just it (`is_exact`), or any if "" or "0". `limit` 0: all of them."""

    version: str = ""
    is_exact: bool = False
    limit: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """`version`: changes after it are sent. `seconds`: after them the server ends the watch.

    `has_first`: whether all existing objects are sent first, and `ends_first` whether a bookmark marks
    their end.
    """

    version: str = ""
    seconds: float | None = None
    has_bookmarks: bool = True
    has_first: bool = False
    ends_first: bool = False


def list_options(params: Mapping[str, str]) -> ListOptions:
    """The options of a list request. Raises `Rejected`."""
    problems = list(_list_problems(params))
    if problems:
        raise refusals.invalid(_LIST_OPTIONS_KIND, "", *problems)
    version = _version_option(params)
    # A list that may be of any version comes from memory, whole, as documented for resourceVersion=0.
    limit_option = _integer_option(params, "limit") or 0
    limit = 0 if version == "0" else limit_option
    return ListOptions(version, params.get(_MATCH) == _EXACT, limit, params.get("continue", ""))


def watch_options(params: Mapping[str, str]) -> WatchOptions:
    """The options of a watch request. Raises `Rejected`."""
    problems = list(_watch_problems(params))
    if problems:
        raise refusals.invalid(_LIST_OPTIONS_KIND, "", *problems)
    version, seconds = _version_option(params), _integer_option(params, "timeoutSeconds")
    bookmarks = params.get("allowWatchBookmarks") in ("true", "1")
    initial = params.get(_INITIAL)
    first = starts_with_all(version) if initial is None else initial in ("true", "1")
    ends = initial is not None and first and bookmarks
    return WatchOptions(version, seconds or None, bookmarks, first, ends)


def starts_with_all(version: str) -> bool:
    """Whether a watch from this version begins with all existing objects by default."""
    return version in ("", "0")


def is_dry_run(params: Mapping[str, str], options: Iterable[str] = ()) -> bool:
    """Whether a write shall change nothing: in the query, or in the DeleteOptions. Raises `Rejected`."""
    values = [*([params["dryRun"]] if "dryRun" in params else ()), *options]
    if any(value != "All" for value in values):
        raise refusals.invalid(_WRITE_OPTIONS_KIND, "", 'dryRun: Unsupported value: supported values: "All"')
    return bool(values)


def field_manager_of(params: Mapping[str, str]) -> str:
    """The field manager of an apply. Raises `Rejected` if there is none."""
    if not params.get("fieldManager"):
        problem = "fieldManager: Required value: is required for apply patch"
        raise refusals.invalid(_WRITE_OPTIONS_KIND, "", problem)
    return params["fieldManager"]


def _integer_option(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name)
    if not text:
        return None
    if not _is_integer(text.removeprefix("-")):
        raise refusals.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)


def _is_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _INTEGER_DIGITS


def _version_option(params: Mapping[str, str]) -> str:
    version = params.get("resourceVersion", "")
    if version and not _is_integer(version):
        raise refusals.unreadable_version(version)
    return version


def _list_problems(params: Mapping[str, str]) -> Iterator[str]:
    match, version = params.get(_MATCH, ""), params.get("resourceVersion", "")
    if match and not version:
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden unless resourceVersion is provided"
    if match and params.get("continue"):
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden when continue is provided"
    if match not in ("", _EXACT, _NOT_OLDER):
        yield f"{_MATCH}: {_UNSUPPORTED_LIST_MATCH.format(match)}"
    if match == _EXACT and version == "0":
        yield f'{_MATCH}: Forbidden: {_MATCH} "exact" is forbidden for resourceVersion "0"'
    if _INITIAL in params:
        yield f"{_INITIAL}: Forbidden: {_INITIAL} is forbidden for list"


def _watch_problems(params: Mapping[str, str]) -> Iterator[str]:
    match = params.get(_MATCH, "")
    if _INITIAL in params and match != _NOT_OLDER:
        yield f"{_MATCH}: Forbidden: {_INITIAL} requires setting {_MATCH} to {_NOT_OLDER}"
    if match and _INITIAL not in params:
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden for watch unless {_INITIAL} is provided"
    if match not in ("", _NOT_OLDER):
        yield f"{_MATCH}: {_UNSUPPORTED_WATCH_MATCH.format(match)}"


# Label and field selectors.


ObjectPredicate = Callable[[Object], bool]
_Labels = Mapping[str, str]
_SET = re.compile(r"^(?P<key>[^\s!=(),]+)\s+(?P<how>in|notin)\s+\((?P<values>[^()]*)\)$")
_EQUALITY = re.compile(r"^(?P<key>[^\s!=(),]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s!=(),]*)$")
_PRESENCE = re.compile(r"^(?P<not>!?)\s*(?P<key>[^\s!=(),]+)$")


@lru_cache(maxsize=10_000)
def selector_predicate(labels: str, fields: str) -> ObjectPredicate:
    """The condition that an object must satisfy. Equal selectors get the same one.

    Raises `Rejected` (400) on a selector that cannot be read.
    """
    wanted_labels = [_label_predicate(term) for term in _selector_terms(labels)]
    wanted_fields = [_field_predicate(term) for term in _selector_terms(fields)]

    def match(obj: Object) -> bool:
        have: _Labels = obj["metadata"].get("labels") or {}
        return all(term(have) for term in wanted_labels) and all(term(obj) for term in wanted_fields)

    return match


def check_field_selector(kind: ResourceKind, fields: str, known: Collection[str]) -> None:
    """Raise `Rejected` (400) where a type cannot be selected by a field: a server has few of them."""
    always = ("metadata.name", "metadata.namespace") if kind.namespaced else ("metadata.name",)
    for term in _selector_terms(fields):
        found = _EQUALITY.match(term)
        if found is None:
            raise refusals.bad_request(f"invalid selector: '{fields}'; can't understand '{term}'")
        if found["key"] not in (*always, *known):
            raise refusals.bad_request(f"field label not supported: {found['key']}")


@lru_cache(maxsize=10_000)
def required_trait(labels: str, fields: str) -> Trait | None:
    """The trait that every object of a selection has, if any: its name, its node, or the value of a label."""
    wanted = {
        found["key"]: found["value"]
        for term in _selector_terms(fields)
        if (found := _EQUALITY.match(term)) is not None and found["how"] != "!="
    }
    for path in (OBJECT_NAME, NODE_NAME):
        if path in wanted:
            return Trait(path, wanted[path])
    return next((trait for term in _selector_terms(labels) if (trait := _one_label(term))), None)


def _one_label(term: str) -> Trait | None:
    """The label that a term wants to have exactly one value."""
    if found := _SET.match(term):
        values = [value.strip() for value in found["values"].split(",")]
        is_one = found["how"] == "in" and len(values) == 1
        return Trait(found["key"], values[0], of_label=True) if is_one else None
    found = _EQUALITY.match(term)
    is_equal = found is not None and found["how"] != "!="
    return Trait(found["key"], found["value"], of_label=True) if found and is_equal else None


def _selector_terms(selector: str) -> list[str]:
    """Split at the commas that are not within parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _label_predicate(term: str) -> Callable[[_Labels], bool]:
    if found := _SET.match(term):
        values = {value.strip() for value in found["values"].split(",")}
        return _value_predicate(found["key"], values, negate=found["how"] == "notin")
    if found := _EQUALITY.match(term):
        return _value_predicate(found["key"], {found["value"]}, negate=found["how"] == "!=")
    if found := _PRESENCE.match(term):
        key, absent = found["key"], bool(found["not"])
        return lambda have: (key in have) is not absent
    raise refusals.bad_request(f"unable to parse requirement: {term!r}")


def _value_predicate(key: str, values: set[str], *, negate: bool) -> Callable[[_Labels], bool]:
    """A label that is absent satisfies every negative requirement."""
    return lambda have: (have.get(key) in values) is not negate


def _field_predicate(term: str) -> ObjectPredicate:
    found = _EQUALITY.match(term)
    if found is None:
        raise refusals.bad_request(f"invalid selector: can't understand '{term}'")
    path, value, negate = found["key"].split("."), found["value"], found["how"] == "!="
    return lambda obj: (_text_at(obj, path) == value) is not negate


def _text_at(obj: Any, path: list[str]) -> str:
    for part in path:
        obj = obj.get(part, "") if isinstance(obj, Mapping) else ""
    return str(obj).lower() if isinstance(obj, bool) else str(obj)


# Lists in chunks.


_CONTINUE_PREFIX = "continue-"


@dataclass(frozen=True, slots=True)
class ListChunk:
    """One chunk, and the metadata of the list."""

    items: tuple[Object, ...]
    metadata: dict[str, Any]


class Continuations:
    """The continuations that were handed out."""

    def __init__(self) -> None:
        self._left: dict[str, ObjectList] = {}
        self._tokens = itertools.count(1)

    def first(self, listed: ObjectList, limit: int) -> ListChunk:
        """The first `limit` items (0: all of them)."""
        if not limit or len(listed.items) <= limit:
            return ListChunk(listed.items, {"resourceVersion": listed.resource_version})
        token = f"{_CONTINUE_PREFIX}{next(self._tokens)}"
        self._left[token] = ObjectList(listed.items[limit:], listed.resource_version)
        left = len(listed.items) - limit
        metadata = {
            "resourceVersion": listed.resource_version,
            "continue": token,
            "remainingItemCount": left,
        }
        return ListChunk(listed.items[:limit], metadata)

    def rest(self, token: str, store: ObjectStore, limit: int) -> ListChunk:
        """The next chunk. Raises `Expired` when the server no longer knows the version of the first."""
        left = self._left.get(token)
        if left is None and not token.startswith(_CONTINUE_PREFIX):
            raise refusals.bad_request(f"invalid continue token: continue key is not valid: {token!r}")
        if left is None or int(left.resource_version) < store.compacted:
            raise refusals.continuation_expired()
        return self.first(left, limit)


# Bodies of deletes, bindings and evictions.


_SECONDS = 2**31 - 1
Propagation = Literal["Background", "Foreground", "Orphan"]


class Preconditions(msgspec.Struct, frozen=True, rename="camel"):
    """The UID and version that the object must have. None matches any."""

    uid: str | None = None
    resource_version: str | None = None


class _BindingTarget(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class DeleteOptions(msgspec.Struct, frozen=True, rename="camel"):
    """How an object is deleted. `grace_period_seconds` None: the default of the object."""

    preconditions: Preconditions | None = None
    dry_run: list[str] | None = None
    grace_period_seconds: Annotated[int, msgspec.Meta(ge=-_SECONDS, le=_SECONDS)] | None = None
    propagation_policy: Propagation | None = None

    @property
    def meant(self) -> Preconditions:
        """The preconditions. Without any, every UID and version matches."""
        return self.preconditions or Preconditions()


class Binding(msgspec.Struct, frozen=True):
    """A pod's node. `metadata.uid` restricts the binding to that pod."""

    target: _BindingTarget
    metadata: Preconditions | None = None


class Eviction(msgspec.Struct, frozen=True, rename="camel"):
    """A delete that a disruption budget may refuse."""

    delete_options: DeleteOptions | None = None


_Asked = TypeVar("_Asked", DeleteOptions, Binding, Eviction)


def read_options(what: type[_Asked], body: Any) -> _Asked:
    """The body of a request. An empty one has the defaults. Raises `Rejected` (400)."""
    try:
        return msgspec.convert({} if body is None else body, what)
    except msgspec.ValidationError as error:
        raise refusals.bad_request(f"the body of the request is no {what.__name__}: {error}") from error
