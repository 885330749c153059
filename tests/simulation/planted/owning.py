"""Bugs in ownership: machines, GPUs, partitions and their names."""

from typing import Any

import pytest
import sqlalchemy as sa
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import CALM, Bug, only

from rackloom.carve.partitions import intent, ownership
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.tenancy import logical_partitions, status


def released_machine_leaves_its_gpus(patch: pytest.MonkeyPatch) -> None:
    managed = intent.managed_gpus

    def with_instances_only(conn: sa.Connection, of: str | None) -> frozenset[int]:
        held = (
            sa.select(schema.machine_gpu.c.guid)
            .join(schema.instance, schema.instance.c.machine_id == schema.machine_gpu.c.machine_id)
            .where(schema.instance.c.status != "Terminating", schema.machine_gpu.c.guid.is_not(None))
        )
        return managed(conn, of) & {int(guid) for guid in conn.execute(held).scalars()}

    patch.setattr(intent, "managed_gpus", with_instances_only)
    patch.setattr(status, "why_not_released", lambda *_, **__: None)


def deleted_logical_partition_leaves_a_partition(patch: pytest.MonkeyPatch) -> None:
    delete = logical_partitions.delete_logical_partition

    def forgetful(conn: sa.Connection, tenant: str, partition: str, now: float) -> Any:
        changed = delete(conn, tenant, partition, now)
        table = schema.owned_partition
        conn.execute(sa.delete(table).where(table.c.logical_partition_id == partition))
        return changed

    patch.setattr(logical_partitions, "delete_logical_partition", forgetful)


def ownership_recorded_after_the_fact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "claim_name", lambda *_: None)
    finish = records.finish_operation

    def late(conn: sa.Connection, operation_id: str, state: str, *rest: Any) -> None:
        finish(conn, operation_id, state, *rest)
        row = conn.execute(
            sa.select(schema.operation).where(schema.operation.c.id == int(operation_id))
        ).one()
        known = {owned_partition.name for owned_partition in ownership.owned_partitions(conn, row.domain)}
        if state == "done" and row.kind == "create-partition" and row.partition_name not in known:
            owned = {
                "domain": row.domain,
                "name": row.partition_name,
                "operation_id": row.id,
                "created": row.started,
            }
            partition = row.detail["logical_partition"]
            conn.execute(sa.insert(schema.owned_partition).values(**owned, logical_partition_id=partition))

    patch.setattr(records, "finish_operation", late)
    patch.setattr(records, "_check_still_wanted", lambda *_: None)


def name_forgotten_when_a_list_omits_it(patch: pytest.MonkeyPatch) -> None:
    def hasty(_conn: Any, row: Any, observed_at: float, _now: float) -> bool:
        return bool(row.seen_at is not None and row.seen_at < observed_at)

    patch.setattr(ownership, "_is_known_gone", hasty)


def ownership_lost_with_the_domain_uuid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "copy_ownership", lambda *_: None)


BUGS: dict[Bug, SimPlan] = {
    released_machine_leaves_its_gpus: CALM,
    deleted_logical_partition_leaves_a_partition: only("slow", "dark", pause=8, think=3),
    ownership_recorded_after_the_fact: only("reply-lost", "kill-soon", pause=8),
    name_forgotten_when_a_list_omits_it: only("list-omits", "tray-away", pause=5),
    ownership_lost_with_the_domain_uuid: only("new-domain-uuid", pause=60),
}
