"""REST for providers: cordon, drain, force-delete and NVLink information of machines; drains."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import routing
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.machines import Machine, MachineId, MachineIncludes, NVLinkInfo, nvlink_info_shape
from rackloom.carve.api.machines import shown_machine as machine_shape
from rackloom.carve.api.routing import ApiDeps, Deps, Page, ProviderAdmin, ProviderReader, Row
from rackloom.carve.api.wire import Answer, Because, Json, PageQuery, Text, shape
from rackloom.carve.inventory import maintenance
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.schema import drain, machine
from rackloom.carve.store.values import Changed
from rackloom.carve.tenancy import catalog, entitlements
from rackloom.carve.tenancy.outdated import shown_gpu_healths

# Query parameters.


class DrainQuery(PageQuery):
    """Filters on drains."""

    machine_id: Text | None = None
    is_active: bool | None = None


# Response models.


class Drain(Answer):
    """The drain of a tray."""

    id: UUID
    machine_id: str
    instance_id: UUID | None
    status: Literal["Draining", "Drained", "Ended"]
    message: str
    reason: str
    asked_by: str
    started: datetime
    drained: datetime | None
    ended: datetime | None


# From rows to responses.


def _drain_shape(row: Row) -> Json:
    status = "Ended" if row.ended is not None else "Draining" if row.drained is None else "Drained"
    return shape(Drain, row, status=status)


# Routes.


router = routing.operations()

ONE = "/machine/{machineId}"


@router.get(f"{ONE}/nvlink-info", operation_id="get-machine-nvlink-info", response_model=NVLinkInfo)
async def get_nvlink_info(deps: Deps, caller: ProviderReader, machine_id: MachineId) -> Response:
    """Where the machine sits in the NVLink fabric, as far as it was observed."""
    return routing.json_response(await deps.store.read(_nvlink_info, caller, machine_id, deps.valid_from()))


@router.post(f"{ONE}/cordon", operation_id="cordon-machine", response_model=Machine)
async def cordon(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Place nothing new on the machine."""
    return await _run_step(deps, caller, machine_id, body, maintenance.cordon_machine)


@router.post(f"{ONE}/uncordon", operation_id="uncordon-machine", response_model=Machine)
async def uncordon(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Let the machine be used again."""
    return await _run_step(deps, caller, machine_id, body, maintenance.uncordon_machine)


@router.post(f"{ONE}/force-delete", operation_id="force-delete-machine-instance", response_model=Machine)
async def force_delete(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Release the instance on the machine, whoever owns it, with the same clean-up."""
    return await _run_step(deps, caller, machine_id, body, maintenance.force_delete_instance)


@router.post(f"{ONE}/drain", operation_id="drain-machine", status_code=201, response_model=Drain)
async def start_drain(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Take the machine's GPUs out of all partitions, and record it."""

    def change(conn: sa.Connection) -> Changed[Json]:
        entitlements.check_operates_machine(conn, caller.org, machine_id)
        begun = maintenance.drain_machine(
            conn, machine_id, routing.operator_order(deps, caller, body), deps.ids
        )
        row = conn.execute(sa.select(drain).where(drain.c.id == begun.value)).one()
        return Changed(_drain_shape(row), begun.domains)

    return routing.created_response(await deps.change(change))


@router.post(f"{ONE}/drain/end", operation_id="end-machine-drain", response_model=Machine)
async def end_drain(deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because) -> Response:
    """Join the GPUs of the machine's instance again; the machine stays cordoned."""
    return await _run_step(deps, caller, machine_id, body, maintenance.end_machine_drain)


@router.get("/nvlink-drain", operation_id="get-all-nvlink-drain", response_model=list[Drain])
async def list_drains(deps: Deps, caller: ProviderReader, query: Annotated[DrainQuery, Param()]) -> Response:
    """The drains of the provider's trays, past ones too."""
    return routing.page_response(*await deps.store.read(_drains, caller, query), query)


async def _run_step(
    deps: ApiDeps,
    caller: Caller,
    machine_id: str,
    body: Because,
    step: Callable[[sa.Connection, str, OperatorOrder], Changed[Any] | None],
) -> Response:
    def change(conn: sa.Connection) -> Changed[Json]:
        entitlements.check_operates_machine(conn, caller.org, machine_id)
        changed = step(conn, machine_id, routing.operator_order(deps, caller, body))
        shown = machine_shape(conn, caller, machine_id, MachineIncludes(), deps)
        # A cordon changes no intent: it only keeps new instances away.
        return Changed(shown, frozenset() if changed is None else changed.domains)

    return routing.json_response(await deps.change(change))


def _nvlink_info(conn: sa.Connection, caller: Caller, machine_id: str, valid_from: float) -> Json:
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    row = catalog.get_machine(conn, machine_id)
    gpus = catalog.gpus_of_machines(conn, [machine_id])[machine_id]
    return nvlink_info_shape(row, gpus, shown_gpu_healths(conn, [row], valid_from)[machine_id])


def _drains(conn: sa.Connection, caller: Caller, query: DrainQuery) -> Page:
    visible: sa.Select[Any] = (
        sa.select(drain)
        .join(machine, machine.c.id == drain.c.machine_id)
        .where(entitlements.operates_machine(entitlements.provider_id_of(conn, caller.org)))
    )
    if query.is_active is not None:
        visible = visible.where(drain.c.ended.is_(None) == query.is_active)
    return DRAINS.page(conn, visible, query)


DRAINS = routing.Listing(
    shapes=lambda _conn, rows, _query: [_drain_shape(row) for row in rows],
    order=routing.order_by_creation(drain.c.started, drain.c.id),
    filters={"machine_id": drain.c.machine_id},
)
