"""Trays that get no instance, whatever a tenant accepts: its GPUs could not join a partition now.

A tray is shut while a partition that the site did not make holds a GPU of it (`partitions.foreign`), and
while the newest valid reading of its domain lists GPUs of the tray, but not all that are recorded there. The
inventory sync marks an unlisted GPU in place of its last health, which says nothing any more. A tray of
which no GPU is listed is missing, which its machine says. While a domain cannot be read, its trays stay as
they were last seen.
"""

from collections import defaultdict
from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.partitions import foreign
from rackloom.carve.partitions.foreign import foreign_partition_text, is_in_foreign_partition
from rackloom.carve.store.schema import machine, machine_gpu

UNLISTED = -1
"""Recorded as the health of a GPU that the controller does not list; no `GpuHealth` has this number."""

# Built once: every new instance runs these.
_is_unlisted = machine_gpu.c.health == UNLISTED
is_shut = sa.or_(
    is_in_foreign_partition, machine.c.id.in_(sa.select(machine_gpu.c.machine_id).where(_is_unlisted))
)
"""Whether a row of the machine table is a tray that is shut."""
_UNLISTED_GPUS = (
    sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id)
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
        for machine_id, trays in foreign.foreign_trays(conn, machine_ids).items()
    }
    for machine_id, devices in unlisted_gpus(conn, machine_ids).items():
        found.setdefault(machine_id, ShutTray(unlisted_text(devices), UNLISTED_FIX))
    return found


def unlisted_gpus(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, list[int]]:
    """Machine -> device instances of its unlisted GPUs; of all machines where None."""
    wanted = _UNLISTED_GPUS
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, list[int]] = defaultdict(list)
    for machine_id, module_id in conn.execute(wanted):
        found[machine_id].append(module_id - 1)
    return dict(found)


def unlisted_text(devices: Collection[int]) -> str:
    """Why a tray with unlisted GPUs is not free."""
    return f"GPU {' and '.join(map(str, devices))} not listed by the switch controller"
