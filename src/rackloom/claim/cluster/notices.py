"""Which changes of a ComputeDomain's conditions are worth an event, and how any event is told."""

import msgspec

from rackloom.claim.domain.names import SPANS_CLIQUES
from rackloom.claim.domain.objects import Condition, Status
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.events import Recorder, Severity

_BAD = {("Degraded", "True"), (SPANS_CLIQUES, "True")}
"""Types and statuses of conditions that are told as warnings when they begin."""


class Notice(msgspec.Struct, frozen=True):
    """An event to record."""

    warning: bool
    reason: str
    message: str


async def tell(recorder: Recorder, regarding: Object, notice: Notice) -> None:
    """Record it about an object."""
    severity: Severity = "Warning" if notice.warning else "Normal"
    await recorder.record(regarding, severity, notice.reason, notice.message)


def notices(old: Status, new: Status) -> tuple[Notice, ...]:
    """One notice for each condition that turned into something a person may want to know."""
    told = (_notice(old.condition(one.type), one) for one in new.conditions)
    return tuple(notice for notice in told if notice is not None)


def _notice(old: Condition | None, new: Condition) -> Notice | None:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    if (new.type, new.status) in _BAD or new.reason == "DeletionHeld":
        return Notice(True, new.reason, new.message)
    if new.type != "Ready":
        return None
    if new.status == "True":
        return Notice(False, new.reason, new.message)
    was_ready = old is not None and old.status == "True"
    return Notice(True, new.reason, new.message) if was_ready else None
