"""Migrations of every database that holds the records."""

from pathlib import Path

import sqlalchemy as sa


def migrate_to_head(conn: sa.Connection) -> None:
    """Run every migration that `conn`'s database has not seen. The caller owns the transaction."""
    # Programs that only read a database need no migrations, and alembic takes a third of their start.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = conn
    command.upgrade(config, "head")
