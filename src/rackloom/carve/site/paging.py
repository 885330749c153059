"""One page of a listing, and how many rows there are in all."""

from collections.abc import Mapping, Sequence
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
) -> tuple[Rows, int]:
    """Rows of `page` and the total. `order` maps names to columns and holds CREATED and TIE_BREAKER."""
    total = conn.execute(
        sa.select(sa.func.count()).select_from(listing.order_by(None).subquery())
    ).scalar_one()
    ordered = listing.order_by(*_order(page.order_by, order)).limit(page.size)
    return conn.execute(ordered.offset((page.number - 1) * page.size)).all(), total


def _order(
    order_by: str | None, order: Mapping[str, sa.ColumnElement[Any]]
) -> tuple[sa.ColumnElement[Any], ...]:
    field, _, direction = (order_by or "CREATED_ASC").rpartition("_")
    if not field or field not in order or direction not in ("ASC", "DESC"):
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in order if name)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    column = order[field]
    return (column.desc() if direction == "DESC" else column.asc(), order[TIE_BREAKER].asc())


def order_of(table: sa.Table, *fields: str) -> dict[str, sa.ColumnElement[Any]]:
    """The usual order: `fields` and CREATED, UPDATED, with the id as the tie-breaker."""
    named = {name.upper(): table.c[name] for name in (*fields, "created", "updated")}
    return {**named, TIE_BREAKER: table.c.id}


def matches(text: str, *columns: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Rows that hold `text` in one of `columns`, whatever its case."""
    return sa.or_(*(column.icontains(text.strip(), autoescape=True) for column in columns))
