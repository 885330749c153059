"""What the gang controller counts for Prometheus, beside the conditions that people read.

All reasons exist with zero from the start, so that the first refusal is a change and not a new series.
"""

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.claim.cluster.actions import Action, Delete
from rackloom.claim.cluster.gang.conditions import API_REFUSED, BAD, PLACED
from rackloom.claim.cluster.gang.record import record_of
from rackloom.claim.cluster.notices import Notice
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import POD

STATES = (
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
_SECONDS = (2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""From a cluster with room, where the settling takes most, to a day in the queue."""


class GangMeter:
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
            buckets=_SECONDS,
            registry=registry,
        )
        self._gangs = Gauge(
            "rackloom_gangs", "Gangs, by the reason of their condition Placed.", ["reason"], registry=registry
        )
        for reason in (*BAD, API_REFUSED):
            self._refusals.labels(reason)

    def told(self, notices: Iterable[Notice]) -> None:
        """Events were recorded about a gang."""
        for notice in notices:
            if notice.warning:
                self._refusals.labels(notice.reason).inc()
            elif notice.reason == PLACED:
                self._placements.inc()

    def acted(self, actions: Iterable[Action]) -> None:
        """Actions were carried out."""
        self._replaced.inc(sum(isinstance(one, Delete) and one.kind == POD for one in actions))

    def let_go(self, seconds: float) -> None:
        """All pods of a gang were let go, so long after the first came."""
        self._seconds.observe(max(seconds, 0.0))

    def page(self, plans: Iterable[Object]) -> bytes:
        """The page that Prometheus reads; `plans` are the GangPlans as they are now."""
        self._count(plans)
        return generate_latest(self._registry)

    def _count(self, plans: Iterable[Object]) -> None:
        placed = (record_of(one).condition(PLACED) for one in plans)
        found = Count(one.reason for one in placed if one is not None)
        for reason in STATES:
            self._gangs.labels(reason).set(found[reason])
