"""The plan that the reconciler would execute in a domain now, if the domain were not paused."""

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records
from rackloom.core.partitions.domain import PartitionPlan
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.errors import Refused


def plan_of_domain(conn: sa.Connection, domain: str, valid_from: float = 0.0) -> PartitionPlan:
    """The checked plan from the newest observation. Refused while the domain cannot be read.

    Readings from before `valid_from` do not count.
    """
    known = latest.latest_of_domain(conn, domain, valid_from)
    if known.observation is None:
        raise Refused(
            f"no plan for domain {domain}: {known.operators_doubt}",
            nearest_fix="make its switch controller reachable, then plan again",
        )
    # A paused domain is planned as well: an operator reads the plan before resuming.
    intent = msgspec.structs.replace(records.load_intent(conn, domain), paused=None)
    plan = make_plan(intent, known.observation)
    check_plan(plan, intent, known.observation)
    return plan
