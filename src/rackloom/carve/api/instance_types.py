"""REST: instance types of a provider, and those that a tenant has an allocation for.

A listing can add the machines of each type and its numbers: assigned, allocated, used and usable
machines.
"""

from functools import partial
from typing import Annotated, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictInt

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import (
    AnySelect,
    Deps,
    Page,
    Params,
    ProviderAdmin,
    ProviderReader,
    Reader,
    Rows,
)
from rackloom.carve.api.wire import Json
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import owned_by, require
from rackloom.carve.store.schema import allocation, allocation_constraint, instance_type, machine, site
from rackloom.carve.tenancy import catalog, entitlements
from rackloom.carve.tenancy.catalog import NewInstanceType

# Query parameters.


CapabilityType = Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"]


# Request models.


class MachineCapability(wire.OpenBody):
    """A capability of the machines of an instance type."""

    type: CapabilityType
    name: wire.Name
    count: Annotated[StrictInt, Field(ge=0, le=1024)] | None = None
    device_type: str | None = None


class InstanceTypeCreate(wire.Body):
    """A new instance type."""

    name: wire.Name
    site_id: UUID
    description: wire.Description | None = None
    labels: wire.Labels = {}
    machine_capabilities: Annotated[list[MachineCapability], Field(max_length=64)] = []


class InstanceTypeUpdate(wire.Body):
    """Changes of an instance type."""

    name: wire.Name | None = None
    description: wire.Description | None = None
    labels: wire.Labels | None = None
    machine_capabilities: Annotated[list[MachineCapability], Field(max_length=64)] | None = None


class MachineAssociation(wire.Body):
    """Machines to assign to an instance type."""

    machine_ids: Annotated[list[str], Field(min_length=1, max_length=1024)]


TypeStatus = Literal["Pending", "Registering", "Ready", "Deleting", "Error"]


MachinesFlag = Annotated[
    bool | None, Field(json_schema_extra=access.shows("machines:read", providers_only=True))
]


class InstanceTypeIncludes(wire.RelationQuery):
    """Details to add to an instance type."""

    include_machine_assignment: MachinesFlag = None
    include_machine_association: MachinesFlag = None
    include_allocation_stats: Annotated[bool, Field(json_schema_extra=access.shows("allocations:read"))] = (
        False
    )


NOTHING_MORE = InstanceTypeIncludes()


class InstanceTypeQuery(wire.PageQuery, InstanceTypeIncludes):
    """Filters on instance types."""

    site_id: UUID | None = None
    infrastructure_provider_id: UUID | None = None
    tenant_id: UUID | None = None
    status: TypeStatus | None = None
    query: wire.Text | None = None
    exclude_unallocated: bool = False


class AssociationQuery(wire.PageQuery, wire.RelationQuery):
    """A page of the machines of an instance type."""


# Response models.


class Capability(wire.Answer):
    """A capability of the machines of an instance type."""

    type: CapabilityType
    name: str
    count: int | None = None
    device_type: Literal["DPU", "NVLink"] | None = None


class MachineAssociationAnswer(wire.Timed):
    """A machine of an instance type. The id of the association is that of the machine."""

    machine_id: str
    instance_type_id: UUID


class AllocationStats(wire.Answer):
    """The numbers of machines of an instance type, by use."""

    assigned: Annotated[int | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    total: int
    used: int
    unused: int
    unused_usable: int
    max_allocatable: Annotated[int | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]


class InstanceType(wire.Timed):
    """An instance type."""

    id: UUID
    name: str
    description: str | None
    site_id: UUID
    infrastructure_provider_id: UUID
    labels: dict[str, str]
    machine_capabilities: list[Capability]
    status: TypeStatus
    status_history: list[wire.StatusDetail]
    machine_instance_types: Annotated[
        list[MachineAssociationAnswer] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)
    ] = None
    allocation_stats: AllocationStats | None = None


# From rows to responses.


def _type_shapes(conn: sa.Connection, rows: Rows, query: InstanceTypeIncludes, now: float) -> list[Json]:
    """Instance types (rows of `_types`), with the machines and the numbers of each when wanted.

    The provider of a type sees its machines and the numbers of all tenants. A tenant sees its own numbers.
    """
    histories = journal.status_histories(conn, [row.id for row in rows])
    shapes = {
        row.id: wire.shape(
            InstanceType,
            row,
            infrastructure_provider_id=row.provider_id,
            machine_capabilities=row.capabilities,
            status_history=routing.status_history_shape(histories[row.id]),
        )
        for row in rows
    }
    if query.include_machine_assignment:
        _add_machine_associations(conn, {row.id: shapes[row.id] for row in rows if row.is_provided})
    if query.include_allocation_stats:
        for is_provided, tenant_id in {(row.is_provided, row.reader) for row in rows}:
            chosen = [row.id for row in rows if row.is_provided == is_provided]
            stats = catalog.instance_type_stats(conn, chosen, None if is_provided else tenant_id, now)
            for type_id, numbers in stats.items():
                shapes[type_id]["allocationStats"] = {
                    "assigned": numbers.machines if is_provided else None,
                    "total": numbers.allocated,
                    "used": numbers.used,
                    "unused": numbers.promised,
                    "unusedUsable": min(numbers.promised, numbers.usable),
                    "maxAllocatable": max(0, numbers.machines - numbers.used - numbers.promised)
                    if is_provided
                    else None,
                }
    found = list(shapes.values())
    routing.add_relations(conn, found, query.relations("InfrastructureProvider", "Site"))
    return found


def _association_shapes(conn: sa.Connection, rows: Rows, query: wire.RelationQuery) -> list[Json]:
    shapes = [wire.shape(MachineAssociationAnswer, row, machine_id=row.id) for row in rows]
    routing.add_relations(conn, shapes, query.relations("Machine", "InstanceType"))
    return shapes


def _add_machine_associations(conn: sa.Connection, shapes: dict[str, Json]) -> None:
    for shape in shapes.values():
        shape["machineInstanceTypes"] = []
    wanted = sa.select(machine).where(machine.c.instance_type_id.in_(shapes)).order_by(machine.c.id)
    for association in _association_shapes(conn, conn.execute(wanted).all(), routing.NO_QUERY):
        shapes[association["instanceTypeId"]]["machineInstanceTypes"].append(association)


# Routes.


router = routing.Operations()

ONE = "/instance/type/{instanceTypeId}"
TypeId = Annotated[UUID, Path(alias="instanceTypeId")]


@router.page("/instance/type", "get-all-instance-type", list[InstanceType])
def list_types(conn: sa.Connection, deps: Deps, caller: Reader, query: Params[InstanceTypeQuery]) -> Page:
    """The instance types that the caller may see."""
    provider_id, own_tenant_id = routing.provider_and_tenant(conn, caller)
    visible = _types(provider_id, own_tenant_id)
    if query.tenant_id is not None or query.exclude_unallocated:
        tenant_id = None if query.tenant_id is None else str(query.tenant_id)
        given = sa.exists().where(allocation_constraint.c.instance_type_id == instance_type.c.id)
        visible = visible.where(given if tenant_id is None else instance_type.c.id.in_(_allocated(tenant_id)))
        if tenant_id not in (None, own_tenant_id):
            # Only a type's provider and the tenant concerned may know that the tenant was given it.
            visible = visible.where(site.c.provider_id == provider_id)
    listing = routing.Listing(
        shapes=partial(_type_shapes, now=deps.clock()), order=ORDER, filters=FILTERS, searched=SEARCHED
    )
    return listing.page(conn, visible, query)


@router.create("/instance/type", "create-instance-type", InstanceType)
def create_type(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: InstanceTypeCreate) -> Json:
    """Create an instance type."""
    capabilities = _stored_capabilities(body.machine_capabilities)
    wanted = NewInstanceType(str(body.site_id), body.name, body.description, body.labels, capabilities)
    provider_id = entitlements.provider_id_of(conn, caller.org)
    new = catalog.create_instance_type(conn, provider_id, wanted, deps.clock(), deps.ids)
    return get_type(conn, deps, caller, UUID(new), NOTHING_MORE)


@router.get(ONE, "get-instance-type", InstanceType)
def get_type(
    conn: sa.Connection,
    deps: Deps,
    caller: Reader,
    type_id: TypeId,
    query: Params[InstanceTypeIncludes],
) -> Json:
    """One instance type."""
    visible = _types(*routing.provider_and_tenant(conn, caller))
    mine = visible.where(instance_type.c.id == str(type_id))
    row = require(conn.execute(mine).one_or_none(), "Could not find Instance Type with specified ID")
    return _type_shapes(conn, [row], query, deps.clock())[0]


@router.patch(ONE, "update-instance-type", InstanceType)
def update_type(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, type_id: TypeId, body: InstanceTypeUpdate
) -> Json:
    """Change an instance type."""
    capabilities = body.machine_capabilities
    catalog.update_instance_type(
        conn,
        entitlements.provider_id_of(conn, caller.org),
        str(type_id),
        name=body.name,
        description=body.description,
        labels=body.labels,
        capabilities=None if capabilities is None else _stored_capabilities(capabilities),
        now=deps.clock(),
    )
    return get_type(conn, deps, caller, type_id, NOTHING_MORE)


@router.delete(ONE, "delete-instance-type")
def delete_type(conn: sa.Connection, caller: ProviderAdmin, type_id: TypeId) -> None:
    """Delete an instance type that nothing refers to."""
    catalog.delete_instance_type(conn, entitlements.provider_id_of(conn, caller.org), str(type_id))


@router.page(f"{ONE}/machine", "get-instance-type-machine-association", list[MachineAssociationAnswer])
def list_machines(
    conn: sa.Connection, caller: ProviderReader, type_id: TypeId, query: Params[AssociationQuery]
) -> Page:
    """The machines of an instance type."""
    return ASSOCIATIONS.page(conn, _associations(conn, caller, type_id), query)


@router.create(f"{ONE}/machine", "create-instance-type-machine-association", list[MachineAssociationAnswer])
def assign_machines(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, type_id: TypeId, body: MachineAssociation
) -> list[Json]:
    """Assign machines of the site to this type."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    catalog.assign_machines_to_type(conn, provider_id, str(type_id), body.machine_ids, deps.clock())
    chosen = _associations(conn, caller, type_id).where(machine.c.id.in_(body.machine_ids))
    return _association_shapes(conn, conn.execute(chosen.order_by(machine.c.id)).all(), routing.NO_QUERY)


@router.delete(f"{ONE}/machine/{{machineAssociationId}}", "delete-instance-type-machine-association")
def remove_machine(
    conn: sa.Connection,
    deps: Deps,
    caller: ProviderAdmin,
    type_id: TypeId,
    machine_id: Annotated[str, Path(alias="machineAssociationId", max_length=64, pattern=wire.NO_NUL)],
) -> None:
    """Take an empty machine out of the type."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    catalog.remove_machine_from_type(conn, provider_id, str(type_id), machine_id, deps.clock())


def _types(provider_id: str, tenant_id: str) -> AnySelect:
    """The visible types, whether the reader provides each, and as which tenant it reads the others."""
    is_provided = (site.c.provider_id == provider_id).label("is_provided")
    return (
        sa.select(instance_type, site.c.provider_id, is_provided, sa.literal(tenant_id).label("reader"))
        .join(site, site.c.id == instance_type.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, instance_type.c.id.in_(_allocated(tenant_id))))
    )


def _allocated(tenant_id: str) -> sa.Select[tuple[str]]:
    """Types that a tenant has an allocation for."""
    found = sa.select(allocation_constraint.c.instance_type_id).join(
        allocation, allocation.c.id == allocation_constraint.c.allocation_id
    )
    return found.where(owned_by(allocation.c.tenant_id, tenant_id))


def _stored_capabilities(capabilities: list[MachineCapability]) -> list[Json]:
    return [
        capability.model_dump(mode="json", by_alias=True, exclude_none=True) for capability in capabilities
    ]


def _associations(conn: sa.Connection, caller: Caller, type_id: UUID) -> AnySelect:
    catalog.instance_type_of_provider(conn, entitlements.provider_id_of(conn, caller.org), str(type_id))
    return sa.select(machine).where(machine.c.instance_type_id == str(type_id))


ORDER = routing.order_of(instance_type, "name", "status")
FILTERS = {
    "site_id": instance_type.c.site_id,
    "infrastructure_provider_id": site.c.provider_id,
    "status": instance_type.c.status,
}
SEARCHED = (instance_type.c.name, instance_type.c.description, instance_type.c.status)
ASSOCIATIONS = routing.Listing(shapes=_association_shapes, order=routing.order_of(machine))
