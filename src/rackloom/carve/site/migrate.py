"""Brings a database to the schema of this version, with the migrations that ship in the package."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config


def upgrade(conn: sa.Connection) -> None:
    """Run every migration that `conn`'s database has not seen. The caller owns the transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = conn
    command.upgrade(config, "head")
