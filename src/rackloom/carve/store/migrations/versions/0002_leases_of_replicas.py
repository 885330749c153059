"""Leases: which replica reconciles which endpoint, and which replicas are alive."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "domain_lease",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoint.id"], name=op.f("fk_domain_lease_endpoint_id")),
        sa.PrimaryKeyConstraint("endpoint_id", name=op.f("pk_domain_lease")),
    )
    op.create_table(
        "replica",
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("holder", name=op.f("pk_replica")),
    )
