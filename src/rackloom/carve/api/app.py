"""The REST application: routes behind the gate, errors in one shape."""

from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from rackloom.carve.api import (
    allocations,
    instance_types,
    instances,
    interfaces,
    machines,
    partitions,
    problems,
    sites,
    tenancy,
    vpcs,
)
from rackloom.carve.api.deps import ApiDeps
from rackloom.carve.api.gate import Gate

__all__ = ["ApiDeps", "create_app"]

BASE = "/v2/org/{org}/nico"
MAX_BODY = 1 << 20
"""Bytes. The largest body that means anything names every GPU of a domain, which is some 100 KiB."""

ERRORS: dict[int | str, dict[str, str]] = {
    400: {"description": "The request contradicts itself or a record that it names"},
    401: {"description": "The caller did not prove who it is"},
    403: {"description": "The caller may not do this"},
    404: {"description": "The thing named in the path does not exist"},
    409: {"description": "The state of the site is against it"},
}


def create_app(deps: ApiDeps) -> FastAPI:
    """The ASGI application over `deps`. Nothing runs in it but requests."""
    # The framework's documentation pages load their scripts from elsewhere; /openapi.json needs nothing.
    app = FastAPI(
        title="Rackloom",
        version=version("rackloom"),
        max_body_size=MAX_BODY,
        docs_url=None,
        redoc_url=None,
    )
    app.state.deps = deps
    app.state.tenants_seen = set()
    app.add_middleware(Gate, verifier=deps.verifier)
    problems.install(app)
    base = APIRouter(prefix=BASE, responses=ERRORS)
    # Types before instances: /instance/type would else be read as an instance id.
    for router in (
        tenancy.router,
        sites.router,
        instance_types.router,
        machines.router,
        allocations.router,
        partitions.router,
        interfaces.router,
        vpcs.router,
        instances.router,
    ):
        base.include_router(router)
    app.include_router(base)
    return app
