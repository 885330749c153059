"""Sites over REST: a provider's own, and those where a tenant has an allocation."""

from typing import Annotated, Any
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import histories, respond
from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api.answers import StatusDetail
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import SiteUpdate
from rackloom.carve.api.deps import Deps, ProviderAdmin, Reader
from rackloom.carve.api.filters import narrowed
from rackloom.carve.api.inventory_answers import Site
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import PageQuery, Query, SiteQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, Rows, relate
from rackloom.carve.site import sites, tenants
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    allocation,
    site,
)

router = APIRouter()

SiteId = Annotated[UUID, Path(alias="siteId")]


@router.get("/site", operation_id="get-all-site", response_model=list[Site])
async def list_sites(deps: Deps, caller: Reader, query: Annotated[SiteQuery, Param()]) -> Response:
    """The sites that the caller may see."""
    found, total = await deps.store.read(_list_sites, caller, query)
    return respond.listing(found, total, query.page)


@router.get("/site/{siteId}", operation_id="get-site", response_model=Site)
async def get_site(deps: Deps, caller: Reader, site_id: SiteId, query: Annotated[Query, Param()]) -> Response:
    """One site."""
    return respond.ok(await deps.store.read(_get_site, caller, str(site_id), query))


@router.patch("/site/{siteId}", operation_id="update-site", response_model=Site)
async def update_site(deps: Deps, caller: ProviderAdmin, site_id: SiteId, body: SiteUpdate) -> Response:
    """Change what is said of a site, and switch its capabilities."""
    return respond.ok(await deps.store.run(_update_site, caller, str(site_id), body, deps.clock()))


@router.get(
    "/site/{siteId}/status-history", operation_id="get-site-status-history", response_model=list[StatusDetail]
)
async def get_history(
    deps: Deps, caller: Reader, site_id: SiteId, query: Annotated[PageQuery, Param()]
) -> Response:
    """How the site came to its status, newest first."""
    return await histories.answer(deps, query, str(site_id), lambda conn: _row(conn, caller, str(site_id)))


def _sites(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    allocated = sa.select(allocation.c.site_id).where(allocation.c.tenant_id == tenant_id)
    return sa.select(site).where(sa.or_(site.c.provider_id == provider_id, site.c.id.in_(allocated)))


def _list_sites(conn: sa.Connection, caller: Caller, query: SiteQuery) -> tuple[list[Json], int]:
    listing = _sites(conn, caller)
    listing = narrowed(listing, (site.c.status, query.status))
    if query.infrastructure_provider_id is not None:
        listing = listing.where(site.c.provider_id == str(query.infrastructure_provider_id))
    for capability, wanted in (
        ("nativeNetworking", query.is_native_networking_enabled),
        ("networkSecurityGroup", query.is_network_security_group_enabled),
        ("nvLinkPartition", query.is_nvlink_partition_enabled),
        ("flow", query.is_flow_enabled),
    ):
        if wanted is not None:
            enabled = sa.func.coalesce(site.c.capabilities[capability].as_boolean(), sa.false())
            listing = listing.where(enabled == wanted)
    if query.query:
        listing = listing.where(matches(query.query, site.c.name, site.c.description, site.c.status))
    rows, total = fetch(conn, listing, query.page, _order())
    return _shapes(conn, rows, query), total


def _order() -> dict[str, sa.ColumnElement[Any]]:
    said = {name.upper(): sa.cast(site.c.extra[name], sa.Text) for name in ("location", "contact")}
    return order_of(site, "name", "status", "description") | said


def _row(conn: sa.Connection, caller: Caller, site_id: str) -> Row:
    row = conn.execute(_sites(conn, caller).where(site.c.id == site_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Site with specified ID")
    return row


def _get_site(conn: sa.Connection, caller: Caller, site_id: str, query: Query) -> Json:
    return _shapes(conn, [_row(conn, caller, site_id)], query)[0]


def _shapes(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    found = shapes.sites(conn, rows)
    relate(conn, found, query.relations("InfrastructureProvider"))
    return found


def _update_site(conn: sa.Connection, caller: Caller, site_id: str, body: SiteUpdate, now: float) -> Json:
    sites.update(
        conn,
        tenants.provider_of(conn, caller.org).id,
        site_id,
        name=body.name,
        description=body.description,
        capabilities={} if body.capabilities is None else body.capabilities.model_dump(by_alias=True),
        extra=body.kept,
        now=now,
    )
    return _get_site(conn, caller, site_id, Query())
