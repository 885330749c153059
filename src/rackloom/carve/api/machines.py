"""Machines over REST: a provider's own, and those that carry a tenant's instances."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api import respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.deps import Deps, Reader
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import (
    MachineIncludes,
    MachineQuery,
)
from rackloom.carve.api.respond import Json
from rackloom.carve.site import machines
from rackloom.carve.site.paging import fetch, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    instance,
    machine,
    site,
)

router = APIRouter()


@router.get("/machine", operation_id="get-all-machine")
async def list_machines(deps: Deps, caller: Reader, query: Annotated[MachineQuery, Param()]) -> Response:
    """The machines that the caller may see."""
    found, total = await deps.store.read(_list_machines, caller, query)
    return respond.listing(found, total, query.page)


@router.get("/machine/{machineId}", operation_id="get-machine")
async def get_machine(
    deps: Deps,
    caller: Reader,
    machine_id: Annotated[str, Path(alias="machineId")],
    query: Annotated[MachineIncludes, Param()],
) -> Response:
    """One machine."""
    return respond.ok(await deps.store.read(_get_machine, caller, machine_id, query.include_metadata))


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
        (query.instance_type_id, machine.c.instance_type_id == str(query.instance_type_id)),
        (query.id or None, machine.c.id.in_(query.id)),
        (query.has_instance_type, machine.c.instance_type_id.is_not(None) == query.has_instance_type),
        (query.has_instance, instance.c.id.is_not(None) == query.has_instance),
        (query.status, machines.shown_status == query.status),
    )
    for value, condition in wanted:
        if value is not None:
            listing = listing.where(condition)
    rows, total = fetch(conn, listing, query.page, order_of(machine, "status"))
    return shapes.machines(conn, rows, with_metadata=query.include_metadata), total


def _get_machine(conn: sa.Connection, caller: Caller, machine_id: str, with_metadata: bool) -> Json:
    row = conn.execute(_machines(conn, caller).where(machine.c.id == machine_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Machine with specified ID")
    return shapes.machines(conn, [row], with_metadata=with_metadata)[0]
