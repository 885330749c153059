"""Migrations of every database that holds the records."""

from pathlib import Path

import sqlalchemy as sa

from rackloom.errors import Refused


def migrate_to_head(conn: sa.Connection) -> None:
    """Run every migration that `conn`'s database has not seen. The caller owns the transaction.

    Afterwards the database learns what its tables hold (`analyze`).

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
    """Have the database count what its tables and indexes hold, for the plans of queries."""
    conn.exec_driver_sql("ANALYZE")
