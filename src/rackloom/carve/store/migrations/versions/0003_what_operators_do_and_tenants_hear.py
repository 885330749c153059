"""What operators do and tenants hear."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "domain_pause",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("domain", name=op.f("pk_domain_pause")),
    )
    op.create_table(
        "operator_step",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=True),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_step")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("operator_step", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_operator_step_domain"), ["domain"], unique=False)
        batch_op.create_index(batch_op.f("ix_operator_step_subject"), ["subject"], unique=False)

    op.create_table(
        "event_counter",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("newest", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_event_counter_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_event_counter")),
    )
    op.create_table(
        "tenant_event",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_tenant_event_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "number", name=op.f("pk_tenant_event")),
    )
    op.create_table(
        "cordon",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name=op.f("fk_cordon_machine_id")),
        sa.PrimaryKeyConstraint("machine_id", name=op.f("pk_cordon")),
    )
    op.create_table(
        "drain",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("drained", sa.Double(), nullable=True),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name=op.f("fk_drain_machine_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drain")),
    )
    with op.batch_alter_table("drain", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_drain_machine_id"), ["machine_id"], unique=False)

    with op.batch_alter_table("machine", schema=None) as batch_op:
        batch_op.add_column(sa.Column("missing_since", sa.Double(), nullable=True))

    with op.batch_alter_table("operation", schema=None) as batch_op:
        batch_op.add_column(sa.Column("observed_after", sa.Double(), nullable=True))
        batch_op.create_index(
            "ix_operation_endpoint_id_observed_after", ["endpoint_id", "observed_after"], unique=False
        )
