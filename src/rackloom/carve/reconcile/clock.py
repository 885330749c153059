"""The clock of a site: what was later is dated later.

Whether an observation answers a wish is decided by their times, so a machine's clock that is set back would
make old observations answer new wishes, and keep new ones from counting until it has caught up. A running
process therefore counts on from where it started, and a process that starts does so after the newest moment
in the records.
"""

from collections.abc import Callable

import sqlalchemy as sa

from rackloom.carve.site.tables import instance, nvlink_interface, observation, operation

_MOMENTS = (
    observation.c.observed_at,
    operation.c.started,
    instance.c.intent_at,
    nvlink_interface.c.intent_at,
)


class SteadyClock:
    """Seconds since the epoch as they were at the start, and since then as `monotonic` counts them.

    `floor` is the newest moment of the past that must stay in the past.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float], floor: float) -> None:
        self._monotonic = monotonic
        self._offset = max(wall(), floor) - monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._offset + self._monotonic()


def newest_moment(conn: sa.Connection) -> float:
    """The newest time that is recorded of a wish, an operation or an observation; 0 where there is none."""
    newest = [conn.execute(sa.select(sa.func.max(column))).scalar_one() for column in _MOMENTS]
    return max((moment for moment in newest if moment is not None), default=0.0)
