"""Trays with GPUs in foreign partitions: recorded with each observation, and left out of placement.

A partition that the site did not make holds its GPUs until an operator adopts or releases it. An instance
on such a tray would wait for as long, so placement uses none. A tray is foreign if a valid reading of its
domain lists one of its GPUs in a partition whose name the records do not have (or in a location-based
partition, which is never the site's). It is the planner's own rule, `foreign_partitions`, that decides.
So a restored backup needs no rule of its own: partitions that were made after the backup are not in its
records, and the first observation shows their trays as foreign.

`update_foreign_trays` records the trays of one domain. It runs when an observation is applied and when
an operator adopts or releases a partition. Placement reads only the table: observations of a large site
are too many to decode for each request, and foreign trays are few. While a domain cannot be read, its
trays stay as they were last seen.
"""

from collections.abc import Collection, Sequence

import msgspec
import sqlalchemy as sa

from rackloom.carve.partitions import ownership
from rackloom.carve.store.rows import delete_rows
from rackloom.carve.store.schema import foreign_tray, machine, machine_gpu
from rackloom.core.partitions.domain import DomainObservation
from rackloom.core.partitions.partition_layout import foreign_partitions


class ForeignTray(msgspec.Struct, frozen=True, order=True):
    """A tray with GPUs in a partition that the site did not make."""

    machine_id: str
    partition_id: int
    name: str
    """Of the partition. It may show whose it is: for operators only."""


# Built once: every new instance, and every pass that applies an observation, runs these.
is_in_foreign_partition = machine.c.id.in_(sa.select(foreign_tray.c.machine_id))
"""Whether a row of the machine table is a foreign tray."""
_ALL = sa.select(foreign_tray.c.machine_id, foreign_tray.c.partition_id, foreign_tray.c.name).order_by(
    foreign_tray.c.machine_id, foreign_tray.c.partition_id
)
_RECORDED_IN_DOMAIN = _ALL.join(machine, machine.c.id == foreign_tray.c.machine_id).where(
    machine.c.domain == sa.bindparam("domain")
)
_MACHINES_OF_GPUS = (
    sa.select(machine_gpu.c.guid, machine_gpu.c.machine_id)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(
        machine.c.domain == sa.bindparam("domain"),
        machine_gpu.c.guid.in_(sa.bindparam("guids", expanding=True)),
    )
)


def update_foreign_trays(conn: sa.Connection, domain: str, readings: Sequence[DomainObservation]) -> None:
    """Record the foreign trays of `domain`, as its valid readings show them.

    A reading that contradicts itself may omit a partition: it adds trays, and removes none.
    """
    names = {owned.name for owned in ownership.owned_partitions(conn, domain)}
    holders = [
        (str(guid), partition)
        for reading in readings
        for guid, partition in foreign_partitions(names, reading).items()
    ]
    parameters = {"domain": domain, "guids": sorted({guid for guid, _ in holders})}
    located = dict(map(tuple, conn.execute(_MACHINES_OF_GPUS, parameters))) if holders else {}
    # One row for each partition of a tray, with the name in the newest reading. PostgreSQL takes no NUL.
    by_key = {
        (located[guid], partition.id): partition.name.replace("\0", "\ufffd")
        for guid, partition in reversed(holders)
        if guid in located
    }
    trays = {ForeignTray(*key, name) for key, name in by_key.items()}
    recorded = set(foreign_trays_in_domain(conn, domain))
    is_certain = not any(reading.uncertain for reading in readings)
    for tray in sorted(recorded - trays):
        if not is_certain and (tray.machine_id, tray.partition_id) not in by_key:
            continue
        delete_rows(conn, foreign_tray, machine_id=tray.machine_id, partition_id=tray.partition_id)
    if new := sorted(trays - recorded):
        conn.execute(sa.insert(foreign_tray), [msgspec.structs.asdict(tray) for tray in new])


def foreign_trays(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, list[ForeignTray]]:
    """Foreign trays with the partitions that hold their GPUs, by number; of all machines where None."""
    wanted = _ALL if machine_ids is None else _ALL.where(foreign_tray.c.machine_id.in_(machine_ids))
    found: dict[str, list[ForeignTray]] = {}
    for machine_id, partition_id, name in conn.execute(wanted):
        found.setdefault(machine_id, []).append(ForeignTray(machine_id, partition_id, name))
    return found


def foreign_trays_in_domain(conn: sa.Connection, domain: str) -> list[ForeignTray]:
    """The foreign trays of `domain`, by machine; one in several partitions is listed with each."""
    return [ForeignTray(*row) for row in conn.execute(_RECORDED_IN_DOMAIN, {"domain": domain})]


def foreign_partition_text(numbers: Collection[int]) -> str:
    """Why a tray is not free. By number, because tenants read it, and a name would show whose it is."""
    listed = " and ".join(map(str, sorted(numbers)))
    return f"in partition {listed}, which the site did not make"
