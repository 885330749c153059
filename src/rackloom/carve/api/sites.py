"""REST: sites of a provider, and those at which a tenant has an allocation.

A provider changes the description of a site and switches its capabilities. Contact, location and serial
console settings are stored and returned, and nothing acts on them.
"""

from typing import Annotated, Any, Self
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictBool, StrictInt
from pydantic import model_validator as validator

from rackloom.carve.api import access, machines, renames, routing, statistics, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import AnySelect, Deps, Page, Params, ProviderAdmin, Reader, Row, Rows
from rackloom.carve.api.wire import Json
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import owned_by, require
from rackloom.carve.store.schema import allocation, provider, site
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import catalog, entitlements
from rackloom.carve.tenancy.catalog import SITE_CAPABILITIES

# Request models.


class SiteCapabilities(wire.Body):
    """Capabilities to switch on or off. Omitted ones stay unchanged."""

    native_networking: StrictBool | None = None
    network_security_group: StrictBool | None = None
    nvlink_partition: StrictBool | None = Field(None, alias="nvLinkPartition")
    flow: StrictBool | None = None
    image_based_operating_system: StrictBool | None = None


class SiteLocation(wire.Body):
    """The location of a site."""

    city: wire.Label | None = None
    state: wire.Label | None = None
    country: wire.Label | None = None


class SiteContact(wire.Body):
    """The contact of a site."""

    email: wire.Label | None = None


Seconds = Annotated[StrictInt, Field(ge=0, le=1_000_000_000)]


class SiteUpdate(wire.Body):
    """Changes of a site. Omitted fields stay unchanged. Nothing acts on the serial console settings."""

    name: wire.Name | None = None
    description: wire.Description | None = None
    capabilities: SiteCapabilities | None = None
    location: SiteLocation | None = None
    contact: SiteContact | None = None
    serial_console_hostname: wire.Label | None = None
    is_serial_console_enabled: StrictBool | None = None
    serial_console_idle_timeout: Seconds | None = None
    serial_console_max_session_length: Seconds | None = None
    is_serial_console_ssh_keys_enabled: StrictBool | None = Field(None, alias="isSerialConsoleSSHKeysEnabled")
    renew_registration_token: StrictBool = False

    @validator(mode="after")
    def _no_registration(self) -> Self:
        if self.renew_registration_token:
            raise ValueError("renewRegistrationToken must be false: sites register with no token here")
        return self

    @property
    def kept(self) -> dict[str, Any]:
        """The fields that are only stored and returned."""
        ours = {"name", "description", "capabilities", "renew_registration_token"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


# Query parameters.


class SiteQuery(wire.PageQuery, wire.RelationQuery):
    """Filters on sites."""

    infrastructure_provider_id: UUID | None = None
    is_native_networking_enabled: bool | None = None
    is_network_security_group_enabled: bool | None = None
    is_nvlink_partition_enabled: bool | None = Field(None, alias="isNVLinkPartitionEnabled")
    is_flow_enabled: bool | None = None
    is_rack_level_administration_enabled: bool | None = None
    tenant_id: wire.UuidFilter = []
    status: list[wire.SiteStatus] = []
    query: wire.Text | None = None
    include_machine_stats: Annotated[
        bool, Field(json_schema_extra=access.shows("machines:read", providers_only=True))
    ] = False
    include_gpu_stats: Annotated[
        bool, Field(json_schema_extra=access.shows("machines:read", providers_only=True))
    ] = False


# Response models.


class SiteCapabilitiesAnswer(wire.Answer):
    """The capabilities of a site."""

    native_networking: bool
    network_security_group: bool
    nvlink_partition: bool = Field(alias="nvLinkPartition")
    flow: bool
    image_based_operating_system: bool


class Site(wire.Timed):
    """A site."""

    id: UUID
    name: str
    description: str | None
    org: str
    infrastructure_provider_id: UUID
    is_online: bool
    capabilities: SiteCapabilitiesAnswer
    status: wire.SiteStatus
    status_history: list[wire.StatusDetail]
    machine_stats: Annotated[
        statistics.MachineStats | None, Field(json_schema_extra=access.PROVIDERS_ONLY)
    ] = None
    gpu_stats: Annotated[list[machines.GpuStats] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)] = (
        None
    )


# From rows to responses.


def _capabilities_shape(kept: Json) -> Json:
    switched = {name: bool(kept.get(name)) for name in SITE_CAPABILITIES}
    return renames.write_answer(SiteCapabilitiesAnswer, switched)


def _shapes(conn: sa.Connection, rows: Rows, query: wire.RelationQuery) -> list[Json]:
    histories = journal.status_histories(conn, [row.id for row in rows])
    orgs = entitlements.orgs_by_id(conn, provider, {row.provider_id for row in rows})
    shapes = [
        row.extra
        | wire.shape(
            Site,
            row,
            org=orgs[row.provider_id],
            infrastructure_provider_id=row.provider_id,
            is_online=row.status == Status.REGISTERED,
            capabilities=_capabilities_shape(row.capabilities),
            status_history=routing.status_history_shape(histories[row.id]),
        )
        for row in rows
    ]
    routing.add_relations(conn, shapes, query.relations("InfrastructureProvider"))
    return shapes


# Routes.


router = routing.Operations()

SiteId = Annotated[UUID, Path(alias="siteId")]


@router.page("/site", "get-all-site", list[Site])
def list_sites(conn: sa.Connection, deps: Deps, caller: Reader, query: Params[SiteQuery]) -> Page:
    """The sites that the caller may see."""
    visible = _sites(conn, caller)
    if query.tenant_id:
        visible = visible.where(_given_to(conn, caller, [str(tenant_id) for tenant_id in query.tenant_id]))
    for capability, wanted in (
        ("nativeNetworking", query.is_native_networking_enabled),
        ("networkSecurityGroup", query.is_network_security_group_enabled),
        ("nvLinkPartition", query.is_nvlink_partition_enabled),
        ("flow", query.is_flow_enabled),
    ):
        if wanted is not None:
            enabled = sa.func.coalesce(site.c.capabilities[capability].as_boolean(), sa.false())
            visible = visible.where(enabled == wanted)
    shapes, total = LISTING.page(conn, visible, query)
    # Add the requested numbers to the sites of the caller's own provider.
    provider_id, _ = routing.provider_and_tenant(conn, caller)
    own = {shape["id"]: shape for shape in shapes if shape["infrastructureProviderId"] == provider_id}
    if query.include_machine_stats:
        for site_id, numbers in statistics.machine_stats(conn, own, deps.valid_from()).items():
            own[site_id]["machineStats"] = numbers
    if query.include_gpu_stats:
        for site_id, shape in own.items():
            shape["gpuStats"] = machines.gpu_stats_shapes(conn, caller, site_id)
    return shapes, total


@router.get("/site/{siteId}", "get-site", Site)
def get_site(conn: sa.Connection, caller: Reader, site_id: SiteId, query: Params[wire.RelationQuery]) -> Json:
    """One site."""
    return _shapes(conn, [_row(conn, caller, site_id)], query)[0]


@router.patch("/site/{siteId}", "update-site", Site)
def update_site(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, site_id: SiteId, body: SiteUpdate
) -> Json:
    """Change the description of a site, or switch its capabilities."""
    catalog.update_site(
        conn,
        entitlements.provider_id_of(conn, caller.org),
        str(site_id),
        name=body.name,
        description=body.description,
        capabilities={} if body.capabilities is None else body.capabilities.model_dump(by_alias=True),
        extra=body.kept,
        now=deps.clock(),
    )
    return get_site(conn, caller, site_id, routing.NO_QUERY)


@router.page("/site/{siteId}/status-history", "get-site-status-history", list[wire.StatusDetail])
def get_history(
    conn: sa.Connection, caller: Reader, site_id: SiteId, query: Params[wire.PageQuery]
) -> list[Json]:
    """The status history of the site, newest first."""
    return routing.history(conn, _row(conn, caller, site_id).id)


def _sites(conn: sa.Connection, caller: Caller) -> AnySelect:
    provider_id, tenant_id = routing.provider_and_tenant(conn, caller)
    allocated = sa.select(allocation.c.site_id).where(owned_by(allocation.c.tenant_id, tenant_id))
    return sa.select(site).where(sa.or_(site.c.provider_id == provider_id, site.c.id.in_(allocated)))


def _given_to(conn: sa.Connection, caller: Caller, tenant_ids: list[str]) -> sa.ColumnElement[bool]:
    """Sites of which one of the tenants has an allocation, as far as the caller may know that."""
    provider_id, own = routing.provider_and_tenant(conn, caller)
    given = sa.select(allocation.c.site_id).where(allocation.c.tenant_id.in_(tenant_ids))
    known = sa.true() if own in tenant_ids else site.c.provider_id == provider_id
    return sa.and_(site.c.id.in_(given), known)


def _row(conn: sa.Connection, caller: Caller, site_id: UUID) -> Row:
    row = conn.execute(_sites(conn, caller).where(site.c.id == str(site_id))).one_or_none()
    return require(row, "Could not find Site with specified ID")


LISTING = routing.Listing(
    shapes=_shapes,
    order=routing.order_of(site, "name", "status", "description")
    | {name.upper(): sa.cast(site.c.extra[name], sa.Text) for name in ("location", "contact")},
    filters={"status": site.c.status, "infrastructure_provider_id": site.c.provider_id},
    searched=(site.c.name, site.c.description, site.c.status),
)
