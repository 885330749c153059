"""A prepared statement gives the same result as SQLAlchemy, with values of every kind, on both databases."""

import asyncio
import sqlite3
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from rackloom.carve.store.postgres import engine_of
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
ROWS: list[dict[str, object]] = [
    {"id": "a", "flag": True, "kept": {"list": [1, None]}, "at": 1.5, "number": None, "filled": []},
    {"id": "b", "flag": None, "kept": None, "at": 2, "number": 7, "filled": {"x": "ü"}},
]
ALL = sa.select(TABLE).order_by(TABLE.c.id)
Run = Callable[[Callable[[sa.Connection], object]], None]
"""Runs its argument on an empty table, in a transaction that is undone."""


@pytest.fixture(params=["sqlite", "postgresql"])
def run(request: pytest.FixtureRequest) -> Run:
    def work(check: Callable[[sa.Connection], object], conn: sa.Connection) -> None:
        TABLE.metadata.create_all(conn)
        check(conn)

    def run_on_sqlite(check: Callable[[sa.Connection], object]) -> None:
        engine = sa.create_engine("sqlite://")
        with engine.connect() as conn:
            work(check, conn)
        engine.dispose()

    def run_on_postgres(check: Callable[[sa.Connection], object]) -> None:
        async def main() -> None:
            engine = engine_of(url)
            async with engine.connect() as conn:
                await conn.run_sync(lambda conn: work(check, conn))
            await engine.dispose()

        asyncio.run(main())

    if request.param == "sqlite":
        return run_on_sqlite
    url = request.getfixturevalue("postgres_url")
    return run_on_postgres


def test_rows_are_written_and_read_as_sqlalchemy_does(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
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

    run(check)


def test_what_a_change_returns_is_read(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
        here = TABLE.c.id == sa.bindparam("wanted")
        more = sa.update(TABLE).where(here).values(number=TABLE.c.number + sa.bindparam("more"))
        advanced = PreparedStatement(more.returning(TABLE.c.number)).one_or_none(
            conn, {"wanted": "b", "more": 3}
        )
        assert advanced is not None
        assert advanced.number == 10
        assert PreparedStatement(sa.delete(TABLE).where(here)).change(conn, {"wanted": "b"}) == 1

    run(check)


def test_a_default_of_sqlalchemy_is_filled_in(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        PreparedStatement(sa.insert(TABLE), "id").change(conn, {"id": "c"})
        assert conn.execute(sa.select(TABLE.c.filled)).scalar_one() == {}

    run(check)


def test_several_rows_for_the_only_row_are_an_error(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
        with pytest.raises(sa.exc.MultipleResultsFound):
            PreparedStatement(ALL).one_or_none(conn, {})

    run(check)


def test_a_parameter_that_is_missing_is_an_error(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        only = sa.select(TABLE).where(TABLE.c.id == sa.bindparam("wanted"))
        with pytest.raises(KeyError):
            PreparedStatement(only).one_or_none(conn, {})

    run(check)


def test_a_list_of_values_in_the_statement_is_filled_in(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
        statement = PreparedStatement(ALL.order_by(None).order_by(TABLE.c.id.in_(["a"]).asc()))
        assert [row.id for row in statement.all(conn, {})] == ["b", "a"]
        assert statement.records(conn, lambda row: row[0], {}) == ["b", "a"]

    run(check)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 300])
def test_a_listing_finds_the_rows_of_any_number_of_ids(run: Run, number: int) -> None:
    def check(conn: sa.Connection) -> None:
        ids = [f"id-{n:03}" for n in range(310)]
        rows: list[dict[str, object]] = [{"id": row_id, "kept": {"n": n}} for n, row_id in enumerate(ids)]
        PreparedStatement(sa.insert(TABLE), "id", "kept", "filled").change_each(
            conn, [{**row, "filled": []} for row in rows]
        )
        listing = PreparedListing(sa.select(TABLE.c.id, TABLE.c.kept).order_by(TABLE.c.id.desc()), TABLE.c.id)
        found = listing.records(conn, lambda row: {"id": row[0], "kept": row[1]}, ids[:number])
        assert found == rows[:number][::-1]

    run(check)


def test_an_error_is_one_of_sqlalchemy(run: Run) -> None:
    def check(conn: sa.Connection) -> None:
        insert = PreparedStatement(sa.insert(TABLE), *TABLE.c.keys())
        insert.change(conn, ROWS[0])
        # The SQLite store knows the errors of its driver besides.
        with pytest.raises((sa.exc.IntegrityError, sqlite3.IntegrityError)):
            insert.change(conn, ROWS[0])

    run(check)


def test_postgresql_gets_statements_without_a_detour(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(conn: sa.Connection) -> None:
        monkeypatch.setattr(sa.Connection, "execute", lambda *_: pytest.fail("a detour"))
        PreparedStatement(sa.insert(TABLE), *TABLE.c.keys()).change_each(conn, ROWS)
        listing = PreparedListing(sa.select(TABLE.c.id), TABLE.c.id)
        assert sorted(listing.records(conn, lambda row: row[0], ["a", "b", "c"])) == ["a", "b"]

    run(check)


def test_a_lost_connection_is_given_up(postgres_url: str) -> None:
    def end_it(conn: sa.Connection) -> None:
        backend = PreparedStatement(sa.select(sa.func.pg_backend_pid().label("pid")))
        row = backend.one_or_none(conn, {})
        assert row is not None
        end = sa.select(sa.func.pg_terminate_backend(sa.bindparam("pid", type_=sa.Integer)).label("ended"))
        with pytest.raises(sa.exc.DBAPIError) as found:
            PreparedStatement(end).one_or_none(conn, {"pid": row.pid})
        assert found.value.connection_invalidated

    async def main() -> None:
        engine = engine_of(postgres_url)
        async with engine.connect() as conn:
            await conn.run_sync(end_it)
        async with engine.connect() as conn:
            await conn.exec_driver_sql("SELECT 1")
        await engine.dispose()

    asyncio.run(main())
