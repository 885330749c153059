"""Numbers that grow with every write, and ids that a controller chooses, have 64 bits on PostgreSQL.

SQLite has 64 bits in every column of integers.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

WITH_SEQUENCE = ("operation", "status_history", "operator_step", "audit_entry")
"""Their `id` is taken from a sequence, which has a type of its own."""
OTHERS = (
    ("owned_partition", "operation_id"),
    ("owned_partition", "partition_id"),
    ("foreign_tray", "partition_id"),
    ("domain_revision", "revision"),
    ("tenant_event", "number"),
    ("event_counter", "newest"),
    ("audit_removal", "up_to"),
)


def upgrade() -> None:
    """Apply."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, column in (*((table, "id") for table in WITH_SEQUENCE), *OTHERS):
        op.alter_column(table, column, type_=sa.BigInteger(), existing_type=sa.Integer())
    for table in WITH_SEQUENCE:
        op.execute(f"ALTER SEQUENCE {table}_id_seq AS bigint")
