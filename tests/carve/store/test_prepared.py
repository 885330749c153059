"""A prepared statement gives what SQLAlchemy gives, with values of every kind."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedListing, PreparedStatement

TABLE = sa.Table(
    "kinds",
    sa.MetaData(),
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("flag", sa.Boolean),
    sa.Column("kept", sa.JSON),
    sa.Column("at", sa.Double),
    sa.Column("number", sa.Integer),
    sa.Column("filled", sa.JSON, default=dict),
)
ROWS = [
    {"id": "a", "flag": True, "kept": {"list": [1, None]}, "at": 1.5, "number": None, "filled": []},
    {"id": "b", "flag": None, "kept": None, "at": 2, "number": 7, "filled": {"x": "ü"}},
]
ALL = sa.select(TABLE).order_by(TABLE.c.id)


@pytest.fixture
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as conn:
        TABLE.metadata.create_all(conn)
        yield conn
    engine.dispose()


def test_rows_are_written_and_read_as_sqlalchemy_does(conn: sa.Connection) -> None:
    insert = PreparedStatement(sa.insert(TABLE), *TABLE.c.keys())
    assert insert.change(conn, ROWS[0]) == 1
    insert.change_each(conn, ROWS[1:])
    found = conn.execute(ALL).all()
    assert [dict(row._mapping) for row in found] == ROWS
    assert PreparedStatement(ALL).all(conn, {}) == found
    only = sa.select(TABLE).where(TABLE.c.id == sa.bindparam("wanted")).limit(1)
    row = PreparedStatement(only).one_or_none(conn, {"wanted": "b"})
    assert row is not None
    assert (row.flag, row.kept, row._mapping["filled"]) == (None, None, {"x": "ü"})
    assert PreparedStatement(only).one_or_none(conn, {"wanted": "c"}) is None


def test_what_a_change_returns_is_read(conn: sa.Connection) -> None:
    PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
    here = TABLE.c.id == sa.bindparam("wanted")
    more = sa.update(TABLE).where(here).values(number=TABLE.c.number + sa.bindparam("more"))
    advanced = PreparedStatement(more.returning(TABLE.c.number)).one_or_none(conn, {"wanted": "b", "more": 3})
    assert advanced is not None
    assert advanced.number == 10
    assert PreparedStatement(sa.delete(TABLE).where(here)).change(conn, {"wanted": "b"}) == 1


def test_a_default_of_sqlalchemy_is_filled_in(conn: sa.Connection) -> None:
    PreparedStatement(sa.insert(TABLE), "id").change(conn, {"id": "c"})
    assert conn.execute(sa.select(TABLE.c.filled)).scalar_one() == {}


def test_several_rows_for_the_only_row_are_an_error(conn: sa.Connection) -> None:
    PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
    with pytest.raises(sa.exc.MultipleResultsFound):
        PreparedStatement(ALL).one_or_none(conn, {})


def test_a_parameter_that_is_missing_is_an_error(conn: sa.Connection) -> None:
    only = sa.select(TABLE).where(TABLE.c.id == sa.bindparam("wanted"))
    with pytest.raises(KeyError):
        PreparedStatement(only).one_or_none(conn, {})


def test_a_list_of_values_in_the_statement_is_filled_in(conn: sa.Connection) -> None:
    PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
    statement = PreparedStatement(ALL.order_by(None).order_by(TABLE.c.id.in_(["a"]).asc()))
    assert [row.id for row in statement.all(conn, {})] == ["b", "a"]
    assert statement.records(conn, lambda row: row[0], {}) == ["b", "a"]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 300])
def test_a_listing_finds_the_rows_of_any_number_of_ids(conn: sa.Connection, number: int) -> None:
    ids = [f"id-{n:03}" for n in range(310)]
    rows = [{"id": row_id, "kept": {"n": n}} for n, row_id in enumerate(ids)]
    PreparedStatement(sa.insert(TABLE), "id", "kept", "filled").change_each(
        conn, [{**row, "filled": []} for row in rows]
    )
    listing = PreparedListing(sa.select(TABLE.c.id, TABLE.c.kept).order_by(TABLE.c.id.desc()), TABLE.c.id)
    found = listing.records(conn, lambda row: {"id": row[0], "kept": row[1]}, ids[:number])
    assert found == rows[:number][::-1]
