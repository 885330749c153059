"""REST: the quotas of a tenant, which reads them with what it uses. A provider of its machines sets them."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictInt

from rackloom.carve.api import routing, wire
from rackloom.carve.api.routing import Deps, ProviderAdmin, ProviderReader, TenantAdmin
from rackloom.carve.api.wire import Json
from rackloom.carve.tenancy import entitlements

# Request models.


class QuotaChange(wire.Body):
    """Another limit; null returns to the default."""

    resource: entitlements.QuotaKind
    limit: Annotated[StrictInt, Field(ge=0, le=1_000_000_000)] | None


class QuotaUpdate(wire.Body):
    """The limits to change; the others stay."""

    quotas: Annotated[list[QuotaChange], Field(max_length=len(entitlements.QuotaKind))]


# Response models.


class Quota(wire.Answer):
    """How many objects of a kind a tenant may have, and has."""

    resource: entitlements.QuotaKind
    limit: int
    used: int


# Routes.


router = routing.Operations()

OF_TENANT = "/tenant/{tenantId}/quota"
TenantId = Annotated[UUID, Path(alias="tenantId")]


@router.get("/tenant/current/quota", "get-current-tenant-quota", list[Quota])
def read_own(conn: sa.Connection, deps: Deps, caller: TenantAdmin) -> list[Json]:
    """The caller's quotas."""
    return _shapes(conn, entitlements.tenant_id_of(conn, caller.org), deps.clock())


@router.get(OF_TENANT, "get-tenant-quota", list[Quota])
def read_of_tenant(
    conn: sa.Connection, deps: Deps, caller: ProviderReader, tenant_id: TenantId
) -> list[Json]:
    """The quotas of a tenant that has an allocation at a site of the caller."""
    entitlements.check_is_tenant_of(conn, entitlements.provider_id_of(conn, caller.org), str(tenant_id))
    return _shapes(conn, str(tenant_id), deps.clock())


@router.patch(OF_TENANT, "update-tenant-quota", list[Quota])
def update(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, tenant_id: TenantId, body: QuotaUpdate
) -> list[Json]:
    """Set limits. One below what the tenant has takes nothing away, and refuses anything new."""
    entitlements.check_is_tenant_of(conn, entitlements.provider_id_of(conn, caller.org), str(tenant_id))
    limits = {change.resource: change.limit for change in body.quotas}
    entitlements.set_quotas(conn, str(tenant_id), limits, deps.clock())
    return _shapes(conn, str(tenant_id), deps.clock())


def _shapes(conn: sa.Connection, tenant_id: str, now: float) -> list[Json]:
    return [wire.shape(Quota, usage) for usage in entitlements.quotas_of_tenant(conn, tenant_id, now)]
