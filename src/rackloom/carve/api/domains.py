"""REST: NVLink domains. Capacity for tenants, and state, blockers, pause and resume for providers.

A domain is Observed or Unknown, with the age of the observation. Only a provider that operates the domain
sees its blocked GPUs, the reason of a pause, and the answers of its controllers.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field

from rackloom.carve.api import access, routing
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import AnySelect, ApiDeps, Deps, Page, Params, ProviderAdmin, Reader, Row
from rackloom.carve.api.wire import NO_NUL, Answer, Because, Json, PageQuery, shape
from rackloom.carve.partitions import intent
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.prepared import owned_by, require
from rackloom.carve.store.schema import allocation, machine
from rackloom.carve.store.values import Changed
from rackloom.carve.tenancy import capacity, entitlements
from rackloom.carve.tenancy.capacity import DomainCapacity

# Query parameters.


class DomainQuery(PageQuery):
    """Filters on NVLink domains."""

    site_id: UUID | None = None


# Response models.


class TypeCapacity(Answer):
    """Room for machines of one instance type."""

    instance_type_id: UUID
    free_trays: int
    largest_batch: int


class OwnPartition(Answer):
    """A logical partition of the caller that reaches into the domain."""

    id: UUID
    gpus: int


class TrayInForeignPartition(Answer):
    """A tray with GPUs in a partition that the site did not make."""

    machine_id: str
    partition_id: int
    partition_name: str


class TrayWithUnlistedGpus(Answer):
    """A tray with GPUs that its controller does not list."""

    machine_id: str
    device_instances: list[int]


class TrayReservedForOthers(Answer):
    """A tray that is reserved for an organisation."""

    machine_id: str
    reservation_id: UUID
    tenant_id: UUID
    org: str
    until: datetime


class BlockedGpu(Answer):
    """A GPU whose intended move is blocked, with the reason. If `fix` is null, the site cannot resolve it."""

    gpu_guid: str
    reason: str
    fix: str | None
    since: datetime


class NVLinkDomain(Answer):
    """A domain: its state, its capacity, and the caller's objects in it."""

    id: str
    site_id: UUID | None
    status: Literal["Observed", "Unknown"]
    observed_at: datetime | None
    observation_age_seconds: float | None
    unknown_since: datetime | None
    status_message: str | None
    is_paused: bool
    pause_reason: Annotated[str | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    total_trays: int
    free_trays: int
    unhealthy_trays: int
    foreign_trays: int
    trays_in_foreign_partitions: list[TrayInForeignPartition] | None
    """Null unless the caller operates the domain."""
    unlisted_trays: int
    """The number of empty trays with GPUs that the controller does not list."""
    trays_with_unlisted_gpus: Annotated[
        list[TrayWithUnlistedGpus] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)
    ]
    """Null unless the caller operates the domain."""
    trays_reserved_for_others: Annotated[
        list[TrayReservedForOthers] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)
    ]
    """Null unless the caller operates the domain. To a tenant, such a tray looks like one in use."""
    own_reserved_trays: int
    """The number of free trays that are reserved for the caller."""
    closed_trays: int
    largest_batch: int
    fragmentation: float
    blocked_gpus: Annotated[list[BlockedGpu] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    instance_types: list[TypeCapacity]
    own_instances: int
    own_gpus: int
    own_logical_partitions: list[OwnPartition]


# From rows to responses.


def domain_shape(capacity: DomainCapacity, now: float, blocked: Sequence[Row] | None) -> Json:
    """A domain as the caller may see it.

    Blocked GPUs, the names of foreign trays, the holders of reservations, the reason of a pause and the
    answers of controllers are for the operator of the domain. `blocked` is None for other callers.
    """
    observation = capacity.known.observation
    doubt = capacity.known.doubt if blocked is None else capacity.known.operators_doubt
    for_operators: dict[str, object] = {
        "pause_reason": capacity.pause_reason,
        "trays_in_foreign_partitions": [
            shape(TrayInForeignPartition, tray, partition_name=tray.name) for tray in capacity.foreign
        ],
        "trays_with_unlisted_gpus": [
            {"machineId": machine_id, "deviceInstances": list(devices)}
            for machine_id, devices in capacity.unlisted.items()
        ],
        "trays_reserved_for_others": [shape(TrayReservedForOthers, tray) for tray in capacity.reserved],
        "blocked_gpus": [shape(BlockedGpu, row, gpu_guid=row.guid) for row in blocked or ()],
    }
    if blocked is None:
        for_operators = dict.fromkeys(for_operators)
    return shape(
        NVLinkDomain,
        capacity,
        id=capacity.domain,
        status="Unknown" if observation is None else "Observed",
        observed_at=None if observation is None else observation.observed_at,
        observation_age_seconds=None if observation is None else max(0.0, now - observation.observed_at),
        unknown_since=capacity.known.unknown_since,
        status_message=doubt or None,
        is_paused=capacity.pause_reason is not None,
        total_trays=capacity.trays,
        free_trays=capacity.free,
        unhealthy_trays=capacity.unhealthy,
        foreign_trays=capacity.foreign_count,
        unlisted_trays=len(capacity.unlisted),
        own_reserved_trays=capacity.own_reserved,
        closed_trays=capacity.closed,
        instance_types=[shape(TypeCapacity, type_, free_trays=type_.free) for type_ in capacity.types],
        own_gpus=sum(capacity.own_gpus.values()),
        own_logical_partitions=[{"id": name, "gpus": gpus} for name, gpus in capacity.own_gpus.items()],
        **for_operators,
    )


# Routes.


router = routing.Operations()

DomainId = Annotated[str, Path(alias="nvLinkDomainId", max_length=256, pattern=NO_NUL)]
ONE = "/nvlink-domain/{nvLinkDomainId}"


@router.page("/nvlink-domain", "get-all-nvlink-domain", list[NVLinkDomain])
def list_domains(conn: sa.Connection, deps: Deps, caller: Reader, query: Params[DomainQuery]) -> Page:
    """The domains in which the caller operates or may use machines, with the capacity of each."""
    provider_id, tenant_id = routing.provider_and_tenant(conn, caller)
    visible = _domains(provider_id, tenant_id)
    known = routing.filter_rows(visible, (machine.c.site_id, query.site_id)).subquery()
    listing = routing.Listing(
        shapes=lambda conn, rows, _query: _shapes(
            conn, [row.domain for row in rows], provider_id, tenant_id, deps
        ),
        order=routing.order_by_creation(known.c.created, known.c.domain),
    )
    return listing.page(conn, sa.select(known), query)


@router.get(ONE, "get-nvlink-domain", NVLinkDomain)
def get_domain(conn: sa.Connection, deps: Deps, caller: Reader, domain: DomainId) -> Json:
    """One domain."""
    provider_id, tenant_id = routing.provider_and_tenant(conn, caller)
    known = _domains(provider_id, tenant_id).subquery()
    found = conn.execute(sa.select(known.c.domain).where(known.c.domain == domain)).first()
    require(found, "Could not find NVLink Domain with specified ID")
    return _shapes(conn, [domain], provider_id, tenant_id, deps)[0]


@router.post(f"{ONE}/pause", "pause-nvlink-domain", NVLinkDomain)
def pause(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, domain: DomainId, body: Because
) -> Changed[Json]:
    """Change nothing in the domain until it is resumed. It is still observed."""
    return _run_step(conn, deps, caller, domain, body, intent.pause_domain)


@router.post(f"{ONE}/resume", "resume-nvlink-domain", NVLinkDomain)
def resume(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, domain: DomainId, body: Because
) -> Changed[Json]:
    """Change the domain again after a pause."""
    return _run_step(conn, deps, caller, domain, body, intent.resume_domain)


def _run_step(
    conn: sa.Connection,
    deps: ApiDeps,
    caller: Caller,
    domain: str,
    body: Because,
    step: Callable[[sa.Connection, str, OperatorOrder], Changed[None]],
) -> Changed[Json]:
    entitlements.check_operates_domain(conn, caller.org, domain)
    changed = step(conn, domain, routing.operator_order(deps, caller, body))
    return Changed(get_domain(conn, deps, caller, domain), changed.domains)


def _domains(provider_id: str, tenant_id: str) -> AnySelect:
    """Domains with their site, and the time since which the site has machines in them."""
    allocated = sa.select(allocation.c.site_id).where(owned_by(allocation.c.tenant_id, tenant_id))
    usable = sa.select(machine.c.domain).where(
        machine.c.domain.is_not(None), machine.c.site_id.in_(allocated)
    )
    visible = sa.union(entitlements.operated_domains(provider_id), usable).subquery()
    return (
        sa.select(visible.c.domain, sa.func.min(machine.c.created).label("created"))
        .select_from(visible.join(machine, machine.c.domain == visible.c.domain, isouter=True))
        .group_by(visible.c.domain)
    )


def _shapes(
    conn: sa.Connection, domains: list[str], provider_id: str, tenant_id: str, deps: ApiDeps
) -> list[Json]:
    now = deps.clock()
    quota = entitlements.allocation_uses(conn, tenant_id, now) if tenant_id else None
    capacities = capacity.capacity_of_domains(conn, domains, tenant_id, quota, now, now - deps.valid_seconds)
    operated = (
        set(conn.execute(entitlements.operated_domains(provider_id)).scalars()) if provider_id else set()
    )
    blocked = intent.blocked_gpus_of_domains(conn, operated.intersection(domains))
    return [domain_shape(capacities[domain], now, blocked.get(domain)) for domain in domains]
