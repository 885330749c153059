"""Why a wanted GPU cannot join its partition, and what would unblock it."""

from collections import defaultdict

import msgspec

from rackloom.carve.plan.layout import Layout
from rackloom.carve.plan.values import Blocked, GpuHealth, Intent, Observation, ObservedPartition
from rackloom.carve.plan.wishes import Wishes


class Blocker(msgspec.Struct, frozen=True, order=True):
    """A reason and its nearest fix."""

    reason: str
    fix: str | None


class Blockers:
    """Reasons collected while planning; GPUs with the same reason are told of together."""

    def __init__(self) -> None:
        self._guids: dict[Blocker, set[int]] = defaultdict(set)

    def add(self, blocker: Blocker, guids: frozenset[int]) -> None:
        """Note that `guids` cannot be served."""
        if guids:
            self._guids[blocker] |= guids

    def told(self) -> tuple[Blocked, ...]:
        """All of them, in canonical order."""
        told = [
            Blocked(guids=tuple(sorted(guids)), reason=blocker.reason, fix=blocker.fix)
            for blocker, guids in self._guids.items()
        ]
        return tuple(sorted(told, key=lambda one: (one.guids, one.reason)))


NOT_MANAGED = Blocker(
    "the GPU is on no machine that the site knows in this domain", "register its machine with the site"
)
NOT_OBSERVED = Blocker(
    "the switch controller does not list the GPU: its tray is absent, off, or was swapped",
    "bring the tray back, or move the instance to another machine",
)
NO_NVLINK = Blocker(
    "the switch controller reports GPU health NO_NVLINK", "repair the tray, or move the instance"
)


def read_blockers(
    intent: Intent, observation: Observation, wishes: Wishes, layout: Layout
) -> dict[int, Blocker]:
    """The GPUs that somebody wants and that cannot be put where they are wanted."""
    health = {gpu.guid: gpu.health for gpu in observation.gpus}
    recorded = {one.name for one in intent.owned}
    found = {guid: _contradictory(reason) for guid, reason in wishes.contradictory.items()}
    for guid, logical_partition in wishes.partition_of.items():
        home = layout.home.get(logical_partition)
        if guid not in intent.managed:
            found[guid] = NOT_MANAGED
        elif guid not in health:
            found[guid] = NOT_OBSERVED
        elif guid in layout.untouchable:
            partition = layout.untouchable[guid]
            found[guid] = _held_elsewhere(partition, ours=partition.name in recorded)
        elif health[guid] is GpuHealth.NO_NVLINK and not (home and guid in home.wanted):
            found[guid] = NO_NVLINK
    return found


def _contradictory(reason: str) -> Blocker:
    return Blocker(reason, "assign the GPU to one logical partition of one tenant")


def _held_elsewhere(partition: ObservedPartition, *, ours: bool) -> Blocker:
    if ours:
        return Blocker(
            f"partition {partition.name!r} is location-based, and the site only makes GUID-based ones: "
            "another hand made it, and NMX-C fixes the type at creation",
            "delete that partition on the switch controller",
        )
    # By number: the tenant reads this, and the name of a partition that is not its own says whose it is.
    return Blocker(
        f"the GPU is in partition {partition.id}, which the site did not make",
        "adopt the partition, or release the GPU from it on the switch controller",
    )
