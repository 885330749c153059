"""Who holds which GPUs of a domain, loaded in a fixed number of queries however many there are."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from rackloom.carve.plan.values import DefaultPartition, GpuHealth, Observation
from rackloom.carve.site import blocks, drains, knowledge, operations, ownership
from rackloom.carve.site.tables import instance, machine, machine_gpu, nvlink_interface, site
from rackloom.carve.site.verdicts import DomainFacts, holders


class Questions(msgspec.Struct, frozen=True):
    """What is asked about the machines that a condition chooses. Built once: every pass asks."""

    instances: sa.Select[Any]
    gpus: sa.Select[Any]
    interfaces: sa.Select[Any]


def _questions(here: sa.ColumnElement[bool]) -> Questions:
    on_machine = instance.c.machine_id == machine.c.id
    told = (machine.c.status.label("host_status"), drains.reason_of(machine.c.id).label("drain"))
    gpus = sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid)
    interfaces = sa.select(nvlink_interface).join(instance, instance.c.id == nvlink_interface.c.instance_id)
    return Questions(
        instances=sa.select(instance, *told)
        .join(machine, on_machine)
        .where(here)
        .order_by(instance.c.created, instance.c.id),
        gpus=gpus.join(machine, machine.c.id == machine_gpu.c.machine_id)
        .join(instance, on_machine)
        .where(here),
        interfaces=interfaces.join(machine, on_machine)
        .where(here)
        .order_by(nvlink_interface.c.device_instance),
    )


_HERE = _questions(machine.c.domain == sa.bindparam("domain"))
_NOWHERE = _questions(machine.c.domain.is_(None))
_MANAGED = (
    sa.select(machine_gpu.c.guid)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(machine.c.domain == sa.bindparam("domain"), machine_gpu.c.guid.is_not(None))
)
_POLICY = (
    sa.select(site.c.default_partition)
    .join(machine, machine.c.site_id == site.c.id)
    .where(machine.c.domain == sa.bindparam("domain"))
    .limit(1)
)


class Holding(msgspec.Struct, frozen=True):
    """An instance with the GPUs of its machine (module id -> GUID) and its interfaces."""

    instance: sa.Row[Any]
    """With the status of its machine as `host_status`."""
    gpus: dict[int, int | None]
    interfaces: Sequence[sa.Row[Any]]
    drain: str | None
    """Why the tray is drained; None when it is not."""

    def guid(self, device_instance: int) -> int | None:
        """Fabric GUID of a GPU; None until observed."""
        return self.gpus.get(device_instance + 1)


def load(conn: sa.Connection, domain: str | None) -> list[Holding]:
    """Everything that is held on machines of `domain` (None: of no known domain)."""
    asked, here = (_NOWHERE, {}) if domain is None else (_HERE, {"domain": domain})
    instances = conn.execute(asked.instances, here).all()
    if not instances:
        return []
    gpus = _gpus(conn.execute(asked.gpus, here))
    interfaces = _interfaces(conn.execute(asked.interfaces, here))
    return [
        Holding(row, gpus.get(row.machine_id, {}), interfaces.get(row.id, []), row.drain) for row in instances
    ]


def _gpus(rows: Iterable[Sequence[Any]]) -> dict[str, dict[int, int | None]]:
    found: defaultdict[str, dict[int, int | None]] = defaultdict(dict)
    for machine_id, module_id, guid in rows:
        found[machine_id][module_id] = None if guid is None else int(guid)
    return found


def _interfaces(rows: Iterable[sa.Row[Any]]) -> dict[str, list[sa.Row[Any]]]:
    found: defaultdict[str, list[sa.Row[Any]]] = defaultdict(list)
    for row in rows:
        found[row.instance_id].append(row)
    return found


def facts(conn: sa.Connection, domain: str | None, held: Sequence[Holding]) -> DomainFacts:
    """What the records and the observations that stand say of `domain`."""
    known = knowledge.of_domain(conn, domain)
    owned = () if domain is None else ownership.of_domain(conn, domain)
    recorded = DomainFacts(
        observation=None,
        doubt=known.doubt,
        owned={one.name: one.logical_partition for one in owned},
        blocked=blocks.reasons(conn, domain),
        lost=frozenset() if domain is None else ownership.lost(conn, domain),
        tenant_of={
            guid: holding.instance.tenant_id
            for holding in held
            for guid in holding.gpus.values()
            if guid is not None
        },
        managed=managed(conn, domain),
        default_partition=default_partition(conn, domain),
    )
    if not known.shown:
        return recorded
    newest, *others = (_with(conn, recorded, seen) for seen in known.shown)
    return replace(newest, others=tuple(others))


def _with(conn: sa.Connection, recorded: DomainFacts, seen: Observation) -> DomainFacts:
    return replace(
        recorded,
        observation=seen,
        holders=holders(seen),
        joining=operations.joining(conn, seen.domain, seen.observed_at),
        present=frozenset(gpu.guid for gpu in seen.gpus),
        no_nvlink=frozenset(gpu.guid for gpu in seen.gpus if gpu.health is GpuHealth.NO_NVLINK),
    )


def managed(conn: sa.Connection, domain: str | None) -> frozenset[int]:
    """Fabric GUIDs of the GPUs on the site's machines in this domain."""
    return frozenset(int(guid) for (guid,) in conn.execute(_MANAGED, {"domain": domain}) if guid)


def default_partition(conn: sa.Connection, domain: str | None) -> DefaultPartition:
    """What the site does with the factory default partition; kept where the site has no machine."""
    policy = conn.execute(_POLICY, {"domain": domain}).scalar_one_or_none()
    return DefaultPartition.KEEP if policy is None else DefaultPartition(policy)


def default_partitions(conn: sa.Connection) -> dict[str, DefaultPartition]:
    """As `default_partition`, of every domain that the site has machines in."""
    asked = sa.select(machine.c.domain, site.c.default_partition).join(site, site.c.id == machine.c.site_id)
    rows = conn.execute(asked.where(machine.c.domain.is_not(None)).distinct())
    return {domain: DefaultPartition(policy) for domain, policy in rows}
