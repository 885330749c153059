"""A database that is not a site's, or is damaged, is refused in words, whichever layer reports it."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from rackloom.app.site.parts import open_home_store
from rackloom.app.snapshot.readers import SqliteRecordReader
from rackloom.carve.observation import latest
from rackloom.carve.store.database import DATABASE, Store
from rackloom.errors import Refused


def test_a_prepared_statement_on_tables_of_another_program_is_refused(tmp_path: Path) -> None:
    """Prepared statements go to the driver, and SQLAlchemy doesn't wrap its errors."""
    with closing(sqlite3.connect(tmp_path / DATABASE)) as other:
        other.execute("CREATE TABLE of_another (x)")
    reader = SqliteRecordReader(tmp_path)
    with pytest.raises(Refused, match="cannot be read: no such table"):
        asyncio.run(reader.read(lambda conn: latest.outdated_domains(conn, 1.0)))


def test_a_store_that_the_driver_itself_cannot_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(conn: sa.Connection) -> None:
        driver = conn.connection.dbapi_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.execute("SELECT * FROM table_that_was_lost")

    asyncio.run(Store.open(tmp_path).close())
    monkeypatch.setattr("rackloom.carve.store.database.migrate_to_head", damaged)
    with pytest.raises(Refused, match="cannot be opened: no such table"):
        open_home_store(tmp_path)
