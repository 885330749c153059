"""Which trays have GPUs in partitions that the site did not make.

Filled from the readings at hand: a reading that repeats the last one is not applied again for ten minutes.
"""

import json
from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

DEFAULT_PARTITION_ID = 32766
_READINGS = sa.text(
    "SELECT endpoint.domain, observation.facts FROM observation"
    " JOIN endpoint ON endpoint.id = observation.endpoint_id"
    " WHERE endpoint.domain IS NOT NULL AND observation.facts IS NOT NULL"
)
_MACHINES = sa.text(
    "SELECT machine_gpu.guid, machine_gpu.machine_id FROM machine_gpu"
    " JOIN machine ON machine.id = machine_gpu.machine_id"
    " WHERE machine.domain = :domain AND machine_gpu.guid IS NOT NULL"
)


def upgrade() -> None:
    """Apply."""
    table = op.create_table(
        "foreign_tray",
        sa.Column("machine_id", sa.String(64), nullable=False),
        sa.Column("partition_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["machine_id"], ["machine.id"], name=op.f("fk_foreign_tray_machine_id")),
        sa.PrimaryKeyConstraint("machine_id", "partition_id", name=op.f("pk_foreign_tray")),
    )
    trays = dict(_foreign_trays(op.get_bind()))
    columns = ("machine_id", "partition_id", "name")
    op.bulk_insert(table, [dict(zip(columns, (*key, name), strict=True)) for key, name in trays.items()])


def _foreign_trays(conn: sa.Connection) -> Iterator[tuple[tuple[str, int], str]]:
    """Machine id and partition id, and the name of the partition."""
    owned = {tuple(row) for row in conn.execute(sa.text("SELECT domain, name FROM owned_partition"))}
    for domain, facts in conn.execute(_READINGS).all():
        foreign = [
            partition
            for partition in json.loads(facts)["partitions"]
            if partition["id"] != DEFAULT_PARTITION_ID
            and ((domain, partition["name"]) not in owned or not partition["guid_based"])
        ]
        rows = conn.execute(_MACHINES, {"domain": domain}).all() if foreign else ()
        machines = {row.guid: row.machine_id for row in rows}
        for partition in foreign:
            for guid in partition["members"]:
                if str(guid) in machines:
                    yield (machines[str(guid)], partition["id"]), partition["name"]
