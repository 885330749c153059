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
    """One page of a list that is at hand as a whole, in its own order."""
    if page.order_by is not None:
        raise invalid("Invalid orderBy value in query", orderBy="this listing has one order only")
    first = (page.number - 1) * page.size
    return listing(values[first : first + page.size], len(values), page)


def deleting() -> Response:
    """A deletion that has begun: plain text, not JSON, as clients of this API expect."""
    return PlainTextResponse("Deletion request was accepted", HTTPStatus.ACCEPTED)


def problem(
    status: int, message: str, data: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The one error body there is."""
    body = {"source": SOURCE, "message": message, "data": data}
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")
