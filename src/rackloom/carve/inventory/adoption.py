"""Adoption of a foreign partition for an owner that need not exist yet.

A partition can be adopted only for a logical partition that wants all its GPUs, and a GPU is wanted
through an instance on its machine. If partitions were made by hand, before the site or beside it,
none of these records exist. An operator who names the owner gets them in one step, `adopt_for_owner`:

1. The partition must be adoptable, and all its machines must be of one site.
2. Missing records are created: the tenant of the organisation, an allocation for machines that its
   allocations lack, its logical partition, its VPC (without a default logical partition), and an instance on
   each machine without one, with an interface for each GPU that the partition holds.
3. `found.adopt_partition` adopts the partition by its own rules: it refuses if a GPU is not wanted, for
   example because its machine carries an instance of another tenant.

All is one transaction: if a step is refused, nothing is created. No GPU moves.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.partitions import found
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.prepared import find_row, has_row
from rackloom.carve.store.schema import allocation, instance, logical_partition, machine, machine_gpu, vpc
from rackloom.carve.store.values import Changed, IdFactory, InterfaceSpec, check_name, conflict
from rackloom.carve.tenancy import catalog, entitlements, instance_creation, logical_partitions, placement
from rackloom.carve.tenancy.entitlements import NewAllocation
from rackloom.carve.tenancy.instance_creation import CreationPlan, InstanceRequest, MachineAssignment
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition, NewVpc
from rackloom.core.partitions.domain import ObservedPartition
from rackloom.core.place.instance_trays import AllocationUse


class PartitionOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of an adopted partition, by names. Missing records are created."""

    org: str
    vpc: str
    logical_partition: str


def adopt_for_owner(
    conn: sa.Connection, domain: str, name: str, owner: PartitionOwner, order: OperatorOrder, ids: IdFactory
) -> Changed[tuple[str, ...]]:
    """Adopt a found partition for `owner`. Return a description of each record created."""
    for text in (owner.org, owner.vpc, owner.logical_partition):
        check_name(text)
    trays = _trays_of(conn, found.foreign_partition(conn, domain, name, order.valid_from)[1])
    maker = _OwnerMaker(conn, owner, catalog.get_site(conn, _site_of(trays)), order.now, ids)
    empty = [tray for tray in trays if tray.instance_id is None]
    maker.ensure_allocation(f"partition {name} of {domain}", empty)
    partition_id = maker.ensure_logical_partition()
    domains = maker.create_instances(empty, maker.ensure_vpc(), partition_id)
    adopted = found.adopt_partition(conn, domain, name, partition_id, order)
    return Changed(tuple(maker.created), domains | adopted.domains)


class _Tray(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with GPUs in the partition."""

    machine_id: str
    site_id: str
    type_id: str | None
    instance_id: str | None
    devices: tuple[int, ...]
    """Device instances of the GPUs that the partition holds."""


def _trays_of(conn: sa.Connection, partition: ObservedPartition) -> list[_Tray]:
    held = (
        sa.select(
            machine.c.id,
            machine.c.site_id,
            machine.c.instance_type_id,
            instance.c.id.label("instance_id"),
            machine_gpu.c.module_id,
        )
        .join(machine_gpu, machine_gpu.c.machine_id == machine.c.id)
        .join(instance, instance.c.machine_id == machine.c.id, isouter=True)
        .where(machine_gpu.c.guid.in_([str(guid) for guid in partition.members]))
        .order_by(machine.c.id, machine_gpu.c.module_id)
    )
    by_machine = [list(rows) for _, rows in groupby(conn.execute(held), key=attrgetter("id"))]
    return [
        _Tray(
            machine_id=rows[0].id,
            site_id=rows[0].site_id,
            type_id=rows[0].instance_type_id,
            instance_id=rows[0].instance_id,
            devices=tuple(row.module_id - 1 for row in rows),
        )
        for rows in by_machine
    ]


def _site_of(trays: Sequence[_Tray]) -> str:
    sites = {tray.site_id for tray in trays}
    if len(sites) != 1:
        raise conflict(
            "The partition holds no GPU" if not sites else "The partition holds GPUs of several sites"
        )
    return sites.pop()


class _OwnerMaker:
    """Finds the records of an owner at a site, and creates those that do not exist."""

    def __init__(
        self, conn: sa.Connection, owner: PartitionOwner, site: sa.Row[Any], now: float, ids: IdFactory
    ) -> None:
        self._conn, self._owner, self._site, self._now, self._ids = conn, owner, site, now, ids
        self.created: list[str] = []
        """A description of each record created."""
        if entitlements.find_tenant(conn, owner.org) is None:
            self.created.append(f"tenant {owner.org}")
        self._tenant_id: str = entitlements.ensure_tenant(conn, owner.org, now, ids).id

    def ensure_allocation(self, name: str, trays: Sequence[_Tray]) -> None:
        """Let the tenant have the machines at the site, if its allocations do not hold them."""
        uses = entitlements.allocation_uses(self._conn, self._tenant_id, self._now)
        kept = placement.reserved_trays(self._conn, self._now, [tray.machine_id for tray in trays])
        own = {tray.machine_id for tray in kept.values() if tray.tenant_id == self._tenant_id}
        wanted = Counter(tray.type_id for tray in trays if tray.type_id is not None)
        reserved = Counter(tray.type_id for tray in trays if tray.machine_id in own)
        lacking = {
            type_id: more
            for type_id, count in wanted.items()
            if (more := uses.get(type_id, AllocationUse(None, 0, 0)).lacking(count, reserved[type_id]))
        }
        allowed = has_row(self._conn, allocation, tenant_id=self._tenant_id, site_id=self._site.id)
        if allowed and not lacking:
            return
        given = NewAllocation(self._tenant_id, self._site.id, name, types=lacking)
        entitlements.create_allocation(self._conn, self._site.provider_id, given, self._now, self._ids)
        self.created.append(f"allocation {name}")

    def ensure_logical_partition(self) -> str:
        """The id of the logical partition."""
        name = self._owner.logical_partition
        existing = find_row(self._conn, logical_partition, tenant_id=self._tenant_id, name=name)
        if existing is not None:
            return str(existing.id)
        self.created.append(f"logical partition {name}")
        wanted = NewLogicalPartition(self._site.id, name)
        return logical_partitions.create_logical_partition(
            self._conn, self._tenant_id, wanted, self._now, self._ids
        )

    def ensure_vpc(self) -> sa.Row[Any]:
        """The VPC."""
        key = {"tenant_id": self._tenant_id, "site_id": self._site.id, "name": self._owner.vpc}
        existing = find_row(self._conn, vpc, **key)
        if existing is not None:
            return existing
        self.created.append(f"VPC {self._owner.vpc}")
        wanted = NewVpc(site_id=self._site.id, name=self._owner.vpc)
        new = logical_partitions.create_vpc(self._conn, self._tenant_id, wanted, self._now, self._ids)
        return logical_partitions.get_vpc(self._conn, self._tenant_id, new)

    def create_instances(
        self, trays: Sequence[_Tray], network: sa.Row[Any], partition_id: str
    ) -> frozenset[str]:
        """Put an instance, with GPUs in the logical partition, on each tray. Return the domains to wake."""
        domains: frozenset[str] = frozenset()
        for tray in trays:
            domains |= self._create_instance(tray, network, partition_id)
        if trays:
            self.created.append(f"instances on {', '.join(tray.machine_id for tray in trays)}")
        return domains

    def _create_instance(self, tray: _Tray, network: sa.Row[Any], partition_id: str) -> frozenset[str]:
        conn, name = self._conn, f"adopted-{tray.machine_id}"
        instance_creation.check_instance_name(conn, self._tenant_id, self._site.id, name)
        wanted = tuple(InterfaceSpec(partition_id, device) for device in tray.devices)
        gpus = instance_creation.nvlink_gpus_of_instance(conn, self._site, tray.type_id, tray.machine_id)
        instance_creation.check_interfaces(conn, network, wanted, gpus)
        domain = catalog.domains_of_machines(conn, [tray.machine_id])[tray.machine_id]
        plan = CreationPlan(
            request=InstanceRequest(
                names=(name,),
                vpc_id=network.id,
                instance_type_id=tray.type_id,
                machine_id=tray.machine_id,
                interfaces=wanted,
            ),
            tenant_id=self._tenant_id,
            site_id=self._site.id,
            type_id=tray.type_id,
            assignments=(MachineAssignment(name, tray.machine_id, domain),),
            reason="where the adopted partition holds GPUs",
            interfaces=wanted,
            warnings=(),
        )
        return instance_creation.execute_creation(conn, plan, self._now, self._ids).domains
