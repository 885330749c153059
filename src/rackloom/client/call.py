"""A request as a value: what `operations` makes and a client sends.

`Call[T]` is one request and the type of its answer. `PagedCall[T]` is a list that the service gives in pages;
`T` is an item. Neither does anything by itself, so that the synchronous and the asynchronous client share
them.

`Model` is the base of all objects of the service (`models`). A field that is None and need not be given is
not sent: to the service null and a missing field mean the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

T = TypeVar("T")
Many: TypeAlias = T | Sequence[T]
"""A parameter that may be given several values: any of them."""
QueryPairs = tuple[tuple[str, str | int | float | bool | None], ...]
"""As httpx2 takes them; the values are texts."""
QueryValue = str | int | datetime | Sequence[str | int] | None


class Model(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True, rename="camel"):
    """An object of the service, or the body of a request."""


class Call(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One request; its answer is a `T`."""

    operation: str
    """As the description of the service names it (`operationId`)."""
    method: str
    path: str
    """Below the organisation, without a slash before it."""
    answer: type[T]
    query: Mapping[str, QueryValue] = {}
    body: Model | None = None


class PagedCall(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A list that is read in pages; each item is a `T`."""

    operation: str
    path: str
    item: type[T]
    query: Mapping[str, QueryValue] = {}

    def page(self, query: Mapping[str, QueryValue]) -> Call[list[T]]:
        """The request of one page; `query` says which."""
        return Call(
            operation=self.operation,
            method="GET",
            path=self.path,
            answer=list[self.item],  # type: ignore[name-defined]
            query={**self.query, **query},
        )


def make_call(request: str, answer: type[T], given: Mapping[str, Any] = {}) -> Call[T]:
    """The call of a function of `operations`; `given` are its arguments by name.

    `request` has the operation, the method and the path: `get-site GET site/{site_id}`. `{name}` in the path
    is an id. `body` is the body, and every other argument is a parameter of the query. Raises ValueError as
    `path_of`.
    """
    operation, method, path = request.split()
    filled, query = _fill_path(path, given)
    body = query.pop("body", None)
    return Call(operation=operation, method=method, path=filled, answer=answer, query=query, body=body)


def make_paged_call(request: str, item: type[T], given: Mapping[str, Any] = {}) -> PagedCall[T]:
    """The call of a function whose answer is a list in pages, as `make_call`; its method is GET."""
    operation, _, path = request.split()
    filled, query = _fill_path(path, given)
    return PagedCall(operation=operation, path=filled, item=item, query=query)


def _fill_path(path: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path with its ids, and the arguments that are no ids, by their names in the service."""
    others = dict(given)
    parts = [others.pop(part[1:-1]) if part.startswith("{") else part for part in path.split("/")]
    return path_of(*parts), {wire_name(name): value for name, value in others.items()}


WIRE_NAMES = {"is_nv_link_partition_enabled": "isNVLinkPartitionEnabled", "user_id": "userID"}
"""Parameters whose names in the service are not those in Python in camel case."""


def wire_name(name: str) -> str:
    """The name of a parameter in the service: `site_id` is `siteId`."""
    first, *others = name.split("_")
    return WIRE_NAMES.get(name) or first + "".join(word.capitalize() for word in others)


def path_of(*parts: str) -> str:
    """A path of constant words and ids. Raises ValueError for an id that would change which path it is."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError(f"{part!r} cannot be an id")
    return "/".join(quote(part, safe="") for part in parts)


def query_pairs(query: Mapping[str, QueryValue]) -> QueryPairs:
    """The parameters as they are sent: a list repeats its name, and None is left out.

    Raises ValueError for a time without a zone.
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
