"""Migrations of every database that holds the records."""

from pathlib import Path

import sqlalchemy as sa

from rackloom.errors import Refused


def migrate_to_head(conn: sa.Connection) -> None:
    """Run every migration that `conn`'s database has not seen. The caller owns the transaction.

    Afterwards the statistics of the database are renewed (`analyze`).

    Raises Refused for tables of a newer version, or of one before the first release.
    """
    # Programs that only read a database need no migrations, and alembic takes a third of their start.
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = conn
    before = MigrationContext.configure(conn).get_current_revision()
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise Refused(
            f"the tables of the database are of another version: {error}",
            nearest_fix="start the version that wrote them, or restore a backup",
        ) from error
    if MigrationContext.configure(conn).get_current_revision() != before:
        analyze(conn)


def analyze(conn: sa.Connection) -> None:
    """Have the database count the rows of its tables and the values of its indexes, to plan queries.

    SQLite keeps the counts until the next time. By the counts of a small table, a query of a page would still
    walk over all of it when the table is large. So no table counts as smaller than 10,000 rows.
    """
    conn.exec_driver_sql("ANALYZE")
    if conn.dialect.name == "sqlite":
        # The first number is that of the rows.
        conn.exec_driver_sql("UPDATE sqlite_stat1 SET stat=max(stat+0, 10000) || ltrim(stat, '0123456789')")
