"""A gang as the planner takes it: from what its pods ask for. Pure."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.claimed import wanted
from rackloom.claim.cluster.gang.counted import Claims
from rackloom.claim.cluster.gang.demand import group_gpus
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.scene import Scene
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Group, Plan
from rackloom.errors import Refused


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner is asked."""

    gang: Gang
    kinds: Mapping[str, Claims]
    """What each member claims, by `Group.devices`."""


def request_of(view: View, scene: Scene) -> Request:
    """Read the pods of a gang; its trays are reserved whole, so it wants empty ones. Raises Refused."""
    wish, known = view.wish(), scene.known
    groups, kinds = [], {}
    for name, size in wish.sizes:
        members = _of_group(view, name)
        claimed = wanted(members, known)
        if claimed is not None:
            kinds[claimed.kind] = claimed.claims
        gpus = group_gpus(members, known, scene.site.trays)
        devices = None if claimed is None else claimed.kind
        groups.append(Group(name=name, members=size, gpus=gpus, devices=devices))
    gang = Gang(
        name=view.key.called,
        groups=tuple(groups),
        priority=max((one.priority for one in view.living), default=0),
        segment=wish.segment,
        spares=wish.spares,
        exclusive=True,
    )
    return Request(gang=gang, kinds=kinds)


def is_asked_by(now: Gang, recorded: Gang) -> bool:
    """Whether a gang still asks for what it was placed with: its pods may have been made anew."""
    return now == replace(recorded, priority=now.priority)


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
