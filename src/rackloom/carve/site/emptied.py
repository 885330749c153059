"""A reading that lists no GPU of a domain in which GPUs are recorded: it is no reading of that domain.

A rack does not lose every GPU between two looks, while a controller that has just started, or that does not
lead, answers for its domain before it knows what is in it. Of a domain that the records do not have, none is
expected: it may be empty.
"""

from collections.abc import Iterable

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site.tables import machine, machine_gpu

_RECORDED = (
    sa.select(machine.c.domain, sa.func.count(machine_gpu.c.guid.distinct()))
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(machine.c.domain.in_(sa.bindparam("domains", expanding=True)))
    .group_by(machine.c.domain)
)
"""Built once: every pass over a standby asks it."""


def why_no_reading(conn: sa.Connection, seen: Iterable[Observation]) -> dict[str, str]:
    """Why what was seen tells nothing of its domain, by domain; of those where it does, nothing."""
    empty = [one.domain for one in seen if not one.gpus]
    if not empty:
        return {}
    recorded = conn.execute(_RECORDED, {"domains": empty}).all()
    return {
        domain: f"the switch controller lists no GPU where {count} are recorded"
        for domain, count in recorded
        if count
    }
