"""All tables of the first release, with the triggers that count how many objects of each kind a tenant has.

SQLite drops the triggers of a table that a later migration rebuilds (`batch_alter_table`): such a migration
creates them again.
"""

# ruff: noqa: S608 (the names of tables and kinds are constants)

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = None
branch_labels = None
depends_on = None

OWNED = (("logical_partition", "nvLinkLogicalPartitions"), ("vpc", "vpcs"), ("instance", "instances"))
"""Tables with the tenant in each row, and their kinds."""
INTERFACE = ("nvlink_interface", "nvLinkInterfaces")
TENANT_OF_INTERFACE = "(SELECT tenant_id FROM instance WHERE id = {row}.instance_id)"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "audit_entry",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("first", sa.Double(), nullable=True),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("roles", sa.Text(), nullable=False),
        sa.Column("by_operator", sa.Boolean(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("object_kind", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("object_name", sa.Text(), nullable=False),
        sa.Column("tenant_org", sa.Text(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entry"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_entry_created", "audit_entry", ["created"], unique=False)
    op.create_index("ix_audit_entry_object_id_id", "audit_entry", ["object_id", "id"], unique=False)
    op.create_index("ix_audit_entry_subject_id", "audit_entry", ["subject", "id"], unique=False)
    op.create_index("ix_audit_entry_tenant_org_id", "audit_entry", ["tenant_org", "id"], unique=False)
    op.create_table(
        "audit_removal",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("removed", sa.BigInteger(), nullable=False),
        sa.Column("up_to", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_removal"),
    )
    op.create_table(
        "blocked_gpu",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("guid", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("fix", sa.Text(), nullable=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("domain", "guid", "reason", name="pk_blocked_gpu"),
    )
    op.create_table(
        "custom_role",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("side", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("permissions", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_custom_role"),
        sa.UniqueConstraint("org", "name", name="uq_custom_role_org_name"),
    )
    op.create_table(
        "domain_dispute",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("rival", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("domain", name="pk_domain_dispute"),
    )
    op.create_table(
        "domain_pause",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("domain", name="pk_domain_pause"),
    )
    op.create_table(
        "domain_revision",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("domain", name="pk_domain_revision"),
    )
    op.create_table(
        "endpoint",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_endpoint"),
        sa.UniqueConstraint("url", name="uq_endpoint_url"),
    )
    op.create_index("ix_endpoint_domain", "endpoint", ["domain"], unique=False)
    op.create_table(
        "identity_revision",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_identity_revision"),
    )
    op.create_table(
        "operator_step",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=True),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_operator_step"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_operator_step_domain", "operator_step", ["domain"], unique=False)
    op.create_index("ix_operator_step_subject", "operator_step", ["subject"], unique=False)
    op.create_table(
        "provider",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_provider"),
        sa.UniqueConstraint("org", name="uq_provider_org"),
    )
    op.create_table(
        "replica",
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("holder", name="pk_replica"),
    )
    op.create_table(
        "service_account",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_service_account"),
        sa.UniqueConstraint("org", "name", name="uq_service_account_org_name"),
    )
    op.create_table(
        "status_history",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("object_id", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_status_history"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_status_history_object_id", "status_history", ["object_id"], unique=False)
    op.create_table(
        "tenant",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("org", sa.Text(), nullable=False),
        sa.Column("targeted_instance_creation", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenant"),
        sa.UniqueConstraint("org", name="uq_tenant_org"),
    )
    op.create_table(
        "domain_lease",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoint.id"], name="fk_domain_lease_endpoint_id"),
        sa.PrimaryKeyConstraint("endpoint_id", name="pk_domain_lease"),
    )
    op.create_table(
        "endpoint_chassis",
        sa.Column("chassis_serial", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoint.id"], name="fk_endpoint_chassis_endpoint_id"),
        sa.PrimaryKeyConstraint("chassis_serial", name="pk_endpoint_chassis"),
    )
    op.create_index("ix_endpoint_chassis_endpoint_id", "endpoint_chassis", ["endpoint_id"], unique=False)
    op.create_table(
        "event_counter",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("newest", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_event_counter_tenant_id"),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_event_counter"),
    )
    op.create_table(
        "observation",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.Text(), nullable=True),
        sa.Column("observed_at", sa.Double(), nullable=True),
        sa.Column("unknown_since", sa.Double(), nullable=True),
        sa.Column("unknown_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoint.id"], name="fk_observation_endpoint_id"),
        sa.PrimaryKeyConstraint("endpoint_id", name="pk_observation"),
    )
    op.create_table(
        "operation",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("domain", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("partition_name", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("observed_at", sa.Double(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("finished", sa.Double(), nullable=True),
        sa.Column("observed_after", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoint.id"], name="fk_operation_endpoint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_operation"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_operation_domain", "operation", ["domain"], unique=False)
    op.create_index("ix_operation_endpoint_id", "operation", ["endpoint_id"], unique=False)
    op.create_index(
        "ix_operation_endpoint_id_observed_after",
        "operation",
        ["endpoint_id", "observed_after"],
        unique=False,
    )
    op.create_table(
        "service_account_key",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("last_used", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["account_id"], ["service_account.id"], name="fk_service_account_key_account_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_service_account_key"),
    )
    op.create_index("ix_service_account_key_account_id", "service_account_key", ["account_id"], unique=False)
    op.create_table(
        "site",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("provider_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("extra", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("default_partition", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name="fk_site_provider_id"),
        sa.PrimaryKeyConstraint("id", name="pk_site"),
        sa.UniqueConstraint("name", name="uq_site_name"),
    )
    op.create_index("ix_site_provider_id", "site", ["provider_id"], unique=False)
    op.create_table(
        "tenant_event",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_tenant_event_tenant_id"),
        sa.PrimaryKeyConstraint("tenant_id", "number", name="pk_tenant_event"),
    )
    op.create_table(
        "tenant_quota",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_tenant_quota_tenant_id"),
        sa.PrimaryKeyConstraint("tenant_id", "kind", name="pk_tenant_quota"),
    )
    op.create_table(
        "tenant_total",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_tenant_total_tenant_id"),
        sa.PrimaryKeyConstraint("tenant_id", "kind", name="pk_tenant_total"),
    )
    op.create_table(
        "allocation",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_allocation_site_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_allocation_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_allocation"),
        sa.UniqueConstraint("tenant_id", "site_id", "name", name="uq_allocation_tenant_id_site_id_name"),
    )
    op.create_index("ix_allocation_site_id", "allocation", ["site_id"], unique=False)
    op.create_index("ix_allocation_tenant_id", "allocation", ["tenant_id"], unique=False)
    op.create_table(
        "instance_type",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_instance_type_site_id"),
        sa.PrimaryKeyConstraint("id", name="pk_instance_type"),
        sa.UniqueConstraint("site_id", "name", name="uq_instance_type_site_id_name"),
    )
    op.create_index("ix_instance_type_site_id", "instance_type", ["site_id"], unique=False)
    op.create_table(
        "logical_partition",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_logical_partition_site_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_logical_partition_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_logical_partition"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_logical_partition_tenant_id_name"),
    )
    op.create_index("ix_logical_partition_site_id", "logical_partition", ["site_id"], unique=False)
    op.create_index("ix_logical_partition_status", "logical_partition", ["status"], unique=False)
    op.create_index(
        "ix_logical_partition_tenant_id_created_id",
        "logical_partition",
        ["tenant_id", "created", "id"],
        unique=False,
    )
    op.create_table(
        "owned_partition",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("logical_partition_id", sa.String(length=64), nullable=False),
        sa.Column("partition_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("operation_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["operation_id"], ["operation.id"], name="fk_owned_partition_operation_id"),
        sa.PrimaryKeyConstraint("domain", "name", name="pk_owned_partition"),
    )
    op.create_index(
        "ix_owned_partition_logical_partition_id",
        "owned_partition",
        ["logical_partition_id"],
        unique=False,
    )
    op.create_table(
        "allocation_constraint",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("allocation_id", sa.String(length=64), nullable=False),
        sa.Column("instance_type_id", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["allocation_id"], ["allocation.id"], name="fk_allocation_constraint_allocation_id"
        ),
        sa.ForeignKeyConstraint(
            ["instance_type_id"], ["instance_type.id"], name="fk_allocation_constraint_instance_type_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_allocation_constraint"),
        sa.UniqueConstraint(
            "allocation_id",
            "instance_type_id",
            name="uq_allocation_constraint_allocation_id_instance_type_id",
        ),
    )
    op.create_index(
        "ix_allocation_constraint_allocation_id",
        "allocation_constraint",
        ["allocation_id"],
        unique=False,
    )
    op.create_index(
        "ix_allocation_constraint_instance_type_id",
        "allocation_constraint",
        ["instance_type_id"],
        unique=False,
    )
    op.create_table(
        "machine",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("instance_type_id", sa.String(length=64), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("chassis_serial", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("tray_index", sa.Integer(), nullable=False),
        sa.Column("rack", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=True),
        sa.Column("missing_since", sa.Double(), nullable=True),
        sa.Column("labels", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["instance_type_id"], ["instance_type.id"], name="fk_machine_instance_type_id"
        ),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_machine_site_id"),
        sa.PrimaryKeyConstraint("id", name="pk_machine"),
        sa.UniqueConstraint("chassis_serial", "slot", name="uq_machine_chassis_serial_slot"),
    )
    op.create_index("ix_machine_domain", "machine", ["domain"], unique=False)
    op.create_index("ix_machine_instance_type_id", "machine", ["instance_type_id"], unique=False)
    op.create_index("ix_machine_site_id_domain", "machine", ["site_id", "domain"], unique=False)
    op.create_table(
        "tray_reservation",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("instance_type_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["instance_type_id"], ["instance_type.id"], name="fk_tray_reservation_instance_type_id"
        ),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_tray_reservation_site_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_tray_reservation_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tray_reservation"),
    )
    op.create_index(
        "ix_tray_reservation_instance_type_id", "tray_reservation", ["instance_type_id"], unique=False
    )
    op.create_index("ix_tray_reservation_site_id", "tray_reservation", ["site_id"], unique=False)
    op.create_index("ix_tray_reservation_tenant_id", "tray_reservation", ["tenant_id"], unique=False)
    op.create_table(
        "vpc",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("logical_partition_id", sa.String(length=64), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("extra", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["logical_partition_id"], ["logical_partition.id"], name="fk_vpc_logical_partition_id"
        ),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_vpc_site_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_vpc_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_vpc"),
        sa.UniqueConstraint("tenant_id", "site_id", "name", name="uq_vpc_tenant_id_site_id_name"),
    )
    op.create_index("ix_vpc_logical_partition_id", "vpc", ["logical_partition_id"], unique=False)
    op.create_index("ix_vpc_site_id", "vpc", ["site_id"], unique=False)
    op.create_index("ix_vpc_tenant_id_created_id", "vpc", ["tenant_id", "created", "id"], unique=False)
    op.create_table(
        "cordon",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_cordon_machine_id"),
        sa.PrimaryKeyConstraint("machine_id", name="pk_cordon"),
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
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_drain_machine_id"),
        sa.PrimaryKeyConstraint("id", name="pk_drain"),
    )
    op.create_index("ix_drain_machine_id", "drain", ["machine_id"], unique=False)
    op.create_table(
        "foreign_tray",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("partition_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_foreign_tray_machine_id"),
        sa.PrimaryKeyConstraint("machine_id", "partition_id", name="pk_foreign_tray"),
    )
    op.create_table(
        "instance",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("vpc_id", sa.String(length=64), nullable=False),
        sa.Column("instance_type_id", sa.String(length=64), nullable=True),
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("placement", sa.Text(), nullable=False),
        sa.Column("intent_at", sa.Double(), nullable=False),
        sa.Column("extra", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["instance_type_id"], ["instance_type.id"], name="fk_instance_instance_type_id"
        ),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_instance_machine_id"),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"], name="fk_instance_site_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_instance_tenant_id"),
        sa.ForeignKeyConstraint(["vpc_id"], ["vpc.id"], name="fk_instance_vpc_id"),
        sa.PrimaryKeyConstraint("id", name="pk_instance"),
        sa.UniqueConstraint("machine_id", name="uq_instance_machine_id"),
        sa.UniqueConstraint("tenant_id", "site_id", "name", name="uq_instance_tenant_id_site_id_name"),
    )
    op.create_index("ix_instance_instance_type_id", "instance", ["instance_type_id"], unique=False)
    op.create_index("ix_instance_site_id", "instance", ["site_id"], unique=False)
    op.create_index(
        "ix_instance_tenant_id_created_id", "instance", ["tenant_id", "created", "id"], unique=False
    )
    op.create_index(
        "ix_instance_tenant_id_instance_type_id", "instance", ["tenant_id", "instance_type_id"], unique=False
    )
    op.create_index("ix_instance_vpc_id", "instance", ["vpc_id"], unique=False)
    op.create_table(
        "machine_gpu",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("module_id", sa.Integer(), nullable=False),
        sa.Column("guid", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("health", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_machine_gpu_machine_id"),
        sa.PrimaryKeyConstraint("machine_id", "module_id", name="pk_machine_gpu"),
    )
    op.create_index("ix_machine_gpu_guid", "machine_gpu", ["guid"], unique=False)
    op.create_index("ix_machine_gpu_health", "machine_gpu", ["health"], unique=False)
    op.create_table(
        "moved_gpu",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("module_id", sa.Integer(), nullable=False),
        sa.Column("guid", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_moved_gpu_machine_id"),
        sa.PrimaryKeyConstraint("machine_id", "module_id", name="pk_moved_gpu"),
    )
    op.create_table(
        "reserved_tray",
        sa.Column("machine_id", sa.String(length=64), nullable=False),
        sa.Column("reservation_id", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name="fk_reserved_tray_machine_id"),
        sa.ForeignKeyConstraint(
            ["reservation_id"], ["tray_reservation.id"], name="fk_reserved_tray_reservation_id"
        ),
        sa.PrimaryKeyConstraint("machine_id", name="pk_reserved_tray"),
    )
    op.create_index("ix_reserved_tray_reservation_id", "reserved_tray", ["reservation_id"], unique=False)
    op.create_table(
        "nvlink_interface",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("logical_partition_id", sa.String(length=64), nullable=False),
        sa.Column("device_instance", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("intent_at", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name="fk_nvlink_interface_instance_id"),
        sa.ForeignKeyConstraint(
            ["logical_partition_id"],
            ["logical_partition.id"],
            name="fk_nvlink_interface_logical_partition_id",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_nvlink_interface"),
    )
    op.create_index("ix_nvlink_interface_instance_id", "nvlink_interface", ["instance_id"], unique=False)
    op.create_index(
        "ix_nvlink_interface_logical_partition_id",
        "nvlink_interface",
        ["logical_partition_id"],
        unique=False,
    )
    for table, kind in OWNED:
        _count(table, kind, "{row}.tenant_id")
    _count(*INTERFACE, TENANT_OF_INTERFACE)


def _count(table: str, kind: str, tenant: str) -> None:
    """Count the rows of `table` as they come and go. `tenant` is an expression over the row."""
    inserted = (
        f"INSERT INTO tenant_total (tenant_id, kind, value) VALUES ({tenant.format(row='NEW')}, '{kind}', 1)"
        " ON CONFLICT (tenant_id, kind) DO UPDATE SET value = tenant_total.value + 1;"
    )
    deleted = (
        "UPDATE tenant_total SET value = value - 1"
        f" WHERE tenant_id = {tenant.format(row='OLD')} AND kind = '{kind}';"
    )
    for event, change in (("INSERT", inserted), ("DELETE", deleted)):
        name = f"total_{table}_{event.lower()}"
        if op.get_bind().dialect.name == "postgresql":
            op.execute(
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS"
                f" $$ BEGIN {change} RETURN NULL; END $$"
            )
            op.execute(
                f"CREATE TRIGGER {name} AFTER {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"
            )
        else:
            op.execute(f"CREATE TRIGGER {name} AFTER {event} ON {table} FOR EACH ROW BEGIN {change} END")
