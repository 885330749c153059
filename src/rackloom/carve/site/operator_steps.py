"""The record of what operators did by hand: who, what, to what, and why."""

from enum import StrEnum

import msgspec
import sqlalchemy as sa

from rackloom.carve.site.tables import operator_step as table


class Step(StrEnum):
    """What an operator can do to a domain, a machine, a partition or an endpoint."""

    PAUSE = "pause"
    RESUME = "resume"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    END_DRAIN = "end-drain"
    FORCE_DELETE = "force-delete"
    ADOPT = "adopt"
    RELEASE = "release"
    CREATE_ENDPOINT = "create-endpoint"
    UPDATE_ENDPOINT = "update-endpoint"
    DELETE_ENDPOINT = "delete-endpoint"


class Order(msgspec.Struct, frozen=True):
    """Who asks, why, and when (seconds since the epoch)."""

    by: str
    reason: str
    now: float


def record(conn: sa.Connection, step: Step, subject: str, domain: str | None, order: Order) -> None:
    """Note that `step` was done to `subject` (a domain, machine, partition name or chassis serial)."""
    row = {"step": step, "subject": subject, "domain": domain, "asked_by": order.by, "reason": order.reason}
    conn.execute(sa.insert(table).values(**row, created=order.now))
