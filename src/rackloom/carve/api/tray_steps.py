"""Operators' steps on trays over REST: cordon, drain, force-delete, and what is known of their GPUs."""

from collections.abc import Callable
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import fabric_shapes, respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.deps import ApiDeps, Deps, ProviderAdmin, ProviderReader
from rackloom.carve.api.fabric_answers import Drain
from rackloom.carve.api.inventory_answers import Machine, NVLinkInfo
from rackloom.carve.api.inventory_shapes import nvlink_info
from rackloom.carve.api.machines import MachineId
from rackloom.carve.api.machines import shape as machine_shape
from rackloom.carve.api.operator_bodies import Because
from rackloom.carve.api.orders import order
from rackloom.carve.api.queries import DrainQuery, MachineIncludes
from rackloom.carve.api.respond import Json
from rackloom.carve.site import authority, machines, tenants, tray_steps
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.paging import TIE_BREAKER, fetch
from rackloom.carve.site.tables import drain, machine
from rackloom.carve.site.values import Changed

router = APIRouter()

ONE = "/machine/{machineId}"
NOBODY: frozenset[str] = frozenset()


@router.get(f"{ONE}/nvlink-info", operation_id="get-machine-nvlink-info", response_model=NVLinkInfo)
async def get_nvlink_info(deps: Deps, caller: ProviderReader, machine_id: MachineId) -> Response:
    """Where the machine sits in the NVLink fabric, as far as it was observed."""
    return respond.ok(await deps.store.read(_nvlink_info, caller, machine_id))


@router.post(f"{ONE}/cordon", operation_id="cordon-machine", response_model=Machine)
async def cordon(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Place nothing new on the machine."""

    def step(conn: sa.Connection, asked: Order) -> frozenset[str]:
        tray_steps.cordon(conn, machine_id, asked)
        return NOBODY

    return await _step(deps, caller, machine_id, body, step)


@router.post(f"{ONE}/uncordon", operation_id="uncordon-machine", response_model=Machine)
async def uncordon(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Let the machine be used again."""

    def step(conn: sa.Connection, asked: Order) -> frozenset[str]:
        tray_steps.uncordon(conn, machine_id, asked)
        return NOBODY

    return await _step(deps, caller, machine_id, body, step)


@router.post(f"{ONE}/force-delete", operation_id="force-delete-machine-instance", response_model=Machine)
async def force_delete(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Release the instance on the machine, whoever owns it, with the same clean-up."""
    return await _step(
        deps,
        caller,
        machine_id,
        body,
        lambda conn, asked: tray_steps.force_delete(conn, machine_id, asked).domains,
    )


@router.post(f"{ONE}/drain", operation_id="drain-machine", status_code=201, response_model=Drain)
async def start_drain(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Take the machine's GPUs out of all partitions, and record it."""

    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_machine(conn, tenants.provider_of(conn, caller.org).id, machine_id)
        begun = tray_steps.drain(conn, machine_id, order(deps, caller, body), deps.ids)
        row = conn.execute(sa.select(drain).where(drain.c.id == begun.value)).one()
        return Changed(fabric_shapes.drain(row), begun.domains)

    return respond.created(await deps.change(change))


@router.post(f"{ONE}/drain/end", operation_id="end-machine-drain", response_model=Machine)
async def end_drain(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Join the GPUs of the machine's instance again; the machine stays cordoned."""
    return await _step(
        deps,
        caller,
        machine_id,
        body,
        lambda conn, asked: tray_steps.end_drain(conn, machine_id, asked).domains,
    )


@router.get("/nvlink-drain", operation_id="get-all-nvlink-drain", response_model=list[Drain])
async def list_drains(deps: Deps, caller: ProviderReader, query: Annotated[DrainQuery, Param()]) -> Response:
    """The drains of the provider's trays, past ones too."""
    found, total = await deps.store.read(_drains, caller, query)
    return respond.listing(found, total, query.page)


async def _step(
    deps: ApiDeps,
    caller: Caller,
    machine_id: str,
    body: Because,
    step: Callable[[sa.Connection, Order], frozenset[str]],
) -> Response:
    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_machine(conn, tenants.provider_of(conn, caller.org).id, machine_id)
        domains = step(conn, order(deps, caller, body))
        return Changed(machine_shape(conn, caller, machine_id, MachineIncludes()), domains)

    return respond.ok(await deps.change(change))


def _nvlink_info(conn: sa.Connection, caller: Caller, machine_id: str) -> Json:
    authority.check_machine(conn, tenants.provider_of(conn, caller.org).id, machine_id)
    return nvlink_info(machines.get(conn, machine_id), machines.gpus_of(conn, [machine_id])[machine_id])


def _drains(conn: sa.Connection, caller: Caller, query: DrainQuery) -> tuple[list[Json], int]:
    listing: sa.Select[Any] = (
        sa.select(drain)
        .join(machine, machine.c.id == drain.c.machine_id)
        .where(authority.operates_machine(tenants.provider_of(conn, caller.org).id))
    )
    if query.machine_id is not None:
        listing = listing.where(drain.c.machine_id == query.machine_id)
    if query.is_active is not None:
        listing = listing.where(drain.c.ended.is_(None) == query.is_active)
    rows, total = fetch(conn, listing, query.page, {"CREATED": drain.c.started, TIE_BREAKER: drain.c.id})
    return [fabric_shapes.drain(row) for row in rows], total
