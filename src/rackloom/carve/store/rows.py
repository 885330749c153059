"""Rows by the values of their columns: find, insert, update, delete.

Each statement is built once for its table and columns: to build one costs more than most of its execution.
A wanted value must not be None, because NULL equals nothing, and updates and deletions need at least one:
none of them may touch a whole table by mistake. Queries that join tables stay with their callers.
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
    return conn.execute(_select_first(table, *wanted), _parameters(wanted)).first() is not None


def count_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """How many rows have these values."""
    counted: int = conn.execute(_count(table, *wanted), _parameters(wanted)).scalar_one()
    return counted


def insert_row(conn: sa.Connection, table: sa.Table, **values: object) -> None:
    """Insert one row."""
    conn.execute(_insert(table), values)


def update_rows(conn: sa.Connection, table: sa.Table, wanted: Mapping[str, object], **values: object) -> int:
    """Write `values` into the rows with the values `wanted`; returns how many there are."""
    return conn.execute(_update(table, *wanted), {**_parameters(wanted), **values}).rowcount


def delete_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """Delete the rows with these values; returns how many there were."""
    return conn.execute(_delete(table, *wanted), _parameters(wanted)).rowcount


def _parameters(wanted: Mapping[str, object]) -> dict[str, object]:
    if None in wanted.values():
        raise ValueError(f"NULL equals nothing: {dict(wanted)}")
    # Prefixed: SQLAlchemy takes a parameter with the name of a column as a value to write.
    return {f"wanted_{name}": value for name, value in wanted.items()}


def _conditions(table: sa.Table, names: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == sa.bindparam(f"wanted_{name}") for name in names]


def _require_condition(table: sa.Table, names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"no condition: this would change every row of {table.name}")


@cache
def _select(table: sa.Table, *names: str) -> sa.Select[Any]:
    return sa.select(table).where(*_conditions(table, names))


@cache
def _select_first(table: sa.Table, *names: str) -> sa.Select[Any]:
    return _select(table, *names).limit(1)


@cache
def _count(table: sa.Table, *names: str) -> sa.Select[Any]:
    return _select(table, *names).with_only_columns(sa.func.count(), maintain_column_froms=True)


@cache
def _insert(table: sa.Table) -> sa.Insert:
    return sa.insert(table)


@cache
def _update(table: sa.Table, *names: str) -> sa.Update:
    _require_condition(table, names)
    return sa.update(table).where(*_conditions(table, names))


@cache
def _delete(table: sa.Table, *names: str) -> sa.Delete:
    _require_condition(table, names)
    return sa.delete(table).where(*_conditions(table, names))
