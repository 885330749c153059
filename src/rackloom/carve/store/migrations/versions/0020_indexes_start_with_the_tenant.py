"""Indexes of tenants' tables start with the tenant: one that starts otherwise leads through the rows of all.

Few logical partitions are in deletion at any time, and every pass reads them: a partial index has only those.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

TABLES = ("allocation", "instance", "logical_partition", "tray_reservation", "vpc")


def upgrade() -> None:
    """Apply."""
    for table in TABLES:
        op.drop_index(op.f(f"ix_{table}_site_id"), table_name=table)
    op.drop_index(op.f("ix_logical_partition_status"), table_name="logical_partition")
    deleting = sa.text("status = 'Deleting'")
    op.create_index(
        "ix_logical_partition_deleting",
        "logical_partition",
        ["tenant_id"],
        sqlite_where=deleting,
        postgresql_where=deleting,
    )
