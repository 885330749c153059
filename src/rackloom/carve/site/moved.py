"""GPUs that an instance was given in a place, and that a switch controller does not list there any more.

A machine is a place, so the record of a GPU goes where the controller lists it; that an instance lost it is
only told here. Whether it was moved or exchanged shows whether it is listed elsewhere: whoever reads this
looks for it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from rackloom.carve.site.tables import instance
from rackloom.carve.site.tables import moved_gpu as table

Place = tuple[str, int]
"""Machine and module."""


class Lost(NamedTuple):
    """A GPU that an instance had in a place, and when another or none was there (seconds since the epoch)."""

    machine_id: str
    module_id: int
    guid: str
    since: float


# Built once: every pass that learns something asks these.
_HELD = sa.select(instance.c.machine_id).where(
    instance.c.machine_id.in_(sa.bindparam("machines", expanding=True))
)
_LOST = (
    sa.select(table.c.machine_id, table.c.module_id, table.c.guid, table.c.since)
    .join(instance, instance.c.machine_id == table.c.machine_id)
    .where(instance.c.created <= table.c.since)
    .order_by(table.c.machine_id, table.c.module_id)
)
_FORGET = sa.delete(table).where(
    table.c.machine_id == sa.bindparam("from_machine"), table.c.module_id == sa.bindparam("from_module")
)
_KEEP = sa.insert(table)


def note(
    conn: sa.Connection, had: Mapping[Place, str | None], listed: Mapping[Place, str], now: float
) -> None:
    """Keep which GPU an instance loses in which place, and forget it when that one is back.

    `had` are the GUIDs of places whose record changes now, `listed` those that a controller lists there;
    called before the records follow. What stood in the place after the GPU that the instance was given is
    not its loss. A GPU that was exchanged is kept too: it may be listed elsewhere later.
    """
    before = {(row.machine_id, row.module_id): row.guid for row in of_instances(conn)}
    back = [place for place, guid in before.items() if listed.get(place) == guid]
    gone = {place: guid for place, guid in had.items() if guid is not None and listed.get(place) != guid}
    lost = _of_held(conn, {place: guid for place, guid in gone.items() if place not in before})
    if ended := [*back, *lost]:
        conn.execute(_FORGET, [{"from_machine": one[0], "from_module": one[1]} for one in ended])
    if lost:
        told = [{"machine_id": at[0], "module_id": at[1], "guid": guid} for at, guid in lost.items()]
        conn.execute(_KEEP, [{**one, "since": now} for one in told])


def _of_held(conn: sa.Connection, gone: Mapping[Place, str]) -> dict[Place, str]:
    if not gone:
        return {}
    held = set(conn.execute(_HELD, {"machines": list({place[0] for place in gone})}).scalars())
    return {place: guid for place, guid in gone.items() if place[0] in held}


def of_instances(conn: sa.Connection) -> list[Lost]:
    """What was lost by instances that still hold the machine."""
    return list(map(Lost._make, conn.execute(_LOST).all()))
