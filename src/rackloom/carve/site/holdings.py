"""Who holds which GPUs of a domain, loaded in a fixed number of queries however many there are."""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import DefaultPartition
from rackloom.carve.site import blocks, drains, knowledge, operations, ownership
from rackloom.carve.site.tables import (
    instance,
    machine,
    machine_gpu,
    nvlink_interface,
    owned_partition,
    site,
)
from rackloom.carve.site.verdicts import DomainFacts, holders


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
    here = machine.c.domain.is_(None) if domain is None else machine.c.domain == domain
    instances = conn.execute(
        sa.select(instance, machine.c.status.label("host_status"))
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(here)
        .order_by(instance.c.created, instance.c.id)
    ).all()
    gpus = _gpus(conn, {row.machine_id for row in instances})
    interfaces = _interfaces(conn, {row.id for row in instances})
    drained = drains.active(conn, {row.machine_id for row in instances})
    return [
        Holding(
            row,
            gpus.get(row.machine_id, {}),
            interfaces.get(row.id, []),
            drained[row.machine_id].reason if row.machine_id in drained else None,
        )
        for row in instances
    ]


def _gpus(conn: sa.Connection, machine_ids: set[str]) -> dict[str, dict[int, int | None]]:
    found: dict[str, dict[int, int | None]] = {}
    rows = conn.execute(sa.select(machine_gpu).where(machine_gpu.c.machine_id.in_(machine_ids)))
    for row in rows:
        modules = found.setdefault(row.machine_id, {})
        modules[row.module_id] = None if row.guid is None else int(row.guid)
    return found


def _interfaces(conn: sa.Connection, instance_ids: set[str]) -> dict[str, list[sa.Row[Any]]]:
    found: dict[str, list[sa.Row[Any]]] = {}
    table = nvlink_interface
    rows = conn.execute(
        sa.select(table).where(table.c.instance_id.in_(instance_ids)).order_by(table.c.device_instance)
    )
    for row in rows:
        found.setdefault(row.instance_id, []).append(row)
    return found


def facts(conn: sa.Connection, domain: str | None, held: Sequence[Holding]) -> DomainFacts:
    """What the records and the newest observation say of `domain`."""
    known = knowledge.of_domain(conn, domain)
    names = sa.select(owned_partition.c.name, owned_partition.c.logical_partition_id)
    owned = conn.execute(names.where(owned_partition.c.domain == domain)).all()
    return DomainFacts(
        observation=known.observation,
        doubt=known.doubt,
        owned={row.name: row.logical_partition_id for row in owned},
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
        holders=holders(known.observation),
        joining=operations.joining(conn, domain, known.observation.observed_at if known.observation else 0.0),
        present=frozenset(gpu.guid for gpu in known.observation.gpus) if known.observation else frozenset(),
    )


def managed(conn: sa.Connection, domain: str | None) -> frozenset[int]:
    """Fabric GUIDs of the GPUs on the site's machines in this domain."""
    found = (
        sa.select(machine_gpu.c.guid)
        .join(machine, machine.c.id == machine_gpu.c.machine_id)
        .where(machine.c.domain == domain, machine_gpu.c.guid.is_not(None))
    )
    return frozenset(int(guid) for guid in conn.execute(found).scalars() if guid)


def default_partition(conn: sa.Connection, domain: str | None) -> DefaultPartition:
    """What the site does with the factory default partition; kept where the site has no machine."""
    found = (
        sa.select(site.c.default_partition)
        .join(machine, machine.c.site_id == site.c.id)
        .where(machine.c.domain == domain)
        .limit(1)
    )
    policy = conn.execute(found).scalar_one_or_none()
    return DefaultPartition.KEEP if policy is None else DefaultPartition(policy)
