"""`rackloom admin reservation`: trays that are kept for an organisation until a given time.

A new reservation names its trays, or their instance type and number. In the second case healthy empty trays
are chosen, all in one NVLink domain unless `--span-domains` allows several. It expires at its end time.
"""

from datetime import datetime
from typing import Annotated, Any

from cyclopts import App, Parameter

from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin import (
    HERE,
    Place,
    Reason,
    admin_command,
    as_dict,
    call,
    emit_messages,
    send_order,
    timestamp,
    utc_time,
)
from rackloom.cli.common import emit

app = App(name="reservation", help="Trays that wait for an organisation until a time.")


@app.command(name="list")
@admin_command
def reservation_list(
    *,
    tenant: Annotated[str, Parameter(name=("--tenant", "-t"), help="Only those of this organisation.")] = "",
    at: Place = HERE,
) -> None:
    """List reservations in the order of their end, including expired ones."""
    request = ours.TrayReservationsRequest(tenant_organization_id=tenant)
    found = call(at, "ListTrayReservations", request).reservations
    heads = ("ID", "ORGANISATION", "UNTIL", "STATE", "TRAYS", "REASON", "BY")
    emit_messages(found, at.output, heads, _row, tenant=tenant)


@app.command(name="create")
@admin_command
def reservation_create(
    *,
    tenant: Annotated[str, Parameter(name=("--tenant", "-t"), help="Organisation of the tenant.")],
    until: Annotated[datetime, Parameter(help="When it ends; UTC without a zone.")],
    reason: Reason,
    machine: Annotated[
        tuple[str, ...], Parameter(help="A tray by its machine id; repeat it for each.", negative="")
    ] = (),
    instance_type: Annotated[str, Parameter(help="Id of the instance type of which trays are chosen.")] = "",
    count: Annotated[int, Parameter(help="The number of trays to choose.")] = 0,
    domain: Annotated[str, Parameter(help="Choose only trays of this domain.")] = "",
    rack: Annotated[str, Parameter(help="Choose only trays of this rack.")] = "",
    span_domains: Annotated[
        bool, Parameter(negative="", help="Choose trays of several domains, where it must be.")
    ] = False,
    at: Place = HERE,
) -> None:
    """Keep trays for an organisation until a time."""
    order = ours.TrayReservationOrder(
        tenant_organization_id=tenant,
        until=timestamp(until),
        reason=reason,
        machine_ids=machine,
        instance_type_id=instance_type,
        count=count,
        domain=domain,
        rack=rack,
        may_span_domains=span_domains,
    )
    made = call(at, "CreateTrayReservation", order)
    machines = " ".join(made.machine_ids)
    emit(
        as_dict(made),
        at.output,
        lambda: f"reservation {made.id} keeps {machines} for {made.tenant_organization_id}",
    )


@app.command(name="delete")
@admin_command
def reservation_delete(
    reservation: Annotated[str, Parameter(help="Reservation id.")], *, reason: Reason, at: Place = HERE
) -> None:
    """Free the trays of a reservation now. Instances on them stay."""
    send_order(at, "DeleteTrayReservation", ours.TrayReservationDeletion(id=reservation, reason=reason))


def _row(made: Any) -> tuple[str, ...]:
    return (
        made.id,
        made.tenant_organization_id,
        utc_time(made.until.seconds),
        "active" if made.is_active else "ended",
        " ".join(made.machine_ids),
        made.reason,
        made.asked_by,
    )
