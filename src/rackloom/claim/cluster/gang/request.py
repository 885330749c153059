"""A gang as the planner takes it: from what its pods ask for. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.claimed import wanted
from rackloom.claim.cluster.gang.counted import Claims
from rackloom.claim.cluster.gang.demand import Demand, group_demand, whole_tray
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.remaining import wish_of
from rackloom.claim.cluster.gang.scene import Scene
from rackloom.claim.cluster.gang.terms import terms_of
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.gang.wishes import Wish
from rackloom.claim.place.values import Gang, Group, Plan, Site, Terms
from rackloom.errors import Refused


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner is asked."""

    gang: Gang
    kinds: Mapping[str, Claims]
    """What each member claims, by `Group.devices`."""
    whole: Mapping[str, int]
    """Groups whose members take a tray each, and the GPUs that one of them counts."""
    met: Site
    """The site as it is to its members."""


def request_of(view: View, scene: Scene) -> Request:
    """Read the pods of a gang; its trays are reserved whole, so it wants empty ones. Raises Refused."""
    wish, known = wish_of(view), scene.known
    members = {name: _of_group(view, name) for name, _ in wish.sizes}
    terms = terms_of(members)
    demands = {name: group_demand(some, known) for name, some in members.items()}
    met = scene.met(view.living, terms.values())
    whole = _whole(
        view, wish, demands, _as_closed(met, [terms[name] for name, one in demands.items() if one.whole])
    )
    groups, kinds = [], {}
    for name, size in wish.sizes:
        claimed = wanted(members[name], known)
        if claimed is not None:
            kinds[claimed.kind] = claimed.claims
        asked = demands[name]
        gpus = max(asked.gpus, whole) if asked.whole else asked.gpus
        devices = None if claimed is None else claimed.kind
        groups.append(Group(name=name, members=size, gpus=gpus, devices=devices, terms=terms[name]))
    gang = Gang(
        name=view.key.called,
        groups=tuple(groups),
        priority=max((one.priority for one in view.living), default=0),
        segment=wish.segment,
        spares=wish.spares,
        exclusive=True,
    )
    counted = {name: one.gpus for name, one in demands.items() if one.whole}
    return Request(gang=gang, kinds=kinds, whole=counted, met=met)


def site_for(asked: Request, site: Site) -> Site:
    """The site as it is to a gang: where a member takes a tray whole, no second one goes on a larger tray."""
    most = max((one.gpus for one in asked.gang.groups if one.name in asked.whole), default=None)
    if most is None:
        return site
    return Site(tuple(replace(one, gpus=min(one.gpus, most)) for one in site.trays), site.holds)


def is_asked_by(asked: Request, recorded: Gang, plan: Plan) -> bool:
    """Whether a gang still asks for what it was placed with: its pods may have been made anew.

    How many GPUs a whole tray has may be another number by now, since other trays are there: it has one.
    """
    now, had = asked.gang, {one.name: one.gpus for one in recorded.groups}
    groups = tuple(_as_placed(one, had.get(one.name, 0), asked) for one in now.groups)
    alone = Counter(seat.tray for seat in plan.seats if seat.group in asked.whole)
    same = replace(now, groups=groups) == replace(recorded, priority=now.priority)
    return same and all(members == 1 for members in alone.values())


def _as_placed(group: Group, had: int, asked: Request) -> Group:
    has_room = group.name in asked.whole and had >= max(asked.whole[group.name], 1)
    return replace(group, gpus=had) if has_room else group


def _whole(view: View, wish: Wish, demands: Mapping[str, Demand], site: Site) -> int:
    """GPUs of a tray that is taken whole."""
    taken = {one.tray for one in site.holds if one.owner != view.key.called}
    members = sum(size for name, size in wish.sizes if demands[name].whole)
    together = members if wish.segment is None else min(wish.segment, members)
    gpus = max((one.gpus for one in demands.values()), default=0)
    return whole_tray(site.trays, together, gpus, taken) if together else 0


def _as_closed(site: Site, terms: Iterable[Terms | None]) -> Site:
    """The site with the trays shut that are closed to members with one of the terms."""
    wheres = {one.where for one in terms if one is not None}
    trays = (
        replace(one, shut=one.shut or "closed") if wheres & one.closed.keys() else one for one in site.trays
    )
    return Site(tuple(trays), site.holds)


def claimed_by_groups(view: View, gang: Gang, scene: Scene) -> dict[str, Claims]:
    """What each member of a placed gang claims, by the kinds of its record. Raises Refused."""
    found = {}
    for group in gang.groups:
        claimed = None if group.devices is None else wanted(_of_group(view, group.name), scene.known)
        if group.devices is not None and claimed is not None:
            found[group.devices] = claimed.claims
    return found


def planned_within(room: int, gang: Gang, plan: Callable[[Gang], Plan]) -> Plan:
    """The plan of a gang that keeps at most `room` spare trays; `plan` makes one. Raises Refused.

    What a pod requests counts against a ResourceQuota, but a spare tray has no pod. The more spares, the
    longer the search: none is made for more than there is room for, which one clique would fill.
    """
    found = plan(gang) if gang.spares <= room else None
    if found is not None and len(found.spares) <= room:
        return found
    kept = f"{gang.spares} spare trays or more" if found is None else f"{len(found.spares)} spare trays"
    fewer = (replace(gang, spares=number) for number in range(min(gang.spares - 1, room), -1, -1))
    fits = next(one.spares for one in fewer if len(plan(one).spares) <= room)
    raise Refused(
        f"the gang would keep {kept}, and its namespace may keep {room} more",
        nearest_fix=f"set annotation {marks.SPARES_ANNOTATION} to {fits}",
    )


def _of_group(view: View, name: str) -> tuple[Member, ...]:
    return tuple(sorted((one for one in view.living if one.group == name), key=lambda one: one.rank))
