"""Lists that the service returns in pages, and the start of the next page.

`X-Pagination` has the number of items. If the pages cover only part of the audit log, `X-Audit-Continue` has
the parameter that continues the list. As in every list with page numbers, an object that is created or
deleted between two pages may be missed or appear twice. An `order_by` of a name or time that does not change
helps.
"""

from collections.abc import Generator, Mapping
from typing import Generic, TypeVar
from urllib.parse import parse_qsl

import httpx2
import msgspec

from rackloom.client.call import Call, PagedCall, QueryValue
from rackloom.client.exchange import Answered
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

T = TypeVar("T")
LARGEST_PAGE = 100
CONTINUE = "X-Audit-Continue"


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Part of a list."""

    items: list[T]
    total: int | None
    """How many items the list had when the page was made, or None if the service does not report it."""


class _Position(msgspec.Struct, frozen=True):
    total: int


def page_steps(
    call: PagedCall[T], size: int = LARGEST_PAGE
) -> Generator[Call[list[T]] | Page[T], Answered[list[T]] | None, None]:
    """Yields the request of each page, receives its answer, and yields the page.

    Raises ValueError if `size` is not from 1 to `LARGEST_PAGE`.
    """
    if not 1 <= size <= LARGEST_PAGE:
        raise ValueError(f"a page has 1 to {LARGEST_PAGE} items, not {size}")
    begin: Mapping[str, QueryValue] = {}
    number = 1
    while True:
        answered = yield call.page({**begin, "pageNumber": number, "pageSize": size})
        if answered is None:
            raise RuntimeError("a page was given no answer")
        items, headers = answered
        total = _total(headers)
        yield Page(items, total)
        is_last = len(items) < size if total is None else number * size >= total
        if not is_last and items:
            number += 1
        elif CONTINUE in headers:
            begin, number = dict(parse_qsl(headers[CONTINUE])), 1
        else:
            return


def _total(headers: httpx2.Headers) -> int | None:
    try:
        return decode_json(headers.get("X-Pagination", ""), "X-Pagination", _Position).total
    except Undecodable:
        return None
