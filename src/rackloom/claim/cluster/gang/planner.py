"""The planner that gangs are placed with: that of `claim/place`."""

from rackloom.claim.place.gang import plan_gang
from rackloom.claim.place.replace import replace_member
from rackloom.claim.place.values import Gang, Plan, Site


class PlacePlanner:
    """A `Planner`."""

    def plan_gang(self, site: Site, gang: Gang) -> Plan:
        """A seat for every member. Raises Refused with the nearest fix."""
        return plan_gang(site, gang)

    def replace_member(self, site: Site, gang: Gang, plan: Plan, lost: str) -> Plan:
        """The same with the members of `lost` on a spare tray of its clique. Raises Refused."""
        return replace_member(site, gang, plan, lost)
