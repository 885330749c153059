"""Custom roles of organisations, and service accounts with their keys."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "custom_role",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("side", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("permissions", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_custom_role")),
        sa.UniqueConstraint("org", "name", name=op.f("uq_custom_role_org_name")),
    )
    op.create_table(
        "service_account",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_service_account")),
        sa.UniqueConstraint("org", "name", name=op.f("uq_service_account_org_name")),
    )
    op.create_table(
        "service_account_key",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("account_id", sa.String(64), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("last_used", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["account_id"], ["service_account.id"], name=op.f("fk_service_account_key_account_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_service_account_key")),
    )
    op.create_index(op.f("ix_service_account_key_account_id"), "service_account_key", ["account_id"])
    op.create_table(
        "identity_revision",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_identity_revision")),
    )
