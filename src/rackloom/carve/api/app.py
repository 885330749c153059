"""The REST application: routes behind the gate, errors in one shape."""

from collections import Counter
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI

from rackloom.carve.api import (
    allocations,
    description,
    domains,
    events,
    fabric_steps,
    instance_types,
    instances,
    interfaces,
    machines,
    networks,
    partitions,
    problems,
    sites,
    tenancy,
    tray_steps,
    vpcs,
)
from rackloom.carve.api.answers import Problem
from rackloom.carve.api.body_limit import BodyLimit
from rackloom.carve.api.deps import ApiDeps
from rackloom.carve.api.gate import Gate

__all__ = ["ApiDeps", "create_app"]

BASE = "/v2/org/{org}/nico"
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request contradicts itself or a record that it names"},
    401: {"model": Problem, "description": "The caller did not prove who it is"},
    403: {"model": Problem, "description": "The caller may not do this"},
    404: {"model": Problem, "description": "The thing named in the path does not exist"},
    408: {"model": Problem, "description": "The body took too long"},
    409: {"model": Problem, "description": "The state of the site is against it"},
    413: {"model": Problem, "description": "The body is too large"},
    415: {"model": Problem, "description": "The body is not JSON"},
    503: {"model": Problem, "description": "Nothing was decided: try again"},
}


def _routes() -> APIRouter:
    base = APIRouter(prefix=BASE, responses=ERRORS)
    # Types before instances: /instance/type would else be read as an instance id.
    for room in (
        tenancy, sites, instance_types, machines, tray_steps, domains, fabric_steps, events, allocations,
        partitions, interfaces, networks, vpcs, instances,
    ):  # fmt: skip
        base.include_router(room.router)
    return base


ROUTES = _routes()
"""Put together once: a process may make many applications."""


def create_app(deps: ApiDeps) -> FastAPI:
    """The ASGI application over `deps`. Nothing runs in it but requests."""
    # The framework's documentation pages load their scripts from elsewhere; /openapi.json needs nothing.
    app = FastAPI(
        title="Rackloom",
        version=version("rackloom"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    app.state.tenants_seen = set()
    app.state.event_streams = Counter()
    # The last one added is the first that a request meets: nothing is received from a stranger.
    app.add_middleware(BodyLimit)
    app.add_middleware(Gate, verifier=deps.verifier)
    problems.install(app)
    app.include_router(ROUTES)
    description.complete(app)
    return app
