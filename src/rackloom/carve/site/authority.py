"""What of the hardware a provider operates: the machines of its sites, and what those are wired to.

A domain or chassis in which no machine of anybody is known belongs to every provider that has a site:
somebody has to be able to register it. Everything else is answered as if it did not exist.
"""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import endpoint, machine, site


def domains(provider_id: str) -> sa.Select[Any]:
    """Domain uuids that the provider operates."""
    known = sa.union(
        sa.select(machine.c.domain).where(machine.c.domain.is_not(None)),
        sa.select(endpoint.c.domain).where(endpoint.c.domain.is_not(None)),
    ).subquery()
    return sa.select(known.c.domain).where(
        _has_site(provider_id), ~_of_others(provider_id, machine.c.domain == known.c.domain)
    )


def operates_chassis(provider_id: str, chassis_serial: sa.ColumnElement[str] | str) -> sa.ColumnElement[bool]:
    """Whether the provider may say which controller speaks for a chassis."""
    others = _of_others(provider_id, machine.c.chassis_serial == chassis_serial)
    return sa.and_(_has_site(provider_id), ~others)


def operates_machine(provider_id: str) -> sa.ColumnElement[bool]:
    """Whether a row of the machine table is at a site of the provider."""
    return machine.c.site_id.in_(sa.select(site.c.id).where(site.c.provider_id == provider_id))


def check_domain(conn: sa.Connection, provider_id: str, domain: str) -> None:
    """Refuse a domain that the provider does not operate."""
    mine = domains(provider_id).subquery()
    if conn.execute(sa.select(mine.c.domain).where(mine.c.domain == domain)).first() is None:
        raise not_found("Could not find NVLink Domain with specified ID")


def check_chassis(conn: sa.Connection, provider_id: str, chassis_serial: str) -> None:
    """Refuse a chassis that holds machines of another provider."""
    if not conn.execute(sa.select(operates_chassis(provider_id, chassis_serial))).scalar_one():
        raise not_found("Could not find Chassis with specified serial")


def check_machine(conn: sa.Connection, provider_id: str, machine_id: str) -> None:
    """Refuse a machine of another provider."""
    mine = sa.select(machine.c.id).where(machine.c.id == machine_id, operates_machine(provider_id))
    if conn.execute(mine).first() is None:
        raise not_found("Could not find Machine with specified ID")


def _has_site(provider_id: str) -> sa.ColumnElement[bool]:
    return sa.exists().where(site.c.provider_id == provider_id)


def _of_others(provider_id: str, same: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    theirs = sa.select(machine.c.id).join(site, site.c.id == machine.c.site_id)
    return theirs.where(same, site.c.provider_id != provider_id).correlate_except(machine, site).exists()
