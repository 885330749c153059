"""What is still to come of a gang whose Job needs fewer pods than it began with. Pure.

A Job that was suspended when some of its pods had succeeded makes the others anew, and no more: who waited
for the whole gang then would wait for ever.
"""

from msgspec.structs import replace

from rackloom.claim.cluster.gang.makers import Maker
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.gang.wishes import Wish


def wish_of(view: View) -> Wish:
    """What the pods ask for, but no more members than their Job still makes. Raises Refused."""
    wish = view.wish()
    (name, size), *others = wish.sizes
    maker = _only_maker(view)
    if others or maker is None or not maker.makes_all_of(size):
        return wish
    left = maker.completions - maker.over(view.members)
    return replace(wish, sizes=((name, left),)) if 0 < left < size else wish


def may_be_less(view: View) -> bool:
    """Whether it is worth asking their Job how many pods are still to come."""
    return view.makers is None and any(one.is_done for one in view.members)


def _only_maker(view: View) -> Maker | None:
    """The Job that makes all pods of the gang."""
    makers = view.makers or {}
    found = {None if one.job is None else makers.get(one.job.uid) for one in view.members}
    maker = next(iter(found)) if len(found) == 1 else None
    return maker if isinstance(maker, Maker) else None
