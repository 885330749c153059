"""Whether an observation only repeats the one before it, and nothing waited for it.

A site at rest is read every minute and says the same every minute. Statuses are worked out of facts and
records; where neither has changed they stand, and only the time of the newest observation grows. Every doubt
is answered with no: the whole work is then done, which is always right.
"""

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site import knowledge
from rackloom.carve.site.tables import (
    drain,
    endpoint,
    instance,
    logical_partition,
    machine,
    machine_gpu,
    observation,
    operation,
    owned_partition,
    site,
)
from rackloom.carve.site.values import Status
from rackloom.topology.facts import Source

AFRESH_SECONDS = 600.0
"""The whole work is done at least this often, so that nothing that was overlooked stays."""

_endpoint: sa.BindParameter[str] = sa.bindparam("endpoint")
_domain: sa.BindParameter[str] = sa.bindparam("domain")
_serials: sa.BindParameter[str] = sa.bindparam("serials", expanding=True)

_last = endpoint.c.updated
_here = sa.select(machine.c.id).where(machine.c.domain == _domain)
_held = sa.select(instance.c.id).join(machine, machine.c.id == instance.c.machine_id)
_held = _held.where(machine.c.domain == _domain)
_gpus = sa.select(machine_gpu.c.guid).join(machine, machine.c.id == machine_gpu.c.machine_id)
_drains = sa.select(drain.c.id).join(machine, machine.c.id == drain.c.machine_id)

_restless = sa.or_(
    sa.exists().where(operation.c.endpoint_id == _endpoint, operation.c.observed_after.is_(None)),
    sa.exists().where(owned_partition.c.domain == _domain, owned_partition.c.partition_id.is_(None)),
    sa.exists().where(logical_partition.c.status == Status.DELETING),
    sa.exists().where(site.c.updated > _last),
    _here.where(sa.or_(machine.c.status != Status.READY, machine.c.updated > _last)).exists(),
    _held.where(sa.or_(instance.c.status != Status.READY, instance.c.updated > _last)).exists(),
    _drains.where(machine.c.domain == _domain, drain.c.ended.is_(None)).exists(),
    _gpus.where(
        machine.c.domain == _domain, sa.func.coalesce(machine_gpu.c.source, "") != Source.NMX.value
    ).exists(),
    sa.exists().where(
        machine.c.chassis_serial.in_(_serials), sa.func.coalesce(machine.c.domain, "") != _domain
    ),
)

_QUESTION = (
    sa.select(observation.c.facts, _last, _restless.label("restless"))
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(
        observation.c.endpoint_id == _endpoint,
        observation.c.unknown_since.is_(None),
        endpoint.c.domain == _domain,
    )
)
"""Built once: it is asked for each domain in each pass."""


def is_repeat(conn: sa.Connection, endpoint_id: str, seen: Observation, now: float) -> bool:
    """Whether `seen` shows what this endpoint alone showed of the domain before, and nothing waits there."""
    serials = sorted({gpu.chassis_serial for gpu in seen.gpus})
    asked = {"endpoint": endpoint_id, "domain": seen.domain, "serials": serials}
    row = conn.execute(_QUESTION, asked).one_or_none()
    if row is None or row.restless or now - row.updated > AFRESH_SECONDS:
        return False
    return bool(row.facts == knowledge.encoded(seen))
