"""Group commit, for both databases: writes that wait share one transaction, in turns by organisation.

A commit waits for the disk, as long for one transaction as for twenty. Writes that wait at the same moment
therefore share one transaction (DeWitt et al., SIGMOD 1984). Each is a savepoint, rolled back alone when it
fails, and no caller hears of success before the shared commit is durable. Members are taken from the queue
one after another, so that a newcomer need not wait for the next group.

Fairness: waiting transactions take turns by organisation, as in `FairQueue`, charged by the time that
they took. While several organisations wait, a group has one member of each, so that none waits for the
backlog of another. `Store.on_behalf_of` names the organisation. The site's own work is one more.

A database may roll a shared transaction back and have it repeated. Then all of its members run again, and
only the last run counts.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.core.fair_queueing import FairQueue

MAX_GROUP_SIZE = 64
"""Members of one shared transaction: each of them waits for all others."""


class PendingTransaction(msgspec.Struct, frozen=True, eq=False):
    """A transaction that was requested, and the future of its result."""

    work: Callable[[sa.Connection], Any]
    write: bool
    org: str
    result: "Future[Any]"


class TransactionQueue:
    """Transactions that were requested, from any thread, and have not begun, by organisation."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._writes: FairQueue[PendingTransaction] = FairQueue()
        self._reads: FairQueue[PendingTransaction] = FairQueue()

    def add(self, work: Callable[[sa.Connection], Any], *, write: bool, org: str) -> "Future[Any]":
        """Request a transaction for `org`."""
        job = PendingTransaction(work, write, org, Future())
        with self._lock:
            self._of(write).add(org, job)
        return job.result

    def has(self, *, write: bool) -> bool:
        """Whether any write waits, or any read."""
        return bool(self._of(write).flows)

    def begin(self, *, write: bool, group: frozenset[str] = frozenset()) -> PendingTransaction | None:
        """The next write or read, which can no longer be cancelled, or None if nothing waits.

        `group` contains the organisations that share the transaction already. Also None if the next one is
        among them and another organisation is in the group or waits. The group then commits first.
        """
        with self._lock:
            queue = self._of(write)
            while (org := queue.next_flow()) is not None:
                if org in group and len(group.union(queue.flows)) > 1:
                    return None
                _, job = queue.take()
                if job.result.set_running_or_notify_cancel():
                    return job
        return None

    def charge(self, job: PendingTransaction, seconds: float) -> None:
        """Count the time that `job` took as service to its organisation."""
        with self._lock:
            self._of(job.write).charge(job.org, seconds)

    def _of(self, write: bool) -> FairQueue[PendingTransaction]:
        return self._writes if write else self._reads


# The members of one transaction.


Outcome = tuple[Any, BaseException | None]
"""The result of a member, or the error with which it alone failed."""
RunMember = Callable[[sa.Connection, PendingTransaction], Outcome]
"""Runs a member in a savepoint. Raises an error that ends the whole transaction."""


class CommitGroup:
    """The members of one shared transaction.

    Invariant: no member learns its outcome before `resolve` or `fail`, which follow the shared commit.
    """

    def __init__(
        self,
        waiting: TransactionQueue,
        first: PendingTransaction,
        run_member: RunMember,
        *,
        spares_savepoint: bool,
        longest: float,
        clock: Callable[[], float],
    ) -> None:
        self._waiting = waiting
        self._members = [first]
        self._outcomes: list[Outcome] = []
        self._run_member = run_member
        self._spares_savepoint = spares_savepoint
        self._longest = longest
        self._clock = clock

    @classmethod
    def begin(
        cls,
        waiting: TransactionQueue,
        run_member: RunMember,
        *,
        write: bool,
        spares_savepoint: bool = False,
        longest: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "CommitGroup | None":
        """A group with the next waiting transaction as its first member, or None if nothing waits.

        With `spares_savepoint`, a member that is alone has no savepoint, and no other joins it. No member
        joins after `longest` seconds.
        """
        first = waiting.begin(write=write)
        if first is None:
            return None
        return cls(
            waiting, first, run_member, spares_savepoint=spares_savepoint, longest=longest, clock=clock
        )

    def work(self, conn: sa.Connection) -> None:
        """Run the members, and those that arrive during the run. A second call runs all of them again."""
        self._outcomes.clear()
        first = self._members[0]
        is_alone = len(self._members) == 1 and not self._waiting.has(write=first.write)
        if is_alone and self._spares_savepoint:
            # Its failure rolls the whole transaction back.
            self._outcomes.append((self._timed(lambda _: first.work(conn), first), None))
            return
        closes = self._clock() + self._longest
        number = 0
        while number < len(self._members):
            job = self._members[number]
            self._outcomes.append(self._timed(lambda member: self._run_member(conn, member), job))
            number += 1
            is_open = number == len(self._members) < MAX_GROUP_SIZE and self._clock() < closes
            if is_open:
                orgs = frozenset(member.org for member in self._members)
                joining = self._waiting.begin(write=self._members[0].write, group=orgs)
                self._members += [] if joining is None else [joining]

    def resolve(self) -> None:
        """Tell each member its outcome: the shared commit is durable."""
        for job, (result, error) in zip(self._members, self._outcomes, strict=True):
            if error is None:
                job.result.set_result(result)
            else:
                job.result.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Tell every member that the shared transaction failed."""
        for job in self._members:
            job.result.set_exception(error)

    def _timed(self, run: Callable[[PendingTransaction], Any], job: PendingTransaction) -> Any:
        began = self._clock()
        try:
            return run(job)
        finally:
            self._waiting.charge(job, self._clock() - began)
