"""REST for providers: changing and deleting a machine, as NVIDIA Infra Controller does.

One request changes one thing: the instance type, the labels, or maintenance. Maintenance is a cordon, so this
and `/machine/{id}/cordon` have the same effect. A machine is deleted only if the current reading of its
domain does not list it. The admin gRPC's force-delete needs no such evidence.
"""

from typing import Annotated, Self
from uuid import UUID

import sqlalchemy as sa
from pydantic import StringConstraints
from pydantic import model_validator as validator

from rackloom.carve.api import routing, wire
from rackloom.carve.api.machines import Machine, MachineId, MachineIncludes, get_machine
from rackloom.carve.api.routing import Deps, ProviderAdmin
from rackloom.carve.api.wire import Json
from rackloom.carve.inventory import enrolment, maintenance
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.values import TEXT_PATTERN, Changed
from rackloom.carve.tenancy import catalog, entitlements

# Request models.


CHANGES = ("instance_type_id", "clear_instance_type", "set_maintenance_mode", "labels")
MaintenanceMessage = Annotated[
    str,
    StringConstraints(strict=True, strip_whitespace=True, min_length=5, max_length=256, pattern=TEXT_PATTERN),
]


class MachineUpdate(wire.Body):
    """Exactly one change of a machine. The start of maintenance also needs `maintenanceMessage`."""

    instance_type_id: UUID | None = None
    clear_instance_type: bool | None = None
    set_maintenance_mode: bool | None = None
    maintenance_message: MaintenanceMessage | None = None
    labels: wire.Labels | None = None

    @validator(mode="after")
    def _is_one_change(self) -> Self:
        if sum(getattr(self, name) is not None for name in CHANGES) != 1:
            raise ValueError(
                "exactly one of instanceTypeId, clearInstanceType, setMaintenanceMode, labels must be given"
            )
        if self.clear_instance_type is False:
            raise ValueError("clearInstanceType must be true")
        if (self.maintenance_message is not None) != (self.set_maintenance_mode is True):
            raise ValueError("maintenanceMessage must be given if and only if setMaintenanceMode is true")
        return self


# Routes.


router = routing.Operations()

ONE = "/machine/{machineId}"


@router.patch(ONE, "update-machine", Machine)
def update(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId, body: MachineUpdate
) -> Json:
    """Change the instance type or the labels of a machine, or begin or end its maintenance."""
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    now = deps.clock()
    if body.set_maintenance_mode is not None:
        order = OperatorOrder(
            caller.subject, body.maintenance_message or "maintenance ended", now, deps.valid_from()
        )
        begins = body.set_maintenance_mode
        step = maintenance.begin_maintenance if begins else maintenance.uncordon_machine
        step(conn, machine_id, order)
    elif body.labels is not None:
        catalog.set_machine_labels(conn, machine_id, body.labels, now)
    else:
        wanted = None if body.instance_type_id is None else str(body.instance_type_id)
        provider_id = entitlements.provider_id_of(conn, caller.org)
        catalog.set_machine_type(conn, provider_id, machine_id, wanted, now)
    return get_machine(conn, deps, caller, machine_id, MachineIncludes())


@router.delete(ONE, "delete-machine")
def delete(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, machine_id: MachineId) -> Changed[None]:
    """Delete a machine that is gone. It must be empty, and its switch controller must not list it."""
    entitlements.check_operates_machine(conn, caller.org, machine_id)
    order = OperatorOrder(caller.subject, "machine deleted", deps.clock(), deps.valid_from())
    return Changed(None, enrolment.delete_missing_machine(conn, machine_id, order))
