"""What may be asked beside objects and selectors: the options of Kubernetes 1.36."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rackloom.claim.kube.api import Kind
from rackloom.twin.kube import answers

_OPTIONS = Kind("meta.k8s.io", "", "ListOptions", "listoptions", namespaced=False)
_OF_WRITES = Kind("meta.k8s.io", "", "PatchOptions", "patchoptions", namespaced=False)
_EXACT, _NOT_OLDER = "Exact", "NotOlderThan"
_MATCH, _INITIAL = "resourceVersionMatch", "sendInitialEvents"
_OF_LISTS = f'Unsupported value: "{{}}": supported values: "{_EXACT}", "{_NOT_OLDER}", ""'
_OF_WATCHES = f'Unsupported value: "{{}}": supported values: "{_NOT_OLDER}"'


_DIGITS = 20
"""Of the largest number of 64 bits."""


@dataclass(frozen=True, slots=True)
class ListOptions:
    """`version`: at least it, or just it (`is_exact`); "" and "0" are any. `limit` 0: all of them."""

    version: str = ""
    is_exact: bool = False
    limit: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """`version`: changes after it are told. `seconds`: after them the server ends the watch.

    `has_first`: whether everything that is there is told first, and `ends_first` whether a bookmark says
    where that ends.
    """

    version: str = ""
    seconds: float | None = None
    has_bookmarks: bool = True
    has_first: bool = False
    ends_first: bool = False


def list_options(params: Mapping[str, str]) -> ListOptions:
    """What a list is asked for. Raises `Rejected`."""
    problems = list(_of_list(params))
    if problems:
        raise answers.invalid(_OPTIONS, "", *problems)
    version = _version(params)
    # What any version serves comes from memory, whole, as the server says of resourceVersion=0.
    asked = _number(params, "limit") or 0
    limit = 0 if version == "0" else asked
    return ListOptions(version, params.get(_MATCH) == _EXACT, limit, params.get("continue", ""))


def watch_options(params: Mapping[str, str]) -> WatchOptions:
    """What a watch is asked for. Raises `Rejected`."""
    problems = list(_of_watch(params))
    if problems:
        raise answers.invalid(_OPTIONS, "", *problems)
    version, seconds = _version(params), _number(params, "timeoutSeconds")
    bookmarks = params.get("allowWatchBookmarks") in ("true", "1")
    asked = params.get(_INITIAL)
    first = starts_with_all(version) if asked is None else asked in ("true", "1")
    ends = asked is not None and first and bookmarks
    return WatchOptions(version, seconds or None, bookmarks, first, ends)


def starts_with_all(version: str) -> bool:
    """Whether a watch from there that says nothing else is told first of everything that is there."""
    return version in ("", "0")


def is_dry_run(params: Mapping[str, str], options: Iterable[str] = ()) -> bool:
    """Whether a write shall change nothing: in the query, or in the DeleteOptions. Raises `Rejected`."""
    asked = [*([params["dryRun"]] if "dryRun" in params else ()), *options]
    if any(one != "All" for one in asked):
        raise answers.invalid(_OF_WRITES, "", 'dryRun: Unsupported value: supported values: "All"')
    return bool(asked)


def manager_of(params: Mapping[str, str]) -> str:
    """Who applies. Raises `Rejected`."""
    if not params.get("fieldManager"):
        problem = "fieldManager: Required value: is required for apply patch"
        raise answers.invalid(_OF_WRITES, "", problem)
    return params["fieldManager"]


def _number(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name)
    if not text:
        return None
    if not _is_number(text.removeprefix("-")):
        raise answers.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _version(params: Mapping[str, str]) -> str:
    version = params.get("resourceVersion", "")
    if version and not _is_number(version):
        raise answers.unreadable_version(version)
    return version


def _of_list(params: Mapping[str, str]) -> Iterator[str]:
    match, version = params.get(_MATCH, ""), params.get("resourceVersion", "")
    if match and not version:
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden unless resourceVersion is provided"
    if match and params.get("continue"):
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden when continue is provided"
    if match not in ("", _EXACT, _NOT_OLDER):
        yield f"{_MATCH}: {_OF_LISTS.format(match)}"
    if match == _EXACT and version == "0":
        yield f'{_MATCH}: Forbidden: {_MATCH} "exact" is forbidden for resourceVersion "0"'
    if _INITIAL in params:
        yield f"{_INITIAL}: Forbidden: {_INITIAL} is forbidden for list"


def _of_watch(params: Mapping[str, str]) -> Iterator[str]:
    match = params.get(_MATCH, "")
    if _INITIAL in params and match != _NOT_OLDER:
        yield f"{_MATCH}: Forbidden: {_INITIAL} requires setting {_MATCH} to {_NOT_OLDER}"
    if match and _INITIAL not in params:
        yield f"{_MATCH}: Forbidden: {_MATCH} is forbidden for watch unless {_INITIAL} is provided"
    if match not in ("", _NOT_OLDER):
        yield f"{_MATCH}: {_OF_WATCHES.format(match)}"
