"""Trays that placement withholds: those reserved for others, and those that are shut to all.

A reserved tray has one row, so that it waits for one organisation only. Whether its reservation counts is
decided when it is read, by `in_force` of `core.place.promises` with the site's clock. So every replica
says the same, and nothing has to run when a reservation ends. Reservations are few; their trays may be
many, and are read only for the machines in question.

`reservations` makes and changes them.

A tray is shut if its GPUs could not join a partition now. A partition that the site did not make holds a GPU
of it (`partitions.ownership`), or the newest valid reading of its domain lists GPUs of the tray, but not all
that are recorded there. The inventory sync marks an unlisted GPU in place of its last health, which says
nothing any more. A tray of which no GPU is listed is missing, which its machine says. While a domain cannot
be read, its trays stay as they were last seen.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import foreign_partition_text, is_in_foreign_partition
from rackloom.carve.store.schema import (
    instance,
    machine,
    machine_gpu,
    reserved_tray,
    tenant,
    tray_reservation,
)
from rackloom.carve.store.values import RefusalKind, Rejected
from rackloom.core.place.promises import Reservation, in_force
from rackloom.topology.part_names import PartName

# Built once: every new instance runs these.
_RESERVATIONS = sa.select(tray_reservation.c.id, tray_reservation.c.tenant_id, tray_reservation.c.until)
is_in_reservations = machine.c.id.in_(
    sa.select(reserved_tray.c.machine_id).where(
        reserved_tray.c.reservation_id.in_(sa.bindparam("reservations", expanding=True))
    )
)
"""Whether a row of the machine table is in one of the reservations of the parameter."""
_TRAYS = (
    sa.select(
        reserved_tray.c.machine_id,
        tray_reservation.c.id,
        tray_reservation.c.tenant_id,
        tenant.c.org,
        tray_reservation.c.until,
    )
    .join(tray_reservation, tray_reservation.c.id == reserved_tray.c.reservation_id)
    .join(tenant, tenant.c.id == tray_reservation.c.tenant_id)
    .where(tray_reservation.c.id.in_(sa.bindparam("reservations", expanding=True)))
    .order_by(reserved_tray.c.machine_id)
)


class ReservedTray(msgspec.Struct, frozen=True):
    """A tray that is kept for an organisation."""

    machine_id: str
    reservation_id: str
    tenant_id: str
    org: str
    until: float

    def text(self) -> str:
        """For operators: tenants do not learn of other tenants."""
        return f"reserved for {self.org} until {rfc3339(self.until)}"


def reservations_in_force(conn: sa.Connection, now: float) -> dict[str, Reservation]:
    """The reservations that count now, by id."""
    return in_force((Reservation(*row) for row in conn.execute(_RESERVATIONS)), now)


def reserved_trays(
    conn: sa.Connection, now: float, machine_ids: Collection[str] | None
) -> dict[str, ReservedTray]:
    """The trays of `machine_ids` that are reserved now, by machine; of all machines where None."""
    if not (counting := reservations_in_force(conn, now)):
        return {}
    wanted = _TRAYS if machine_ids is None else _TRAYS.where(reserved_tray.c.machine_id.in_(machine_ids))
    rows = conn.execute(wanted, {"reservations": list(counting)})
    return {row.machine_id: ReservedTray(*row) for row in rows}


def count_reserved_trays(conn: sa.Connection, tenant_id: str, now: float) -> int:
    """How many trays are reserved for the tenant now."""
    return _of_tenant(conn, tenant_id, now, sa.true()).total()


def idle_reserved_machines(conn: sa.Connection, tenant_id: str, now: float) -> Mapping[str, int]:
    """Instance type -> machines that are reserved for the tenant now and carry none of its instances."""
    own = sa.select(instance.c.machine_id).where(instance.c.tenant_id == tenant_id)
    return _of_tenant(conn, tenant_id, now, machine.c.id.not_in(own))


def check_unreserved(conn: sa.Connection, machine_ids: Collection[str], now: float) -> None:
    """Refuse a change of machines that are reserved: it would take them from the reservation."""
    for tray in reserved_trays(conn, now, machine_ids).values():
        raise Rejected(
            RefusalKind.CONFLICT,
            f"Machine {tray.machine_id} is {tray.text()}",
            nearest_fix=f"remove it from reservation {tray.reservation_id} first",
        )


def _of_tenant(
    conn: sa.Connection, tenant_id: str, now: float, condition: sa.ColumnElement[bool]
) -> Counter[str]:
    mine = [of.id for of in reservations_in_force(conn, now).values() if of.owner == tenant_id]
    if not mine:
        return Counter()
    counted: sa.Select[Any] = (
        sa.select(machine.c.instance_type_id, sa.func.count())
        .where(is_in_reservations, condition)
        .group_by(machine.c.instance_type_id)
    )
    return Counter(dict(map(tuple, conn.execute(counted, {"reservations": mine}))))


# Trays that get no instance.


UNLISTED = -1
"""Recorded as the health of a GPU that the controller does not list; no `GpuHealth` has this number."""

# Built once: every new instance runs these.
_is_unlisted = machine_gpu.c.health == UNLISTED
is_shut = sa.or_(
    is_in_foreign_partition, machine.c.id.in_(sa.select(machine_gpu.c.machine_id).where(_is_unlisted))
)
"""Whether a row of the machine table is a tray that is shut."""
_UNLISTED_GPUS = (
    sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine.c.rack, machine.c.slot)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(_is_unlisted)
    .order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)
)

FOREIGN_FIX = "have the operator of the site adopt or release the partitions that it did not make"
UNLISTED_FIX = "have the operator of the site find out why switch controllers do not list all GPUs"


class ShutTray(msgspec.Struct, frozen=True):
    """Why a tray is shut, and what would help; both for tenants to read."""

    why: str
    fix: str


def shut_trays(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, ShutTray]:
    """The trays of `machine_ids` that are shut; of all machines where None."""
    found = {
        machine_id: ShutTray(foreign_partition_text([tray.partition_id for tray in trays]), FOREIGN_FIX)
        for machine_id, trays in ownership.foreign_trays(conn, machine_ids).items()
    }
    for machine_id, gpus in unlisted_gpus(conn, machine_ids).items():
        found.setdefault(machine_id, ShutTray(unlisted_text(gpus), UNLISTED_FIX))
    return found


def unlisted_gpus(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, dict[int, PartName]]:
    """Machine -> device instance and name of its unlisted GPUs; of all machines where None."""
    wanted = _UNLISTED_GPUS
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, dict[int, PartName]] = defaultdict(dict)
    for machine_id, module_id, rack, slot in conn.execute(wanted):
        found[machine_id][module_id - 1] = PartName(rack, slot, gpu=module_id - 1)
    return dict(found)


def unlisted_text(gpus: Iterable[int]) -> str:
    """Why a tray with unlisted GPUs is not free, for tenants: they know its machine, and not its rack."""
    return f"{' and '.join(f'gpu-{number}' for number in gpus)} not listed by the switch controller"
