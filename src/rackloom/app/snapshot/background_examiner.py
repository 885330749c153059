"""Runs the doctor beside a service whose snapshots come faster than an examination takes.

All checks look at all racks, so they take longer than a reading in which little changed. `Examiner` runs
one examination at a time in a thread, at most every 20 seconds, and answers with the newest findings.
Findings more than 30 seconds away from a snapshot are not shown beside it; it waits for its own. While
the next snapshot is made and drawn (`halted`), no new check begins, for one second at most, so that the
thread does not compete with the drawing.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.incremental import JoinedShares
from rackloom.core.diagnosis.snapshot import SiteSnapshot

EVERY_SECONDS = 20.0
"""Seconds between two examinations, at least."""
OLDEST_SECONDS = 30.0
"""Seconds by which findings may be older than the snapshot beside which they are shown."""
DELAY_SECONDS = 0.25
"""Seconds before an examination starts, in which the snapshot is drawn first."""
LONGEST_HALT_SECONDS = 1.0
"""Seconds for which a check waits at most while the next snapshot is made and drawn."""


class Examination(msgspec.Struct, frozen=True):
    """The findings of one snapshot."""

    at: float
    findings: tuple[Finding, ...]


class Examiner:
    """Examines a site's snapshots, one at a time. `news` counts the changes of the findings."""

    def __init__(self) -> None:
        self.news = 0
        self._newest: Examination | None = None
        self._work: asyncio.Task[Examination] | None = None
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Within the context, an examination begins no check."""
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    async def newest(self, snapshot: SiteSnapshot, joined: JoinedShares) -> Examination:
        """The newest findings; starts an examination of `snapshot` if they are old.

        `joined` are the chains of `snapshot`.
        """
        known = self._newest
        self._gather()
        shown = known is not None and abs(snapshot.at - known.at) <= OLDEST_SECONDS
        if self._work is None and (known is None or abs(snapshot.at - known.at) >= EVERY_SECONDS):
            self._work = asyncio.create_task(self._examine(snapshot, joined, DELAY_SECONDS if shown else 0.0))
        if known is not None and shown:
            return known
        work = self._work
        assert work is not None  # noqa: S101 (begun above, or before)
        await asyncio.wait([work])
        self._gather()
        return work.result()

    def _gather(self) -> None:
        """Drop an examination that has ended. Raises its error, if it failed."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()

    async def _examine(self, snapshot: SiteSnapshot, joined: JoinedShares, after: float) -> Examination:
        await asyncio.sleep(after)
        # `joined.chains` sorts the GPUs of the whole site: in the thread as well.
        findings = await asyncio.to_thread(lambda: examine(snapshot, joined.chains, between=self._wait))
        found = Examination(snapshot.at, findings)
        self.news += self._newest is None or self._newest.findings != found.findings
        self._newest = found
        return found

    def _wait(self) -> None:
        self._may_go_on.wait(LONGEST_HALT_SECONDS)
