"""Gangs one by one, the most urgent first."""

from collections.abc import Sequence

from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Plan, Site

Plans = dict[str, Plan]
"""By the name of the gang."""


def one_by_one(site: Site, gangs: Sequence[Gang]) -> tuple[Plans, Site]:
    """What fits beside each other, and the site then."""
    plans: Plans = {}
    for gang in sorted(gangs, key=lambda one: -one.priority):
        plan = try_gang(site, gang, Effort())
        if plan is not None:
            plans[gang.name] = plan
            site = reserved(site, gang, plan)
    return plans, site
