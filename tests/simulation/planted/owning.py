"""Bugs in whose something is: machines, GPUs, partitions and their names."""

from typing import Any

import pytest
import sqlalchemy as sa
from tests.simulation.planted.plans import CALM, Bug, only

from rackloom.carve.site import (
    fabric_book,
    holdings,
    logical_partitions,
    ownership,
    settle,
    tables,
)
from rackloom.twin.carving.run import Plan as SimPlan


def released_machine_leaves_its_gpus(patch: pytest.MonkeyPatch) -> None:
    managed = holdings.managed

    def with_instances_only(conn: sa.Connection, of: str | None) -> frozenset[int]:
        held = (
            sa.select(tables.machine_gpu.c.guid)
            .join(tables.instance, tables.instance.c.machine_id == tables.machine_gpu.c.machine_id)
            .where(tables.instance.c.status != "Terminating", tables.machine_gpu.c.guid.is_not(None))
        )
        return managed(conn, of) & {int(guid) for guid in conn.execute(held).scalars()}

    patch.setattr(holdings, "managed", with_instances_only)
    patch.setattr(settle, "why_not_released", lambda *_, **__: None)


def deleted_logical_partition_leaves_a_partition(patch: pytest.MonkeyPatch) -> None:
    delete = logical_partitions.delete

    def forgetful(conn: sa.Connection, tenant: str, partition: str, now: float) -> Any:
        changed = delete(conn, tenant, partition, now)
        table = tables.owned_partition
        conn.execute(sa.delete(table).where(table.c.logical_partition_id == partition))
        return changed

    patch.setattr(logical_partitions, "delete", forgetful)


def ownership_recorded_after_the_fact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "claim", lambda *_: None)
    finish = fabric_book.finish_operation

    def late(conn: sa.Connection, operation_id: str, state: str, *rest: Any) -> None:
        finish(conn, operation_id, state, *rest)
        row = conn.execute(
            sa.select(tables.operation).where(tables.operation.c.id == int(operation_id))
        ).one()
        known = {one.name for one in ownership.of_domain(conn, row.domain)}
        if state == "done" and row.kind == "create-partition" and row.partition_name not in known:
            owned = {
                "domain": row.domain,
                "name": row.partition_name,
                "operation_id": row.id,
                "created": row.started,
            }
            partition = row.detail["logical_partition"]
            conn.execute(sa.insert(tables.owned_partition).values(**owned, logical_partition_id=partition))

    patch.setattr(fabric_book, "finish_operation", late)
    patch.setattr(fabric_book, "_check_still_wanted", lambda *_: None)


def name_forgotten_when_a_list_omits_it(patch: pytest.MonkeyPatch) -> None:
    def hasty(_conn: Any, row: Any, observed_at: float, _now: float) -> bool:
        return bool(row.seen_at is not None and row.seen_at < observed_at)

    patch.setattr(ownership, "_is_gone", hasty)


def ownership_lost_with_the_domain_uuid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "follow", lambda *_: None)


BUGS: dict[Bug, SimPlan] = {
    released_machine_leaves_its_gpus: CALM,
    deleted_logical_partition_leaves_a_partition: only("slow", "dark", pause=8, think=3),
    ownership_recorded_after_the_fact: only("reply-lost", "kill-soon", pause=8),
    name_forgotten_when_a_list_omits_it: only("list-omits", "tray-away", pause=5),
    ownership_lost_with_the_domain_uuid: only("new-domain-uuid", pause=60),
}
