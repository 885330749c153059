"""Rows by the values of their columns: find, insert, update, delete.

Each statement is built once for its table and columns: to build one costs more than most of its execution.
A value must not be None, because NULL equals nothing. Queries that join tables stay with their callers.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa


def find_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> sa.Row[Any] | None:
    """The only row with these values, or None."""
    return conn.execute(_select(table, *wanted), _parameters(wanted)).one_or_none()


def has_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> bool:
    """Whether any row has these values."""
    return conn.execute(_select(table, *wanted).limit(1), _parameters(wanted)).first() is not None


def count_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """How many rows have these values."""
    counted = _select(table, *wanted).with_only_columns(sa.func.count(), maintain_column_froms=True)
    return conn.execute(counted, _parameters(wanted)).scalar_one()


def insert_row(conn: sa.Connection, table: sa.Table, **values: object) -> None:
    """Insert one row."""
    conn.execute(sa.insert(table), values)


def update_rows(conn: sa.Connection, table: sa.Table, wanted: Mapping[str, object], **values: object) -> int:
    """Write `values` into the rows with the values `wanted`; returns how many there are."""
    return conn.execute(_update(table, *wanted), {**_parameters(wanted), **values}).rowcount


def delete_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """Delete the rows with these values; returns how many there were."""
    return conn.execute(_delete(table, *wanted), _parameters(wanted)).rowcount


def _parameters(wanted: Mapping[str, object]) -> dict[str, object]:
    # Prefixed: SQLAlchemy takes a parameter with the name of a column as a value to write.
    return {f"wanted_{name}": value for name, value in wanted.items()}


def _conditions(table: sa.Table, names: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == sa.bindparam(f"wanted_{name}") for name in names]


@cache
def _select(table: sa.Table, *names: str) -> sa.Select[Any]:
    return sa.select(table).where(*_conditions(table, names))


@cache
def _update(table: sa.Table, *names: str) -> sa.Update:
    return sa.update(table).where(*_conditions(table, names))


@cache
def _delete(table: sa.Table, *names: str) -> sa.Delete:
    return sa.delete(table).where(*_conditions(table, names))
