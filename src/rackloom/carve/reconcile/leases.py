"""How long this process may act on an endpoint: as long as its lease is renewed in time.

The deadline is kept on the event loop's own clock, which nobody sets, so a replica that is cut off from the
database stops by itself before another one begins.
"""

import asyncio
import math

from rackloom.carve.site.leases import Lease

LEASE_SECONDS = 5.0
"""A replica that is silent for so long is replaced."""
RENEW_SECONDS = 1.5
"""Endpoints that are new or gone are noticed at the same time."""
ANSWER_SECONDS = 1.5
"""How long the database may take to renew: two attempts fit into a lease even if the first is lost."""


class Hold:
    """A lease, and the task that works under it: it is cancelled at the deadline unless that is moved."""

    def __init__(self, lease: Lease, deadline: float) -> None:
        """`deadline` is in seconds of the running event loop's clock; infinite for a lease without end."""
        self.lease = lease
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def guard(self, task: "asyncio.Task[None]") -> None:
        """Cancel `task` at the deadline."""
        self._task = task
        task.add_done_callback(lambda _: self._stop_timer())
        self.extend(self._deadline)

    def extend(self, deadline: float) -> None:
        """Move the deadline."""
        self._stop_timer()
        self._deadline = deadline
        if self._task is not None and deadline < math.inf:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._task.cancel)

    def has_ended(self) -> bool:
        """Whether the deadline has passed, also when this process was stopped and let run on."""
        return asyncio.get_running_loop().time() >= self._deadline

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
