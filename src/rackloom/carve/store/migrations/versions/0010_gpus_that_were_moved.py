"""What an instance lost when its tray was put elsewhere."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "moved_gpu",
        sa.Column("machine_id", sa.String(64), nullable=False),
        sa.Column("module_id", sa.Integer(), nullable=False),
        sa.Column("guid", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name=op.f("fk_moved_gpu_machine_id")),
        sa.PrimaryKeyConstraint("machine_id", "module_id", name=op.f("pk_moved_gpu")),
    )
