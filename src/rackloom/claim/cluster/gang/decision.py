"""What is decided about one gang."""

import msgspec

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.gang import conditions
from rackloom.claim.cluster.gang.conditions import BOUND, RESERVED, said
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.notices import Notice
from rackloom.claim.domain.objects import Condition


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one gang, in order, and what to say of it then."""

    actions: tuple[Action, ...] = ()
    conditions: tuple[Condition, ...] | None = None
    """None: what is said already is true."""
    notices: tuple[Notice, ...] = ()
    asks_planner: bool = False
    again: float | None = None
    """Seconds after which time alone may change something."""
    takes_back: bool = False
    """Trays are freed, pods deleted or the plan is given up: for nothing that a cache may not know yet.

    So it is where a gang waits for pods that its Job may not make any more.
    """


def telling(
    view: View,
    told: tuple[Condition, ...],
    actions: tuple[Action, ...],
    *,
    asks_planner: bool = False,
    again: float | None = None,
    takes_back: bool = False,
) -> Decision:
    """A decision that says this of the gang, if it is news."""
    whole = conditions.dated(view, _all_of_them(told))
    same = view.record is not None and view.record.conditions == whole
    return Decision(
        actions=actions,
        conditions=None if same else whole,
        notices=() if same else conditions.notices(view, whole),
        asks_planner=asks_planner,
        again=again,
        takes_back=takes_back,
    )


def _all_of_them(told: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """A gang without a plan has nothing reserved and nobody bound."""
    given = {one.type for one in told}
    rest = (said(type_, "False", "NotPlaced", "") for type_ in (RESERVED, BOUND) if type_ not in given)
    return (*told, *rest)
