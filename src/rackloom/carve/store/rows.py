"""Rows by the values of their columns: find, insert, update, delete.

Each statement is built once for its table and columns (`prepared`): to build one costs more than most of its
execution.
A wanted value must not be None, because NULL equals nothing, and updates and deletions need at least one:
none of them may touch a whole table by mistake. Queries that join tables stay with their callers.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedStatement


def find_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> sa.Row[Any] | None:
    """The only row with these values, or None."""
    return _select(table, *wanted).one_or_none(conn, _parameters(wanted))


def has_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> bool:
    """Whether any row has these values."""
    return _select_first(table, *wanted).one_or_none(conn, _parameters(wanted)) is not None


def count_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """How many rows have these values."""
    (counted,) = _count(table, *wanted).all(conn, _parameters(wanted))
    return int(counted[0])


def insert_row(conn: sa.Connection, table: sa.Table, **values: object) -> None:
    """Insert one row."""
    _insert(table, *values).change(conn, values)


def update_rows(conn: sa.Connection, table: sa.Table, wanted: Mapping[str, object], **values: object) -> int:
    """Write `values` into the rows with the values `wanted`; returns how many there are."""
    update = _update(table, tuple(wanted), tuple(values))
    return update.change(conn, {**_parameters(wanted), **values})


def delete_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """Delete the rows with these values; returns how many there were."""
    return _delete(table, *wanted).change(conn, _parameters(wanted))


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


def _rows(table: sa.Table, names: tuple[str, ...]) -> sa.Select[Any]:
    return sa.select(table).where(*_conditions(table, names))


@cache
def _select(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(_rows(table, names))


@cache
def _select_first(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(_rows(table, names).limit(1))


@cache
def _count(table: sa.Table, *names: str) -> PreparedStatement:
    counted = _rows(table, names).with_only_columns(sa.func.count(), maintain_column_froms=True)
    return PreparedStatement(counted)


@cache
def _insert(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(sa.insert(table), *names)


@cache
def _update(table: sa.Table, names: tuple[str, ...], values: tuple[str, ...]) -> PreparedStatement:
    _require_condition(table, names)
    return PreparedStatement(sa.update(table).where(*_conditions(table, names)), *values)


@cache
def _delete(table: sa.Table, *names: str) -> PreparedStatement:
    _require_condition(table, names)
    return PreparedStatement(sa.delete(table).where(*_conditions(table, names)))
