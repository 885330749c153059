"""Indexes that hold what each request counts: machines of a site by domain, instances of a tenant by type."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(op.f("ix_machine_site_id_domain"), "machine", ["site_id", "domain"], unique=False)
    op.drop_index(op.f("ix_machine_site_id"), table_name="machine")
    op.create_index(
        op.f("ix_instance_tenant_id_instance_type_id"),
        "instance",
        ["tenant_id", "instance_type_id"],
        unique=False,
    )
