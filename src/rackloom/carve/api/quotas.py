"""REST: the quotas of a tenant. It reads them with its use. A provider of its machines sets them."""

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
    """A new limit. Null returns to the default."""

    resource: entitlements.QuotaKind
    limit: Annotated[StrictInt, Field(ge=0, le=1_000_000_000)] | None


class QuotaUpdate(wire.Body):
    """The limits to change. The others stay."""

    quotas: Annotated[list[QuotaChange], Field(max_length=len(entitlements.QuotaKind))]


# Response models.


class Quota(wire.Answer):
    """The limit on a tenant's objects of a kind, and the number that it has."""

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
    """Set limits. A limit below the present number removes nothing, and refuses new objects."""
    entitlements.check_is_tenant_of(conn, entitlements.provider_id_of(conn, caller.org), str(tenant_id))
    limits = {change.resource: change.limit for change in body.quotas}
    entitlements.set_quotas(conn, str(tenant_id), limits, deps.clock())
    return _shapes(conn, str(tenant_id), deps.clock())


def _shapes(conn: sa.Connection, tenant_id: str, now: float) -> list[Json]:
    return [wire.shape(Quota, usage) for usage in entitlements.quotas_of_tenant(conn, tenant_id, now)]
