"""Many transactions for one connection: what waits together is done together.

A commit waits for the disk, and takes the disk as long for one transaction as for twenty. Writes that wait at
the same moment therefore share a commit: each is a savepoint of its own, undone alone when it fails, and
nobody hears of success before the commit that holds it is durable. Reads that wait share one state, which
never holds anything that is not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.errors import Retry

MOST = 64
"""Transactions done in one go: the last of them waits for all others."""


class _UndoneWithOthers(Retry):
    """The transaction is no longer there, and with it what was done in it before."""


class Job(msgspec.Struct, frozen=True, eq=False):
    """A transaction, and who waits for its result."""

    work: Callable[[sa.Connection], Any]
    write: bool
    told: "Future[Any]"


class Waiting:
    """Transactions that were asked for, from any thread, and not begun."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def add(self, work: Callable[[sa.Connection], Any], *, write: bool) -> "Future[Any]":
        """Ask for a transaction."""
        job = Job(work, write, Future())
        self._jobs.append(job)
        return job.told

    def take(self) -> tuple[list[Job], list[Job]]:
        """Writes and reads to do now, in the order in which they were asked for; they have begun."""
        taken = [self._jobs.popleft() for _ in range(min(len(self._jobs), MOST))]
        begun = [job for job in taken if job.told.set_running_or_notify_cancel()]
        return [job for job in begun if job.write], [job for job in begun if not job.write]


Transact = Callable[[Callable[[sa.Connection], None]], None]
"""Runs something in a transaction: durable when it returns, undone when it raises."""


def do_together(jobs: Sequence[Job], transact: Transact) -> None:
    """Do `jobs` in one transaction, then tell each who waits how its own part ended."""
    if not jobs:
        return
    if len(jobs) == 1:
        _do_alone(jobs[0], transact)
        return
    ends: list[tuple[Job, Any, BaseException | None]] = []

    def work(conn: sa.Connection) -> None:
        ends.extend((job, *_part(conn, job)) for job in jobs)

    try:
        transact(work)
    except BaseException as error:
        for job in jobs:
            job.told.set_exception(error)
        return
    for job, result, trouble in ends:
        _tell(job, result, trouble)


def _do_alone(job: Job, transact: Transact) -> None:
    results: list[Any] = []
    try:
        transact(lambda conn: results.append(job.work(conn)))
    except BaseException as error:
        job.told.set_exception(error)
    else:
        job.told.set_result(results[0])


def _part(conn: sa.Connection, job: Job) -> tuple[Any, BaseException | None]:
    try:
        return (_in_savepoint(conn, job.work) if job.write else job.work(conn)), None
    except _UndoneWithOthers:
        raise
    except BaseException as error:
        return None, error


def _in_savepoint(conn: sa.Connection, work: Callable[[sa.Connection], Any]) -> Any:
    # Straight to the driver: a savepoint of the library costs more than most of what is done in it.
    connection: Any = conn.connection.dbapi_connection
    connection.execute("SAVEPOINT part")
    try:
        result = work(conn)
        # Fails where `work` has hidden that it undid everything.
        connection.execute("RELEASE part")
    except BaseException as error:
        _undo(connection, error)
        raise
    return result


def _undo(connection: Any, cause: BaseException) -> None:
    if not connection.in_transaction:
        # A full disk undoes the whole transaction, and with it what the others were about to be told.
        raise _UndoneWithOthers("undone together with a change that failed", after=1.0) from cause
    connection.execute("ROLLBACK TO part")
    connection.execute("RELEASE part")


def _tell(job: Job, result: Any, trouble: BaseException | None) -> None:
    if trouble is None:
        job.told.set_result(result)
    else:
        job.told.set_exception(trouble)
