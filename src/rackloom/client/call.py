"""A request as a value, which `operations` makes and a client sends.

`Call[T]` is one request and the type of its answer. `PagedCall[T]` is a list of `T` that the service returns
in pages. Neither sends anything, so the synchronous and the asynchronous client share them.

`Model` is the base of all objects of the service (`models`). An optional field that is None is not sent: to
the service null and a missing field mean the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

T = TypeVar("T")
Many: TypeAlias = T | Sequence[T]
"""A parameter with one value or several, any of which may match."""
QueryPairs = tuple[tuple[str, str | int | float | bool | None], ...]
"""The type that httpx2 takes. The values are texts."""
QueryValue = str | int | datetime | Sequence[str | int] | None


class Model(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True, rename="camel"):
    """An object of the service, or the body of a request."""


class Call(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One request, with an answer of type `T`."""

    operation: str
    """The name in the description of the service (`operationId`)."""
    method: str
    path: str
    """Relative to the organisation, without a leading slash."""
    answer: type[T]
    query: Mapping[str, QueryValue] = {}
    body: Model | None = None


class PagedCall(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A list of `T` that is read in pages."""

    operation: str
    path: str
    item: type[T]
    query: Mapping[str, QueryValue] = {}

    def page(self, query: Mapping[str, QueryValue]) -> Call[list[T]]:
        """The request of one page, which `query` selects."""
        return Call(
            operation=self.operation,
            method="GET",
            path=self.path,
            answer=list[self.item],  # type: ignore[name-defined]
            query={**self.query, **query},
        )


def make_call(request: str, answer: type[T], given: Mapping[str, Any] = {}) -> Call[T]:
    """The call of a function of `operations`, with its arguments by name in `given`.

    `request` has the operation, the method and the path: `get-site GET site/{site_id}`. `{name}` in the path
    is an id. `body` is the body, and every other argument is a parameter of the query. Raises ValueError if
    `path_of` does.
    """
    operation, method, path = request.split()
    filled, query = _fill_path(path, given)
    body = query.pop("body", None)
    return Call(operation=operation, method=method, path=filled, answer=answer, query=query, body=body)


def make_paged_call(request: str, item: type[T], given: Mapping[str, Any] = {}) -> PagedCall[T]:
    """As `make_call`, for a function that returns a list in pages. Its method is GET."""
    operation, _, path = request.split()
    filled, query = _fill_path(path, given)
    return PagedCall(operation=operation, path=filled, item=item, query=query)


def _fill_path(path: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path with its ids, and the other arguments by their names in the service."""
    others = dict(given)
    parts = [others.pop(part[1:-1]) if part.startswith("{") else part for part in path.split("/")]
    return path_of(*parts), {wire_name(name): value for name, value in others.items()}


WIRE_NAMES = {"is_nv_link_partition_enabled": "isNVLinkPartitionEnabled", "user_id": "userID"}
"""Parameters whose names in the service are not their Python names in camel case."""


def wire_name(name: str) -> str:
    """The name of a parameter in the service: `site_id` is `siteId`."""
    first, *others = name.split("_")
    return WIRE_NAMES.get(name) or first + "".join(word.capitalize() for word in others)


def path_of(*parts: str) -> str:
    """A path of constant words and ids. Raises ValueError if an id would turn it into another path."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError(f"{part!r} cannot be an id")
    return "/".join(quote(part, safe="") for part in parts)


def query_pairs(query: Mapping[str, QueryValue]) -> QueryPairs:
    """The parameters as they are sent: a list repeats its name, and None is left out.

    Raises ValueError if a time has no zone.
    """
    return tuple((name, _text(name, value)) for name, given in query.items() for value in _values(given))


def _values(given: QueryValue) -> Iterable[str | int | datetime]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str | int | datetime) else given


def _text(name: str, value: str | int | datetime) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{name} needs a time with a zone")
        return value.isoformat()
    return str(value)
