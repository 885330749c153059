"""REST for providers: cordon, drain, force-delete and NVLink information of machines, list of drains."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import sqlalchemy as sa

from rackloom.carve.api import machines, routing
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.machines import Machine, MachineId, MachineIncludes, NVLinkInfo, nvlink_info_shape
from rackloom.carve.api.routing import ApiDeps, Deps, Page, Params, ProviderAdmin, ProviderReader, Row
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


router = routing.Operations()

ONE = "/machine/{machineId}"


@router.get(f"{ONE}/nvlink-info", "get-machine-nvlink-info", NVLinkInfo)
def get_nvlink_info(conn: sa.Connection, deps: Deps, caller: ProviderReader, machine_id: MachineId) -> Json:
    """The place of the machine in the NVLink fabric, as far as it was observed."""
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    row = catalog.get_machine(conn, machine_id)
    gpus = catalog.gpus_of_machines(conn, [machine_id])[machine_id]
    return nvlink_info_shape(row, gpus, shown_gpu_healths(conn, [row], deps.valid_from())[machine_id])


@router.post(f"{ONE}/cordon", "cordon-machine", Machine)
def cordon(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because
) -> Changed[Json]:
    """Place nothing new on the machine."""
    return _run_step(conn, deps, caller, machine_id, body, maintenance.cordon_machine)


@router.post(f"{ONE}/uncordon", "uncordon-machine", Machine)
def uncordon(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because
) -> Changed[Json]:
    """Allow new instances on the machine again."""
    return _run_step(conn, deps, caller, machine_id, body, maintenance.uncordon_machine)


@router.post(f"{ONE}/force-delete", "force-delete-machine-instance", Machine)
def force_delete(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because
) -> Changed[Json]:
    """Release the instance on the machine, with the usual clean-up. Any tenant may own it."""
    return _run_step(conn, deps, caller, machine_id, body, maintenance.force_delete_instance)


@router.create(f"{ONE}/drain", "drain-machine", Drain)
def start_drain(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because
) -> Changed[Json]:
    """Take the machine's GPUs out of all partitions, and record it."""
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    begun = maintenance.drain_machine(conn, machine_id, routing.operator_order(deps, caller, body), deps.ids)
    row = conn.execute(sa.select(drain).where(drain.c.id == begun.value)).one()
    return Changed(_drain_shape(row), begun.domains)


@router.post(f"{ONE}/drain/end", "end-machine-drain", Machine)
def end_drain(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: Because
) -> Changed[Json]:
    """Return the GPUs of the machine's instance to their partitions. The machine stays cordoned."""
    return _run_step(conn, deps, caller, machine_id, body, maintenance.end_machine_drain)


@router.page("/nvlink-drain", "get-all-nvlink-drain", list[Drain])
def list_drains(conn: sa.Connection, caller: ProviderReader, query: Params[DrainQuery]) -> Page:
    """The drains of the provider's trays, past ones too."""
    visible: sa.Select[Any] = (
        sa.select(drain)
        .join(machine, machine.c.id == drain.c.machine_id)
        .where(entitlements.operates_machine(entitlements.provider_id_of(conn, caller.org)))
    )
    if query.is_active is not None:
        visible = visible.where(drain.c.ended.is_(None) == query.is_active)
    return DRAINS.page(conn, visible, query)


def _run_step(
    conn: sa.Connection,
    deps: ApiDeps,
    caller: Caller,
    machine_id: str,
    body: Because,
    step: Callable[[sa.Connection, str, OperatorOrder], Changed[Any] | None],
) -> Changed[Json]:
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    changed = step(conn, machine_id, routing.operator_order(deps, caller, body))
    shown = machines.get_machine(conn, deps, caller, machine_id, MachineIncludes())
    # A cordon changes no intent: it only keeps new instances away.
    return Changed(shown, frozenset() if changed is None else changed.domains)


DRAINS = routing.Listing(
    shapes=lambda _conn, rows, _query: [_drain_shape(row) for row in rows],
    order=routing.order_by_creation(drain.c.started, drain.c.id),
    filters={"machine_id": drain.c.machine_id},
)
