"""Prometheus metrics of the gang controller.

All reasons exist with zero from the start, so that the first refusal is a change and not a new series.
Counters outlive a process's terms as leader; the gauge of gangs is counted from the cached GangPlans
when it is read.
"""

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.core.gangs.conditions import API_REFUSED, PLACED, WARNING_REASONS
from rackloom.core.gangs.record import read_record
from rackloom.core.kubernetes.objects import POD, DeleteObject, EventNotice, Object, ObjectWrite

PLACED_REASONS = (
    "Placed",
    "Planning",
    "WaitingForMembers",
    "WaitingForClaimTemplates",
    "WaitingForGates",
    "InvalidGang",
    "NotHeld",
    "DoesNotFit",
)
"""Reasons of the condition Placed."""
_UNGATE_BUCKETS = (2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""From a cluster with room, where settling takes most of the time, to a day of waiting."""


class GangMetrics:
    """Counters of one process; they outlive its terms as leader."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._placements = Counter("rackloom_gang_placements", "Gangs that were placed.", registry=registry)
        self._refusals = Counter(
            "rackloom_gang_refusals",
            "Times that a gang was told what is wrong, by reason.",
            ["reason"],
            registry=registry,
        )
        self._replaced = Counter(
            "rackloom_gang_members_replaced",
            "Pods of gangs that were deleted, for their owner to make them anew on another tray or the same.",
            registry=registry,
        )
        self._seconds = Histogram(
            "rackloom_gang_ungate_seconds",
            "From the first pod of a gang until its pods were let go.",
            buckets=_UNGATE_BUCKETS,
            registry=registry,
        )
        self._gangs = Gauge(
            "rackloom_gangs", "Gangs, by the reason of their condition Placed.", ["reason"], registry=registry
        )
        for reason in (*WARNING_REASONS, API_REFUSED):
            self._refusals.labels(reason)

    def reported(self, notices: Iterable[EventNotice]) -> None:
        """Events were recorded about a gang."""
        for notice in notices:
            if notice.warning:
                self._refusals.labels(notice.reason).inc()
            elif notice.reason == PLACED:
                self._placements.inc()

    def acted(self, actions: Iterable[ObjectWrite]) -> None:
        """Writes were executed."""
        self._replaced.inc(sum(isinstance(action, DeleteObject) and action.kind == POD for action in actions))

    def ungated(self, seconds: float) -> None:
        """All pods of a gang were ungated, `seconds` after the first was created."""
        self._seconds.observe(max(seconds, 0.0))

    def render(self, plans: Iterable[Object]) -> bytes:
        """The text that Prometheus scrapes; `plans` are the current GangPlans."""
        placed = (read_record(plan).condition(PLACED) for plan in plans)
        reasons = Count(condition.reason for condition in placed if condition is not None)
        for reason in PLACED_REASONS:
            self._gangs.labels(reason).set(reasons[reason])
        return generate_latest(self._registry)
