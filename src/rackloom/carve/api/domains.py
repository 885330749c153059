"""NVLink domains over REST: room for tenants, state and pauses for providers."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import fabric_shapes, respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import NO_NUL
from rackloom.carve.api.deps import Deps, ProviderAdmin, Reader
from rackloom.carve.api.fabric_answers import NVLinkDomain
from rackloom.carve.api.operator_bodies import Because
from rackloom.carve.api.orders import order
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import DomainQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.site import allocations, authority, blocks, capacity, pauses, tenants
from rackloom.carve.site.paging import TIE_BREAKER, fetch
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import allocation, machine
from rackloom.carve.site.values import Changed

router = APIRouter()

DomainId = Annotated[str, Path(alias="nvLinkDomainId", max_length=256, pattern=NO_NUL)]
ONE = "/nvlink-domain/{nvLinkDomainId}"


@router.get("/nvlink-domain", operation_id="get-all-nvlink-domain", response_model=list[NVLinkDomain])
async def list_domains(deps: Deps, caller: Reader, query: Annotated[DomainQuery, Param()]) -> Response:
    """The domains where the caller operates machines or may use some, with the room in each."""
    found, total = await deps.store.read(_list, caller, query, deps.clock())
    return respond.listing(found, total, query.page)


@router.get(ONE, operation_id="get-nvlink-domain", response_model=NVLinkDomain)
async def get_domain(deps: Deps, caller: Reader, domain: DomainId) -> Response:
    """One domain."""
    return respond.ok(await deps.store.read(_get, caller, domain, deps.clock()))


@router.post(f"{ONE}/pause", operation_id="pause-nvlink-domain", response_model=NVLinkDomain)
async def pause(deps: Deps, caller: ProviderAdmin, domain: DomainId, body: Because) -> Response:
    """Do nothing to the domain until it is resumed; it is observed all the same."""

    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_domain(conn, tenants.provider_of(conn, caller.org).id, domain)
        changed = pauses.pause(conn, domain, order(deps, caller, body))
        return Changed(_get(conn, caller, domain, deps.clock()), changed.domains)

    return respond.ok(await deps.change(change))


@router.post(f"{ONE}/resume", operation_id="resume-nvlink-domain", response_model=NVLinkDomain)
async def resume(deps: Deps, caller: ProviderAdmin, domain: DomainId, body: Because) -> Response:
    """Work on the domain again."""

    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_domain(conn, tenants.provider_of(conn, caller.org).id, domain)
        changed = pauses.resume(conn, domain, order(deps, caller, body))
        return Changed(_get(conn, caller, domain, deps.clock()), changed.domains)

    return respond.ok(await deps.change(change))


def _domains(provider_id: str, tenant_id: str) -> Select:
    """Domains with their site, and since when the site has machines in them."""
    given = sa.select(allocation.c.site_id).where(allocation.c.tenant_id == tenant_id)
    usable = sa.select(machine.c.domain).where(machine.c.domain.is_not(None), machine.c.site_id.in_(given))
    visible = sa.union(authority.domains(provider_id), usable).subquery()
    return (
        sa.select(visible.c.domain, sa.func.min(machine.c.created).label("created"))
        .select_from(visible.join(machine, machine.c.domain == visible.c.domain, isouter=True))
        .group_by(visible.c.domain)
    )


def _list(conn: sa.Connection, caller: Caller, query: DomainQuery, now: float) -> tuple[list[Json], int]:
    provider_id, tenant_id = party(conn, caller)
    listing = _domains(provider_id, tenant_id)
    if query.site_id is not None:
        listing = listing.where(machine.c.site_id == str(query.site_id))
    known = listing.subquery()
    order_by = {"CREATED": known.c.created, TIE_BREAKER: known.c.domain}
    rows, total = fetch(conn, sa.select(known), query.page, order_by)
    return _shapes(conn, [row.domain for row in rows], provider_id, tenant_id, now), total


def _get(conn: sa.Connection, caller: Caller, domain: str, now: float) -> Json:
    provider_id, tenant_id = party(conn, caller)
    known = _domains(provider_id, tenant_id).subquery()
    if conn.execute(sa.select(known.c.domain).where(known.c.domain == domain)).first() is None:
        raise not_found("Could not find NVLink Domain with specified ID")
    return _shapes(conn, [domain], provider_id, tenant_id, now)[0]


def _shapes(
    conn: sa.Connection, domains: list[str], provider_id: str, tenant_id: str, now: float
) -> list[Json]:
    quota = allocations.remaining(conn, tenant_id) if tenant_id else None
    views = capacity.of_domains(conn, domains, tenant_id, quota)
    operated = set(conn.execute(authority.domains(provider_id)).scalars()) if provider_id else set()
    blocked = blocks.of_domains(conn, operated.intersection(domains))
    return [fabric_shapes.domain(views[one], now, blocked.get(one)) for one in domains]
