"""The door of the planner: one gang, before its pods exist."""

from rackloom.claim.place.refusal.fixes import fixes
from rackloom.claim.place.refusal.shortage import shortage
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_on
from rackloom.claim.place.search.ground import ground_of
from rackloom.claim.place.values import Gang, Plan, Site
from rackloom.errors import Refused


def plan_gang(site: Site, gang: Gang) -> Plan:
    """A seat for every member. Raises Refused with the shortage, and with a fix that was planned, if any."""
    ground, effort = ground_of(site, gang), Effort()
    plan = try_on(ground, gang, effort)
    if plan is None:
        fix = next(fixes(ground, gang, effort), None)
        raise Refused(shortage(ground, gang), nearest_fix=None if fix is None else fix.text)
    return plan
