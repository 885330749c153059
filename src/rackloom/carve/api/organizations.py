"""REST: the calling organization as tenant and provider, and the version of the service.

/metadata has the version of the service itself, the versions of NVIDIA Infra Controller's REST contract
that it serves, and the groups of operations of the newest one that it lacks. `version` is the newest served:
client libraries derive the features of a service from it, and refuse versions before 0.2.86.
"""

from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from uuid import UUID

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response

from rackloom.carve.api import routing
from rackloom.carve.api.renames import CONTRACTS, UNSERVED
from rackloom.carve.api.routing import AnyCaller, Deps, ProviderReader, TenantAdmin
from rackloom.carve.api.wire import Answer, Json, Org, shape
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.tenancy import entitlements

# Response models.


class TenantCapabilities(Answer):
    """Additional rights of a tenant."""

    targeted_instance_creation: bool


class Tenant(Org):
    """A tenant."""

    capabilities: TenantCapabilities


class ServiceAccount(Answer):
    """Whether an org is provider and tenant in one."""

    enabled: bool
    infrastructure_provider_id: UUID | None
    tenant_id: UUID | None


class Metadata(Answer):
    """The served versions of the contract, the groups of operations that are missing, and the build."""

    version: str
    """The newest served version of the contract."""
    contracts: list[str]
    unserved: list[str]
    """Groups of operations of the contract that do not exist here."""
    implementation: str
    build_time: datetime


# Routes.


router = routing.Operations()


@router.get("/metadata", "get-metadata", Metadata)
async def metadata(_caller: AnyCaller) -> Response:
    """The served versions of the contract, the groups of operations that are missing, and the build."""
    served = {"version": CONTRACTS[-1], "contracts": CONTRACTS, "unserved": sorted(UNSERVED)}
    build = {"implementation": f"rackloom {version('rackloom')}", "buildTime": rfc3339(_build_time())}
    return routing.json_response(served | build)


@router.get("/tenant/current", "get-current-tenant", Tenant)
async def tenant(request: Request, deps: Deps, caller: TenantAdmin) -> Response:
    """The tenant of the org. The first call creates it."""
    found = await routing.make_tenant(request, deps, caller.org, entitled=False)
    capabilities = {"targetedInstanceCreation": found.targeted_instance_creation}
    return routing.json_response(shape(Tenant, found, capabilities=capabilities))


@router.get("/infrastructure-provider/current", "get-current-infrastructure-provider", Org)
def provider(conn: sa.Connection, caller: ProviderReader) -> Json:
    """The infrastructure provider of the org."""
    return routing.org_shape(entitlements.get_provider(conn, caller.org))


@router.get("/service-account/current", "get-current-service-account", ServiceAccount)
def service_account(conn: sa.Connection, caller: AnyCaller) -> Json:
    """Whether the org is provider and tenant in one, with the ids of both."""
    provider = entitlements.find_provider(conn, caller.org)
    tenant = entitlements.find_tenant(conn, caller.org)
    both = provider is not None and tenant is not None
    return {
        "enabled": both,
        "infrastructureProviderId": provider.id if provider and both else None,
        "tenantId": tenant.id if tenant and both else None,
    }


@cache
def _build_time() -> float:
    """The time at which the files of this build were written, in seconds since the epoch."""
    return Path(__file__).stat().st_mtime
