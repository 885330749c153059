"""Two domains whose controllers list the same hardware are in dispute with one another."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("domain_dispute", sa.Column("rival", sa.Text(), nullable=True))
