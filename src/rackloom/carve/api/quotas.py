"""REST: the quotas of a tenant, which reads them with what it uses. A provider of its machines sets them."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictInt
from starlette.responses import Response

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


router = routing.operations()

OF_TENANT = "/tenant/{tenantId}/quota"
TenantId = Annotated[UUID, Path(alias="tenantId")]


@router.get("/tenant/current/quota", operation_id="get-current-tenant-quota", response_model=list[Quota])
async def read_own(deps: Deps, caller: TenantAdmin) -> Response:
    """The caller's quotas."""

    def read(conn: sa.Connection) -> list[Json]:
        return _shapes(conn, entitlements.tenant_id_of(conn, caller.org), deps.clock())

    return routing.json_response(await deps.store.read(read))


@router.get(OF_TENANT, operation_id="get-tenant-quota", response_model=list[Quota])
async def read_of_tenant(deps: Deps, caller: ProviderReader, tenant_id: TenantId) -> Response:
    """The quotas of a tenant that has an allocation at a site of the caller."""

    def read(conn: sa.Connection) -> list[Json]:
        entitlements.check_is_tenant_of(conn, entitlements.provider_id_of(conn, caller.org), str(tenant_id))
        return _shapes(conn, str(tenant_id), deps.clock())

    return routing.json_response(await deps.store.read(read))


@router.patch(OF_TENANT, operation_id="update-tenant-quota", response_model=list[Quota])
async def update(deps: Deps, caller: ProviderAdmin, tenant_id: TenantId, body: QuotaUpdate) -> Response:
    """Set limits. One below what the tenant has takes nothing away, and refuses anything new."""

    def update(conn: sa.Connection) -> list[Json]:
        entitlements.check_is_tenant_of(conn, entitlements.provider_id_of(conn, caller.org), str(tenant_id))
        limits = {change.resource: change.limit for change in body.quotas}
        entitlements.set_quotas(conn, str(tenant_id), limits, deps.clock())
        return _shapes(conn, str(tenant_id), deps.clock())

    return routing.json_response(await deps.store.run(update))


def _shapes(conn: sa.Connection, tenant_id: str, now: float) -> list[Json]:
    return [wire.shape(Quota, usage) for usage in entitlements.quotas_of_tenant(conn, tenant_id, now)]
