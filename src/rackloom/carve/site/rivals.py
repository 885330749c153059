"""Domains whose controllers list hardware that is another domain's: which are to be compared.

A GPU is on one switch fabric, so two domain uuids for one tray are two that cannot both be right. Who has the
tray in the records is found by its place; once two are in dispute, each names the other.
"""

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site.tables import domain_dispute, machine

# Built once: every pass that learns something asks these.
_ELSEWHERE = sa.select(machine.c.chassis_serial, machine.c.slot, machine.c.domain).where(
    machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)),
    machine.c.domain != sa.bindparam("domain"),
)
_rival = domain_dispute.c.rival
_of: sa.BindParameter[str] = sa.bindparam("domain")
_STANDING = sa.union(
    sa.select(domain_dispute.c.rival).where(
        domain_dispute.c.domain == _of, domain_dispute.c.rival.is_not(None)
    ),
    sa.select(domain_dispute.c.domain).where(domain_dispute.c.rival == _of),
)


def listed_by(conn: sa.Connection, seen: Observation) -> frozenset[str]:
    """Other domains that have machines, in the records, where `seen` lists GPUs."""
    places = {(gpu.chassis_serial, gpu.slot) for gpu in seen.gpus}
    serials = {serial for serial, _ in places}
    rows = conn.execute(_ELSEWHERE, {"serials": list(serials), "domain": seen.domain})
    return frozenset(row.domain for row in rows if (row.chassis_serial, row.slot) in places)


def standing(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Domains with which `domain` is in dispute about hardware."""
    return frozenset(conn.execute(_STANDING, {"domain": domain}).scalars())
