"""What is said of a site and not acted on."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("site", schema=None) as batch_op:
        batch_op.add_column(sa.Column("extra", sa.JSON(), nullable=False, server_default="{}"))
