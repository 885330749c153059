"""Which trays are kept for which organisation and until when, and labels of machines."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("machine", schema=None) as batch_op:
        batch_op.add_column(sa.Column("labels", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "tray_reservation",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("site_id", sa.String(64), nullable=False),
        sa.Column("instance_type_id", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_tray_reservation_tenant_id")),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name=op.f("fk_tray_reservation_site_id")),
        sa.ForeignKeyConstraint(
            ["instance_type_id"], ["instance_type.id"], name=op.f("fk_tray_reservation_instance_type_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tray_reservation")),
    )
    for column in ("tenant_id", "site_id", "instance_type_id"):
        op.create_index(op.f(f"ix_tray_reservation_{column}"), "tray_reservation", [column])
    op.create_table(
        "reserved_tray",
        sa.Column("machine_id", sa.String(64), nullable=False),
        sa.Column("reservation_id", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name=op.f("fk_reserved_tray_machine_id")),
        sa.ForeignKeyConstraint(
            ["reservation_id"], ["tray_reservation.id"], name=op.f("fk_reserved_tray_reservation_id")
        ),
        sa.PrimaryKeyConstraint("machine_id", name=op.f("pk_reserved_tray")),
    )
    op.create_index(op.f("ix_reserved_tray_reservation_id"), "reserved_tray", ["reservation_id"])
