"""What stands in the way of wishes."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "blocked_gpu",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("guid", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("fix", sa.Text(), nullable=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("domain", "guid", "reason", name=op.f("pk_blocked_gpu")),
    )
