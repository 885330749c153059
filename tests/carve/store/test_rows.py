"""Rows by their columns: mistakes that would touch other rows are errors."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from rackloom.carve.store.prepared import (
    count_rows,
    delete_and_count,
    delete_rows,
    find_row,
    has_row,
    insert_row,
    update_and_count,
    update_rows,
)

ROWS = sa.Table("rows", sa.MetaData(), sa.Column("id", sa.Integer), sa.Column("name", sa.String))


@pytest.fixture
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as conn:
        ROWS.metadata.create_all(conn)
        insert_row(conn, ROWS, id=1, name="first")
        insert_row(conn, ROWS, id=2, name="second")
        yield conn
    engine.dispose()


def test_rows_are_found_counted_changed_and_deleted_by_their_values(conn: sa.Connection) -> None:
    assert find_row(conn, ROWS, id=1).name == "first"
    assert update_and_count(conn, ROWS, {"name": "first"}, name="changed") == 1
    assert (has_row(conn, ROWS, name="first"), count_rows(conn, ROWS, name="changed")) == (False, 1)
    assert delete_and_count(conn, ROWS, id=1) == 1
    assert count_rows(conn, ROWS) == 1


def test_no_change_without_a_condition(conn: sa.Connection) -> None:
    with pytest.raises(ValueError, match="every row of rows"):
        delete_rows(conn, ROWS)
    with pytest.raises(ValueError, match="every row of rows"):
        update_rows(conn, ROWS, {}, name="all")
    assert count_rows(conn, ROWS) == 2


def test_null_is_no_condition(conn: sa.Connection) -> None:
    with pytest.raises(ValueError, match="NULL equals nothing"):
        delete_rows(conn, ROWS, name=None)
