"""Machines over REST: a provider's own, and those that carry a tenant's instances."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import histories, respond
from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api.answers import StatusDetail
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import NO_NUL
from rackloom.carve.api.deps import Deps, Reader
from rackloom.carve.api.filters import narrowed
from rackloom.carve.api.inventory_answers import GpuStats, Machine
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import GpuStatsQuery, MachineIncludes, MachineQuery, PageQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row
from rackloom.carve.site import machines
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import instance, instance_type, machine, machine_gpu, site

router = APIRouter()

MachineId = Annotated[str, Path(alias="machineId", max_length=64, pattern=NO_NUL)]
GPU_SKU = "gpu"
"""The one device type of hardware SKUs that is known here: a machine with GPUs."""


@router.get("/machine", operation_id="get-all-machine", response_model=list[Machine])
async def list_machines(deps: Deps, caller: Reader, query: Annotated[MachineQuery, Param()]) -> Response:
    """The machines that the caller may see."""
    found, total = await deps.store.read(_list_machines, caller, query)
    return respond.listing(found, total, query.page)


# Before the machine of an id: "gpu" would else be read as one.
@router.get("/machine/gpu/stats", operation_id="get-machine-gpu-stats", response_model=list[GpuStats])
async def gpu_stats(deps: Deps, caller: Reader, query: Annotated[GpuStatsQuery, Param()]) -> Response:
    """GPUs by product, of the machines that the caller may see."""
    return respond.ok(await deps.store.read(_gpu_stats, caller, query))


@router.get("/machine/{machineId}", operation_id="get-machine", response_model=Machine)
async def get_machine(
    deps: Deps, caller: Reader, machine_id: MachineId, query: Annotated[MachineIncludes, Param()]
) -> Response:
    """One machine."""
    return respond.ok(await deps.store.read(shape, caller, machine_id, query))


@router.get(
    "/machine/{machineId}/status-history",
    operation_id="get-machine-status-history",
    response_model=list[StatusDetail],
)
async def get_history(
    deps: Deps, caller: Reader, machine_id: MachineId, query: Annotated[PageQuery, Param()]
) -> Response:
    """What operators did to the machine, newest first."""
    return await histories.answer(deps, query, machine_id, lambda conn: _row(conn, caller, machine_id))


def _machines(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    return (
        machines.listing()
        .add_columns(site.c.provider_id)
        .join(site, site.c.id == machine.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, instance.c.tenant_id == tenant_id))
    )


def _list_machines(conn: sa.Connection, caller: Caller, query: MachineQuery) -> tuple[list[Json], int]:
    listing = _machines(conn, caller)
    wanted = (
        (query.site_id, machine.c.site_id == str(query.site_id)),
        (query.has_instance_type, machine.c.instance_type_id.is_not(None) == query.has_instance_type),
        (query.has_instance, instance.c.id.is_not(None) == query.has_instance),
        (query.is_missing_on_site, machine.c.missing_since.is_not(None) == query.is_missing_on_site),
        (query.hw_sku_device_type or None, _has_sku(query.hw_sku_device_type)),
    )
    for value, condition in wanted:
        if value is not None:
            listing = listing.where(condition)
    listing = narrowed(
        listing,
        (machine.c.id, query.id),
        (machine.c.instance_type_id, query.instance_type_id),
        (instance.c.tenant_id, query.tenant_id),
        (machines.shown_status, query.status),
    )
    if query.capability_type is not None or query.capability_name:
        listing = listing.where(machine.c.instance_type_id.in_(_types_with(conn, query)))
    if query.query:
        columns = (machine.c.id, machine.c.chassis_serial, machine.c.rack, machines.shown_status)
        listing = listing.where(matches(query.query, *columns))
    rows, total = fetch(conn, listing, query.page, order_of(machine, "id", "status"))
    return shapes.machines(conn, rows, query), total


def _has_sku(kinds: Sequence[str]) -> sa.ColumnElement[bool]:
    has_gpu = sa.exists().where(machine_gpu.c.machine_id == machine.c.id)
    return has_gpu if GPU_SKU in kinds else sa.false()


def _types_with(conn: sa.Connection, query: MachineQuery) -> list[str]:
    """Instance types that have the capability; types are few, and their capabilities are JSON."""
    types = conn.execute(sa.select(instance_type.c.id, instance_type.c.capabilities))
    return [
        row.id
        for row in types
        if any(
            query.capability_type in (None, one["type"])
            and (not query.capability_name or one["name"] in query.capability_name)
            for one in row.capabilities
        )
    ]


def _gpu_stats(conn: sa.Connection, caller: Caller, query: GpuStatsQuery) -> list[Json]:
    visible = _machines(conn, caller).subquery()
    counted = (
        sa.select(instance_type.c.capabilities, sa.func.count().label("machines"))
        .join(visible, visible.c.instance_type_id == instance_type.c.id)
        .group_by(instance_type.c.id)
    )
    if query.site_id is not None:
        counted = counted.where(instance_type.c.site_id == str(query.site_id))
    gpus, having = Counter[str](), Counter[str]()
    for row in conn.execute(counted):
        for one in row.capabilities:
            if one["type"] == "GPU":
                gpus[one["name"]] += row.machines * int(one.get("count") or 0)
                having[one["name"]] += row.machines
    return [{"name": name, "gpus": gpus[name], "machines": having[name]} for name in sorted(having)]


def shape(conn: sa.Connection, caller: Caller, machine_id: str, query: MachineIncludes) -> Json:
    """One machine, as the caller may see it."""
    return shapes.machines(conn, [_row(conn, caller, machine_id)], query)[0]


def _row(conn: sa.Connection, caller: Caller, machine_id: str) -> Row:
    row = conn.execute(_machines(conn, caller).where(machine.c.id == machine_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Machine with specified ID")
    return row
