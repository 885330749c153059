"""One page of a listing, and how many rows there are in all."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site.problems import invalid

Rows = Sequence[sa.Row[Any]]

TIE_BREAKER = ""
"""Where an order keeps the column that decides between equals; no caller can name it."""


class Page(msgspec.Struct, frozen=True):
    """Which page is wanted. `order_by` is `FIELD_ASC` or `FIELD_DESC`; None: oldest first."""

    number: int = 1
    size: int = 20
    order_by: str | None = None


def fetch(
    conn: sa.Connection,
    listing: sa.Select[Any],
    page: Page,
    order: Mapping[str, sa.ColumnElement[Any]],
    **asked: object,
) -> tuple[Rows, int]:
    """Rows of `page` and the total. `order` maps names to columns and holds CREATED and TIE_BREAKER.

    `listing` may have parameters, whose values are `asked`: then it can be built once for all callers.
    """
    field, direction = _order(page.order_by, order)
    counted, ordered = _questions(listing, order[field], direction, order[TIE_BREAKER])
    total = conn.execute(counted, asked).scalar_one()
    part = {"page_size": page.size, "page_start": (page.number - 1) * page.size}
    return conn.execute(ordered, {**asked, **part}).all(), total


@lru_cache(maxsize=64)
def _questions(
    listing: sa.Select[Any], by: sa.ColumnElement[Any], direction: str, tie: sa.ColumnElement[Any]
) -> tuple[sa.Select[Any], sa.Select[Any]]:
    """How many rows there are, and those of a page. Kept for listings that come again as the same object."""
    counted = sa.select(sa.func.count()).select_from(listing.order_by(None).subquery())
    ordered = listing.order_by(by.desc() if direction == "DESC" else by.asc(), tie.asc())
    size, start = (sa.bindparam(name, type_=sa.Integer) for name in ("page_size", "page_start"))
    return counted, ordered.limit(size).offset(start)


def _order(order_by: str | None, order: Mapping[str, sa.ColumnElement[Any]]) -> tuple[str, str]:
    field, _, direction = (order_by or "CREATED_ASC").rpartition("_")
    if not field or field not in order or direction not in ("ASC", "DESC"):
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in order if name)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    return field, direction


def order_of(table: sa.Table, *fields: str) -> dict[str, sa.ColumnElement[Any]]:
    """The usual order: `fields` and CREATED, UPDATED, with the id as the tie-breaker."""
    named = {name.upper(): table.c[name] for name in (*fields, "created", "updated")}
    return {**named, TIE_BREAKER: table.c.id}


def matches(text: str, *columns: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Rows that hold `text` in one of `columns`, whatever its case."""
    return sa.or_(*(column.icontains(text.strip(), autoescape=True) for column in columns))
