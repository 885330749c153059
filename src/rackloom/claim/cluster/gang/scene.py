"""The cluster as it bears on one gang. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from rackloom.claim.cluster.gang.claimed import Known
from rackloom.claim.cluster.gang.counted import Claims, Counted
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.neighbours import kept_away
from rackloom.claim.cluster.gang.observe import gang_of
from rackloom.claim.cluster.gang.offers import furnished
from rackloom.claim.cluster.gang.record import GangKey, Record
from rackloom.claim.cluster.gang.site import Objects, seen_from, with_plans
from rackloom.claim.cluster.gang.where import as_met
from rackloom.claim.place.values import Site, Terms


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists, and what they say to one gang."""

    key: GangKey
    site: Site
    """With the names of all owners; it is not told to the gang."""
    objects: Objects
    counted: Counted
    """What was counted before; it speeds up, and changes nothing."""
    spares: int = 0
    """Spare trays that the other gangs of its namespace keep."""

    @property
    def known(self) -> Known:
        """The claims and templates of its namespace."""
        return Known(self.objects, self.key.namespace)

    def met(self, members: Iterable[Member], terms: Iterable[Terms | None]) -> Site:
        """The site as such members of the gang with these terms meet it. Raises Refused."""
        others = (pod for pod in self.objects.pods if gang_of(pod) != self.key)
        nodes = {one["metadata"]["name"]: one for one in self.objects.nodes}
        return as_met(kept_away(self.site, members, others, nodes.values()), terms, nodes)

    def furnished(self, met: Site, kinds: Mapping[str, Claims]) -> Site:
        """That as the gang may see it, with the room for its claims on each tray. Raises Refused."""
        site = furnished(met, self.objects, kinds, self.key.called, self.counted)
        return seen_from(site, self.key.namespace)


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists, and what is the same in them for every gang."""

    objects: Objects
    running: Site
    counted: Counted


def scene_of(key: GangKey, look: Look, records: Iterable[Record]) -> Scene:
    """The scene of a gang, with the plans that are recorded."""
    known = tuple(records)
    others = (one.plan for one in known if one.key.namespace == key.namespace and one.key != key)
    spares = sum(len(plan.spares) for plan in others if plan is not None)
    site = with_plans(look.running, known)
    return Scene(key=key, site=site, objects=look.objects, counted=look.counted, spares=spares)
