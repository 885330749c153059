"""Runs the doctor beside a service, and beside snapshots that may come faster than an examination takes.

`Examiner` runs one examination at a time in a thread and answers with the newest findings. Only parts that
differ from the snapshot examined last are checked again (`reexamination`), so an examination after one
change is quick even on a large site: the snapshot waits for it (`QUICK_SECONDS`), and shows its own
findings. A first examination of a large site, or one after a change of everything, takes longer. Then the
snapshot is shown with the findings of before, and the new ones cause a reading when they are there.

An examination begins when a snapshot differs from the one examined last in more than the times of its
readings, so that a fault is found and a healed one forgotten soon after the event. It also begins every 20
seconds, because some findings depend on the time alone. Changes while an examination runs, or rests, are
examined next, all at once. After an examination that was not quick the examiner rests three times as long
as it took, so that it uses a quarter of one processor at most, however often a site changes.

Findings more than 30 seconds away from a snapshot are not shown beside it. It waits for its own. While
the next snapshot is made and drawn (`halted`), no new check begins, for one second at most, so that the
thread does not compete with the drawing.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.incremental import JoinedShares
from rackloom.core.diagnosis.reexamination import Examined, examine_again
from rackloom.core.diagnosis.snapshot import SiteSnapshot

EVERY_SECONDS = 20.0
"""Seconds between two examinations, at most."""
OLDEST_SECONDS = 30.0
"""Seconds by which findings may be older than the snapshot beside which they are shown."""
QUICK_SECONDS = 0.5
"""An examination that takes no longer delays the snapshot, and is followed by no rest."""
REST = 3.0
"""The rest after an examination that was not quick, as a multiple of its duration."""
DELAY_SECONDS = 0.25
"""Seconds at most before an examination starts, in which the snapshot is drawn first."""
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
        self._known = Examined()
        self._examined: SiteSnapshot | None = None
        self._latest: tuple[SiteSnapshot, JoinedShares] | None = None
        self._work: asyncio.Task[Examination] | None = None
        self._waited_for: asyncio.Task[Examination] | None = None
        self._took = 0.0
        """The duration of the last examination in seconds. The first one, of everything, does not count."""
        self._rest_until = 0.0
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
        """The newest findings. Starts an examination of `snapshot` if it differs, or if they are old.

        `joined` are the chains of `snapshot`.
        """
        known = self._newest
        self._gather()
        self._latest = snapshot, joined
        shown = known is not None and abs(snapshot.at - known.at) <= OLDEST_SECONDS
        is_old = known is None or abs(snapshot.at - known.at) >= EVERY_SECONDS
        if self._work is None and (is_old or self._differs(snapshot)):
            self._begin(self._pause() if shown else 0.0)
        work = self._work
        if known is not None and shown:
            # One snapshot waits for an examination, once: if it is not quick, no other waits for it.
            if work is None or work is self._waited_for or self._took > QUICK_SECONDS:
                return known
            self._waited_for = work
            await asyncio.wait([work], timeout=QUICK_SECONDS)
            self._gather()
            return self._newest or known
        assert work is not None  # noqa: S101 (begun above, or before)
        await asyncio.wait([work])
        self._gather()
        return work.result()

    def _differs(self, snapshot: SiteSnapshot) -> bool:
        """Whether it differs from the snapshot examined last."""
        examined = self._examined
        return examined is None or _without_times(snapshot) != _without_times(examined)

    def _pause(self) -> float:
        """Seconds before the next examination may begin."""
        if self._took <= QUICK_SECONDS:
            return 0.0
        rest = self._rest_until - asyncio.get_running_loop().time()
        return max(min(DELAY_SECONDS, self._took), rest)

    def _begin(self, after: float) -> None:
        self._work = asyncio.create_task(self._examine(after))

    def _gather(self) -> None:
        """Drop an examination that has ended. Raises its error, if it failed."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()

    async def _examine(self, after: float) -> Examination:
        await asyncio.sleep(after)
        assert self._latest is not None  # noqa: S101 (set before an examination is begun)
        snapshot, joined = self._latest
        begun = asyncio.get_running_loop().time()
        self._known = await asyncio.to_thread(examine_again, snapshot, joined, self._known, self._wait)
        ended = asyncio.get_running_loop().time()
        if self._newest is not None:
            self._took, self._rest_until = ended - begun, ended + REST * (ended - begun)
        found = Examination(snapshot.at, self._known.findings)
        self.news += self._newest is None or self._newest.findings != found.findings
        self._newest, self._examined = found, snapshot
        if self._differs(self._latest[0]):
            self._begin(self._pause())
        return found

    def _wait(self) -> None:
        self._may_go_on.wait(LONGEST_HALT_SECONDS)


def _without_times(snapshot: SiteSnapshot) -> SiteSnapshot:
    """The snapshot without the times of its readings."""
    return msgspec.structs.replace(
        snapshot,
        at=0.0,
        layers=tuple([msgspec.structs.replace(layer, at=None) for layer in snapshot.layers]),
        domains=tuple([msgspec.structs.replace(domain, observed_at=None) for domain in snapshot.domains]),
    )
