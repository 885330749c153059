"""The few GPUs that are not healthy are found among the many that are."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(op.f("ix_machine_gpu_health"), "machine_gpu", ["health"], unique=False)
