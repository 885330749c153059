"""How many objects of each kind a tenant has, counted by triggers; an index in the order of creation.

SQLite drops the triggers of a table that a later migration rebuilds (`batch_alter_table`): such a migration
creates them again.
"""

# ruff: noqa: S608 (the names of tables and kinds are constants)

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

OWNED = (("logical_partition", "nvLinkLogicalPartitions"), ("vpc", "vpcs"), ("instance", "instances"))
"""Tables with the tenant in each row, and their kinds."""
INTERFACE = ("nvlink_interface", "nvLinkInterfaces")
TENANT_OF_INTERFACE = "(SELECT tenant_id FROM instance WHERE id = {row}.instance_id)"


def upgrade() -> None:
    """Apply."""
    for table, _ in OWNED:
        op.create_index(
            op.f(f"ix_{table}_tenant_id_created_id"), table, ["tenant_id", "created", "id"], unique=False
        )
        op.drop_index(op.f(f"ix_{table}_tenant_id"), table_name=table)
    op.create_table(
        "tenant_total",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_tenant_total_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "kind", name=op.f("pk_tenant_total")),
    )
    for table, kind in OWNED:
        op.execute(
            f"INSERT INTO tenant_total SELECT tenant_id, '{kind}', count(*) FROM {table} GROUP BY tenant_id"
        )
        _count(table, kind, "{row}.tenant_id")
    table, kind = INTERFACE
    op.execute(
        f"INSERT INTO tenant_total SELECT tenant_id, '{kind}', count(*) FROM {table}"
        f" JOIN instance ON instance.id = {table}.instance_id GROUP BY tenant_id"
    )
    _count(table, kind, TENANT_OF_INTERFACE)


def _count(table: str, kind: str, tenant: str) -> None:
    """Count the rows of `table` as they come and go; `tenant` is an expression over the row."""
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
