"""Who am I here: the tenant and the provider of the calling org, and the version of the service."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.answers import Metadata, Org, ServiceAccount, Tenant
from rackloom.carve.api.deps import Anyone, Deps, ProviderReader, TenantAdmin
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, times
from rackloom.carve.site import tenants
from rackloom.carve.site.knowledge import moment

router = APIRouter()

CONTRACT = "1.6.0"
"""The version of NVIDIA Infra Controller's REST contract that is kept here.

Its client libraries read the features of a service from this, and refuse to speak to one before 0.2.86.
"""


@router.get("/metadata", operation_id="get-metadata", response_model=Metadata)
async def metadata(_caller: Anyone) -> Response:
    """Which version of the contract the service keeps, and which build of it this is."""
    build = {"buildTime": moment(_build_time()), "implementation": f"rackloom {version('rackloom')}"}
    return respond.ok({"version": CONTRACT, **build})


@router.get("/tenant/current", operation_id="get-current-tenant", response_model=Tenant)
async def tenant(deps: Deps, caller: TenantAdmin) -> Response:
    """The tenant of the org, made by the first call."""
    found = await deps.store.run(tenants.ensure, caller.org, deps.clock(), deps.ids)
    return respond.ok(_tenant(found))


@router.get(
    "/infrastructure-provider/current", operation_id="get-current-infrastructure-provider", response_model=Org
)
async def provider(deps: Deps, caller: ProviderReader) -> Response:
    """The infrastructure provider of the org."""
    return respond.ok(_provider(await deps.store.read(tenants.provider_of, caller.org)))


@router.get(
    "/service-account/current", operation_id="get-current-service-account", response_model=ServiceAccount
)
async def service_account(deps: Deps, caller: Anyone) -> Response:
    """Whether the org is provider and tenant in one, and as which."""
    return respond.ok(await deps.store.read(_service_account, caller.org))


@cache
def _build_time() -> float:
    """When the files of this build were written, in seconds since the epoch."""
    return Path(__file__).stat().st_mtime


def _service_account(conn: sa.Connection, org: str) -> Json:
    provider, tenant = tenants.find_provider(conn, org), tenants.find(conn, org)
    both = provider is not None and tenant is not None
    return {
        "enabled": both,
        "infrastructureProviderId": provider.id if provider and both else None,
        "tenantId": tenant.id if tenant and both else None,
    }


def _tenant(row: Row) -> Json:
    capabilities = {"targetedInstanceCreation": row.targeted_instance_creation}
    return {"id": row.id, "org": row.org, "capabilities": capabilities, **times(row)}


def _provider(row: Row) -> Json:
    return {"id": row.id, "org": row.org, **times(row)}
