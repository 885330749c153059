"""How many objects a tenant may have, where a provider set another limit than the default."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "tenant_quota",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_tenant_quota_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "kind", name=op.f("pk_tenant_quota")),
    )
