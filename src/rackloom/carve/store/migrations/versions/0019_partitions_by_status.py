"""Logical partitions by their status: every pass over a domain asks whether one is being deleted."""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(op.f("ix_logical_partition_status"), "logical_partition", ["status"], unique=False)
