"""Bugs in plans: which GPU belongs into which partition."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import CALM, CRAMPED, Bug, only

from rackloom.carve.partitions import intent
from rackloom.carve.reconcile import domain_pass
from rackloom.carve.store import schema
from rackloom.core.partitions import domain, planner
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DeletePartition,
    DomainLimits,
    OwnedPartition,
    PartitionPlan,
)


def additions_before_removals(patch: pytest.MonkeyPatch) -> None:
    plan_removals = planner.plan_removals

    def hasty(given: Any, blockers: Any) -> Any:
        return [] if given.desired.partition_of else plan_removals(given, blockers)

    def joining(desired: Any, layout: Any, blocked: Any) -> Any:
        wanted: dict[str, list[int]] = {}
        for guid, partition in sorted(desired.partition_of.items()):
            home = layout.home.get(partition)
            if home is None or guid not in home.partition.members:
                wanted.setdefault(partition, []).append(guid)
        return sorted((name, tuple(guids)) for name, guids in wanted.items())

    patch.setattr(planner, "plan_removals", hasty)
    patch.setattr(planner, "_gpus_to_add", joining)
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def owned_by_number_in_any_domain(patch: pytest.MonkeyPatch) -> None:
    read_layout = domain.read_layout

    def by_number(intent: Any, observation: Any, desired: Any) -> Any:
        # The first partition of the one domain is number 1, and so is the first of any other.
        owned = tuple(
            OwnedPartition(name=partition.name, logical_partition="elsewhere", partition_id=partition.id)
            for partition in observation.partitions
            if partition.id == 1
        )
        return read_layout(msgspec.structs.replace(intent, owned=intent.owned + owned), observation, desired)

    patch.setattr(planner, "read_layout", by_number)
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def unknown_partitions_deleted(patch: pytest.MonkeyPatch) -> None:
    make_plan = planner.make_plan

    def thorough(intent: Any, observation: Any, *rest: Any) -> PartitionPlan:
        plan = make_plan(intent, observation, *rest)
        ours = {partition.name for partition in intent.owned}
        strange = [
            DeletePartition(partition_id=partition.id, name=partition.name)
            for partition in observation.partitions
            if partition.name not in ours and partition.id != DEFAULT_PARTITION_ID
        ]
        return msgspec.structs.replace(plan, operations=tuple(strange)) if strange else plan

    patch.setattr(domain_pass, "make_plan", thorough)
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def one_name_for_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "partition_name", lambda logical_partition: "rl-shared")


def gpus_of_strangers_touched(patch: pytest.MonkeyPatch) -> None:
    def all_of_it(default: Any, *_: Any) -> Any:
        return DeletePartition(partition_id=default.id, name=default.name)

    patch.setattr(planner, "_removal_from_default", all_of_it)
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def free_gpus_of_all_trays_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(domain, "tray_partition_of", lambda _: "tray-all")
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def limit_of_the_domain_ignored(patch: pytest.MonkeyPatch) -> None:
    make_plan = planner.make_plan

    def boundless(intent: Any, observation: Any, *rest: Any) -> PartitionPlan:
        roomy = msgspec.structs.replace(observation, limits=DomainLimits())
        plan = make_plan(intent, roomy, *rest)
        return msgspec.structs.replace(plan, observation=observation)

    patch.setattr(domain_pass, "make_plan", boundless)
    patch.setattr(domain_pass, "check_plan", lambda *_: None)


def wrong_tenant_in_a_partition(patch: pytest.MonkeyPatch) -> None:
    assignments = intent.gpu_assignments

    def mixed(conn: sa.Connection, of: str) -> Any:
        found = assignments(conn, of)
        return tuple(
            msgspec.structs.replace(
                assignment, logical_partition=found[0].logical_partition, tenant=found[0].tenant
            )
            for assignment in found
        )

    patch.setattr(intent, "gpu_assignments", mixed)


def ended_drain_not_announced(patch: pytest.MonkeyPatch) -> None:
    machine, gpu, drain = schema.machine, schema.machine_gpu, schema.drain
    ever = (
        sa.select(gpu.c.guid)
        .join(machine, machine.c.id == gpu.c.machine_id)
        .join(drain, drain.c.machine_id == machine.c.id)
        .where(machine.c.domain == sa.bindparam("domain"), gpu.c.guid.is_not(None))
    )
    patch.setattr(intent, "_DRAINED_GPUS", ever)


BUGS: dict[Bug, SimPlan] = {
    additions_before_removals: CALM,
    owned_by_number_in_any_domain: only("by-hand"),
    unknown_partitions_deleted: only("by-hand"),
    one_name_for_two: CALM,
    gpus_of_strangers_touched: CALM,
    free_gpus_of_all_trays_together: msgspec.structs.replace(CALM, free_gpus=DefaultPartitionPolicy.TRAY),
    limit_of_the_domain_ignored: CRAMPED,
    wrong_tenant_in_a_partition: CALM,
    ended_drain_not_announced: CALM,
}
