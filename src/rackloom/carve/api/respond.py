"""Answers in the shapes of the wire: bare JSON, a page with its header, an error body."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.site.paging import Page
from rackloom.carve.site.problems import invalid

Json = dict[str, Any]

SOURCE = "nico"
SLICED_BY = ("STATUS", "CREATED", "UPDATED")


def ok(
    value: object, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")


def created(value: object) -> Response:
    """A new object, or several."""
    return ok(value, HTTPStatus.CREATED)


def listing(values: Sequence[Json], total: int, page: Page) -> Response:
    """A page as a bare array; what page it is stands in the X-Pagination header."""
    about = {"pageNumber": page.number, "pageSize": page.size, "total": total, "orderBy": page.order_by}
    return ok(values, headers={"X-Pagination": msgspec.json.encode(about).decode()})


def sliced(values: Sequence[Json], page: Page) -> Response:
    """One page of a list that is at hand as a whole, in its own order when no other is asked for."""
    first = (page.number - 1) * page.size
    return listing(_ordered(values, page.order_by)[first : first + page.size], len(values), page)


def _ordered(values: Sequence[Json], order_by: str | None) -> Sequence[Json]:
    if order_by is None:
        return values
    field, _, direction = order_by.rpartition("_")
    if field not in SLICED_BY:
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in SLICED_BY)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    return sorted(values, key=lambda one: str(one[field.lower()]), reverse=direction == "DESC")


def deleting() -> Response:
    """A deletion that has begun: plain text, not JSON, as clients of this API expect."""
    return PlainTextResponse("Deletion request was accepted", HTTPStatus.ACCEPTED)


def problem(
    status: int, message: str, data: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The one error body there is."""
    body = {"source": SOURCE, "message": message, "data": data}
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")
