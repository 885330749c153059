"""What is still to come of a gang whose Jobs need fewer pods than they began with. Pure.

Jobs that were suspended when some of their pods had succeeded make the others anew, and no more: who waited
for the whole gang then would wait for ever. What counts is the word of the Jobs, also where the pods that
succeeded are gone; a group of which nobody is known to make all pods is waited for whole.
"""

from collections import Counter
from typing import TypeGuard

import msgspec
from msgspec.structs import replace

from rackloom.claim.cluster.gang.conditions import PLACED
from rackloom.claim.cluster.gang.makers import Maker
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.gang.wishes import Wish
from rackloom.claim.kube.timestamps import seconds_of
from rackloom.errors import Refused


class _Work(msgspec.Struct, frozen=True):
    """A Job, and the group of its pods: it has one template."""

    group: str
    job: Maker
    over: int

    @property
    def left(self) -> int:
        """Pods that it has at a time from now on."""
        if self.job.over_since is not None:
            return 0
        return max(min(self.job.parallelism, self.job.completions - self.over), 0)


def wish_of(view: View) -> Wish:
    """What the pods ask for, but no more members than their Jobs still make. Raises Refused."""
    wish, works = view.wish(), _of_one_run(_works(view))
    left = ((name, _left(size, [one for one in works if one.group == name])) for name, size in wish.sizes)
    sizes = tuple((name, size) for name, size in left if size)
    return replace(wish, sizes=sizes) if sizes else wish


def are_fewer(view: View) -> bool:
    """Whether their Jobs make fewer pods than the gang had at first."""
    try:
        return wish_of(view) != view.wish()
    except Refused:
        return False


def lacks_members(view: View) -> bool:
    """Whether pods are missing of the whole gang."""
    try:
        sizes = view.wish().sizes
    except Refused:
        return False
    here = Counter(one.group for one in view.living if not one.going)
    return any(here[name] < size for name, size in sizes)


def owners_may_tell(view: View) -> bool:
    """Whether it matters how many pods are still to come."""
    return any(one.ended for one in view.members) or lacks_members(view)


def asks_for_fewer(view: View, settings: GangSettings) -> bool:
    """Whether to ask the owners of the pods how many are still to come.

    Pods of a gang that has just begun come one by one: nobody is asked at each of them.
    """
    if view.makers is not None or not lacks_members(view):
        return False
    were_fewer = view.looked is not None and view.looked.are_fewer
    return were_fewer or view.now >= asked_for_fewer_at(view, settings)


def asked_for_fewer_at(view: View, settings: GangSettings) -> float:
    """When the owners are asked, in seconds since the epoch: ever less often while they say the same."""
    if view.looked is not None:
        return view.looked.again_at(settings.again)
    placed = None if view.record is None else view.record.condition(PLACED)
    since = None if placed is None else seconds_of(placed.last_transition_time)
    return (since or view.now) + settings.again


def _left(size: int, works: list[_Work]) -> int:
    """Members that are still to come of a group."""
    if sum(one.job.at_once for one in works) < size:
        return size
    return min(size, sum(one.left for one in works))


def _works(view: View) -> tuple[_Work, ...]:
    """The Jobs that make the pods; none where one of them does not say, or others make pods too."""
    pods: dict[str, list[Member]] = {}
    for one in view.members:
        pods.setdefault("" if one.job is None else one.job.uid, []).append(one)
    makers = view.makers or {}
    found = ((makers.get(uid), mine) for uid, mine in pods.items())
    works = [_Work(mine[0].group, job, job.over(mine)) for job, mine in found if _says(job)]
    return tuple(works) if len(works) == len(pods) else ()


def _says(job: object) -> TypeGuard[Maker]:
    """Whether it is known what becomes of a Job: not of one that is on its way out."""
    return isinstance(job, Maker) and not (job.is_ending and job.over_since is None)


def _of_one_run(works: tuple[_Work, ...]) -> tuple[_Work, ...]:
    """Without Jobs that were over when another one was made: those are of an earlier run of the gang."""
    last = max((one.job.created for one in works), default="")
    return tuple(one for one in works if one.job.over_since is None or one.job.over_since > last)
