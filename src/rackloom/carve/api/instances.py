"""REST: instances. Create one or a batch, with dry run. Read, change, release. Status history.

Every route runs one transaction. A create plans and executes in the same transaction, and returns the
warnings of the plan. A dry run returns the plan and writes nothing. A create that names a plan (`ifPlan`) is
refused if the present state of the site leads to another one. The transaction that would write it decides.
`nvLinkInterfaces` in a PATCH replaces the whole list.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import Path
from fastapi import Query as QueryParam
from pydantic import Field, IPvAnyAddress
from starlette.responses import Response

from rackloom.carve.api import routing
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.instance_wire import (
    INSTANCE_LISTING,
    Instance,
    InstanceBatchCreate,
    InstanceCreate,
    InstancePlan,
    InstanceStatus,
    InstanceUpdate,
    KeptInterface,
    KeptInterfaceQuery,
    instance_shapes,
    interface_specs,
    kept_interface_shapes,
    plan_shape,
    warning_shapes,
)
from rackloom.carve.api.routing import NO_QUERY, ApiDeps, Deps, DryRun, Page, Params, Row, TenantAdmin
from rackloom.carve.api.wire import (
    Json,
    PageQuery,
    RelationQuery,
    StatusDetail,
    Text,
    TextFilter,
    UuidFilter,
)
from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import PreparedStatement, owned_by
from rackloom.carve.store.schema import instance as table
from rackloom.carve.store.schema import instance_type, site, tenant
from rackloom.carve.store.values import Changed, Status
from rackloom.carve.tenancy import entitlements, instance_creation, instances, outdated
from rackloom.carve.tenancy.instance_creation import CreationPlan, InstanceRequest

# Query parameters.


IfPlan = Annotated[str | None, QueryParam(alias="ifPlan", max_length=64)]
"""The `planId` of a dry run. The request is refused if its plan would differ now."""


class InstanceQuery(PageQuery, RelationQuery):
    """Filters on instances."""

    infrastructure_provider_id: UUID | None = None
    site_id: UuidFilter = []
    vpc_id: UuidFilter = []
    instance_type_id: UuidFilter = []
    operating_system_id: UuidFilter = []
    network_security_group_id: UuidFilter = []
    machine_id: TextFilter = []
    name: Text | None = None
    status: list[InstanceStatus | Literal["Terminated", "Unknown"]] = []
    ip_address: Annotated[list[IPvAnyAddress], Field(max_length=100)] = []
    query: Text | None = None


# Routes.


router = routing.Operations("/instance")

T = TypeVar("T")
InstanceId = Annotated[UUID, Path(alias="instanceId")]

_OPERATING_SYSTEM = table.c.extra["operatingSystemId"].as_string()
_SECURITY_GROUP = table.c.extra["networkSecurityGroupId"].as_string()
_OF_TENANT = INSTANCE_LISTING.where(owned_by(table.c.tenant_id, sa.bindparam("tenant")))
_BY_ID = PreparedStatement(INSTANCE_LISTING.where(table.c.id == sa.bindparam("wanted")))
_BY_IDS = INSTANCE_LISTING.where(table.c.id.in_(sa.bindparam("ids", expanding=True)))


@router.page("", "get-all-instance", list[Instance])
def list_all(conn: sa.Connection, deps: Deps, caller: TenantAdmin, query: Params[InstanceQuery]) -> Page:
    """The tenant's instances."""
    domains = latest.outdated_domains(conn, deps.valid_from())
    status = outdated.shown_status_column(table, domains)
    visible = routing.filter_rows(_OF_TENANT, (status, _stored_statuses(query.status)))
    if query.ip_address:
        # The interfaces are stored as they came, so an address is searched as a whole JSON string.
        kept = sa.cast(table.c.extra["interfaces"], sa.Text)
        wanted = (kept.contains(f'"{address}"', autoescape=True) for address in query.ip_address)
        visible = visible.where(sa.or_(*wanted))
    listing = msgspec.structs.replace(LISTING, shapes=partial(instance_shapes, domains=domains))
    listing = listing.by(status, instead_of=table.c.status)
    tenant_id = entitlements.tenant_id_of(conn, caller.org)
    # Prepared pages need the same order each time, but outdated domains change the order by status.
    is_same = visible is _OF_TENANT and not domains
    kind = entitlements.QuotaKind.INSTANCES
    total = partial(entitlements.count_objects, conn, tenant_id, kind) if is_same else None
    return listing.page(conn, visible, query, total, tenant=tenant_id)


@router.create("", "create-instance", Instance, plan=InstancePlan)
async def create(
    deps: Deps, caller: TenantAdmin, body: InstanceCreate, dry_run: DryRun = False, if_plan: IfPlan = None
) -> Response:
    """Create an instance. A dry run only plans it."""

    def plan(conn: sa.Connection) -> CreationPlan:
        request = _request(body, (body.name,), machine_id=body.machine_id)
        tenant = entitlements.get_tenant(conn, caller.org)
        planned = instance_creation.plan_creation(conn, tenant, request, deps.clock())
        instance_creation.check_same_plan(planned, if_plan)
        return planned

    if dry_run:
        return routing.json_response(plan_shape(await deps.store.read(plan)))
    return routing.created_response((await deps.change(lambda conn: _make(conn, deps, plan(conn))))[0])


@router.create("/batch", "batch-create-instance", list[Instance], plan=InstancePlan)
async def create_batch(
    deps: Deps,
    caller: TenantAdmin,
    body: InstanceBatchCreate,
    dry_run: DryRun = False,
    if_plan: IfPlan = None,
) -> Response:
    """Create several instances, all or none. A dry run only plans them."""
    batch_id = deps.ids()[:6]

    def plan(conn: sa.Connection) -> CreationPlan:
        tenant = entitlements.get_tenant(conn, caller.org)
        instance_creation.check_batch_size(conn, tenant.id, str(body.vpc_id), body.count)
        names = tuple(f"{body.name_prefix}-{batch_id}-{number}" for number in range(1, body.count + 1))
        request = _request(body, names, one_domain=body.topology_optimized)
        planned = instance_creation.plan_creation(conn, tenant, request, deps.clock())
        instance_creation.check_same_plan(planned, if_plan)
        return planned

    if dry_run:
        return routing.json_response(plan_shape(await deps.store.read(plan)))
    return routing.created_response(await deps.change(lambda conn: _make(conn, deps, plan(conn))))


@router.get("/{instanceId}", "get-instance", Instance)
def get(
    conn: sa.Connection,
    deps: Deps,
    caller: TenantAdmin,
    instance_id: InstanceId,
    query: Params[RelationQuery],
) -> Json:
    """One instance."""
    instances.get_instance(conn, entitlements.tenant_id_of(conn, caller.org), str(instance_id))
    rows = _BY_ID.all(conn, {"wanted": str(instance_id)})
    return instance_shapes(conn, rows, query, latest.outdated_domains(conn, deps.valid_from()))[0]


@router.patch("/{instanceId}", "update-instance", Instance)
def update(
    conn: sa.Connection, deps: Deps, caller: TenantAdmin, instance_id: InstanceId, body: InstanceUpdate
) -> Changed[Json]:
    """Change an instance. `nvLinkInterfaces` replaces the whole list."""
    changed = instances.update_instance(
        conn,
        entitlements.tenant_id_of(conn, caller.org),
        str(instance_id),
        name=body.name,
        description=body.description,
        wanted=interface_specs(body.nvlink_interfaces),
        extra=body.extra,
        now=deps.clock(),
        ids=deps.ids,
    )
    shown = get(conn, deps, caller, instance_id, NO_QUERY)
    row = instances.get_instance(conn, shown["tenantId"], str(instance_id))
    shown["warnings"] = warning_shapes(instances.warnings_of_instance(conn, row))
    return Changed(shown, changed.domains)


@router.delete("/{instanceId}", "delete-instance")
def delete(conn: sa.Connection, deps: Deps, caller: TenantAdmin, instance_id: InstanceId) -> Changed[None]:
    """Release an instance."""
    return instances.delete_instance(
        conn, entitlements.tenant_id_of(conn, caller.org), str(instance_id), deps.clock()
    )


@router.page("/{instanceId}/status-history", "get-instance-status-history", list[StatusDetail])
def get_history(
    conn: sa.Connection, deps: Deps, caller: TenantAdmin, instance_id: InstanceId, query: Params[PageQuery]
) -> list[Json]:
    """The status history of the instance, newest first."""
    row, domains = _row(conn, caller, instance_id), latest.outdated_domains(conn, deps.valid_from())
    doubt = outdated.machine_doubts(conn, [row.machine_id], domains).get(row.machine_id)
    past = journal.status_histories(conn, [row.id])[row.id]
    return routing.status_history_shape(outdated.shown_history(row.id, row.status, past, doubt))


@router.page("/{instanceId}/interface", "get-all-interface", list[KeptInterface])
def list_network(
    conn: sa.Connection, caller: TenantAdmin, instance_id: InstanceId, query: Params[KeptInterfaceQuery]
) -> list[Json]:
    """The network interfaces of the instance, as they were requested."""
    return kept_interface_shapes(conn, _row(conn, caller, instance_id), "interfaces", query)


@router.page(
    "/{instanceId}/infiniband-interface", "get-all-instance-infiniband-interface", list[KeptInterface]
)
def list_infiniband(
    conn: sa.Connection, caller: TenantAdmin, instance_id: InstanceId, query: Params[KeptInterfaceQuery]
) -> list[Json]:
    """The InfiniBand interfaces of the instance, as they were requested."""
    return kept_interface_shapes(conn, _row(conn, caller, instance_id), "infinibandInterfaces", query)


def _request(
    body: InstanceCreate | InstanceBatchCreate,
    names: tuple[str, ...],
    *,
    machine_id: str | None = None,
    one_domain: bool = True,
) -> InstanceRequest:
    return InstanceRequest(
        names=names,
        vpc_id=str(body.vpc_id),
        instance_type_id=None if body.instance_type_id is None else str(body.instance_type_id),
        machine_id=machine_id,
        interfaces=interface_specs(body.nvlink_interfaces),
        one_domain=one_domain,
        same_domain=body.require_same_domain,
        allow_unhealthy=body.allow_unhealthy_machine,
        description=body.description,
        extra=body.extra,
    )


def _make(conn: sa.Connection, deps: ApiDeps, planned: CreationPlan) -> Changed[list[Json]]:
    made = instance_creation.execute_creation(conn, planned, deps.clock(), deps.ids)
    rows = {row.id: row for row in conn.execute(_BY_IDS, {"ids": list(made.value)})}
    # An instance that was just made is not Ready, so its status cannot be outdated.
    found = instance_shapes(conn, [rows[new] for new in made.value], NO_QUERY, {})
    warnings = warning_shapes(planned.warnings)
    return Changed([{**shape, "warnings": warnings} for shape in found], made.domains)


def _stored_statuses(shown: Sequence[str]) -> list[str]:
    """The stored statuses that the API shows as one of `shown`."""
    return [*shown, Status.UNKNOWN] if routing.shown_instance_status(Status.UNKNOWN) in shown else [*shown]


def _order() -> dict[str, sa.ColumnElement[Any]]:
    """The names of joined objects are known here, except those of security groups, which have ids only."""
    org = sa.select(tenant.c.org).where(tenant.c.id == table.c.tenant_id)
    kind = sa.select(instance_type.c.name).where(instance_type.c.id == table.c.instance_type_id)
    infiniband = sa.func.coalesce(sa.cast(table.c.extra["infinibandInterfaces"], sa.Text), "null")
    return {
        "TENANT_ORG_DISPLAY_NAME": org.scalar_subquery(),
        "INSTANCE_TYPE_NAME": kind.scalar_subquery(),
        "HAS_INFINIBAND": infiniband.not_in(("[]", "null")),
        "NETWORK_SECURITY_GROUP_NAME": _SECURITY_GROUP,
        **routing.order_of(table, "name", "status", "machine_id"),
    }


LISTING = routing.Listing(
    shapes=partial(instance_shapes, domains={}),
    order=_order(),
    filters={
        "name": table.c.name,
        "infrastructure_provider_id": site.c.provider_id,
        "site_id": table.c.site_id,
        "vpc_id": table.c.vpc_id,
        "instance_type_id": table.c.instance_type_id,
        "machine_id": table.c.machine_id,
        "operating_system_id": _OPERATING_SYSTEM,
        "network_security_group_id": _SECURITY_GROUP,
    },
    searched=(table.c.name, table.c.description, table.c.status),
)


def _row(conn: sa.Connection, caller: Caller, instance_id: UUID) -> Row:
    return instances.get_instance(conn, entitlements.tenant_id_of(conn, caller.org), str(instance_id))
