"""The background job of the audit log: writes the entries of refused requests, and removes old entries.

Refused requests wait in `RequestAudit`. Every `FLUSH_SECONDS` those that are due get entries, in one
transaction. While the database takes no writes they stay there, counted. The rest is written when the
service stops, after the transaction that is running: nothing is entered twice.

Retention: every `RETENTION_SECONDS` a survey finds the newest entry that is to go, by age or by number.
Entries up to it are removed in transactions of `BATCH`, with a pause after each, so that no other write
waits long. Replicas do the same work side by side, and each removes the entries that the others have left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from rackloom.carve.store import audit, audit_trail
from rackloom.carve.store.audit import AuditRecord
from rackloom.carve.store.audit_trail import RequestAudit
from rackloom.carve.store.database import Store
from rackloom.core.refusal_log import Emission
from rackloom.errors import Retry, Unknown

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 5.0
RETENTION_SECONDS = 600.0
BATCH = 500
PAUSE_SECONDS = 0.2


class AuditKeeper(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps the audit log of one process."""

    audit: RequestAudit
    store: Store
    clock: Callable[[], float]
    keep_seconds: float
    """Entries that are older are removed."""
    keep_entries: int
    """The oldest entries beyond this number are removed."""

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        next_removal = loop.time()
        try:
            while True:
                await self._attempt(self.write_refusals())
                if loop.time() >= next_removal:
                    await self._attempt(self.remove_old())
                    next_removal = loop.time() + RETENTION_SECONDS
                await asyncio.sleep(FLUSH_SECONDS)
        finally:
            await self._attempt(self.write_refusals(all_of_it=True))

    async def write_refusals(self, *, all_of_it: bool = False) -> None:
        """Write the refused requests that are due, or all of them."""
        while due := self.audit.due(self.clock(), all_of_it=all_of_it):
            writing = asyncio.create_task(self._write(due))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # The transaction goes on. Only its end shows whether `due` is still to be written.
                await asyncio.wait([writing])
                raise

    async def _write(self, due: Sequence[Emission[AuditRecord]]) -> None:
        await self.store.run(audit_trail.append_refusals, due, self.clock)
        self.audit.written(due, self.clock())

    async def remove_old(self) -> None:
        """Remove the entries that are too old or too many."""
        now = self.clock()
        up_to = await self.store.survey(
            lambda conn: audit.expired_up_to(conn, self.keep_seconds, now, self.keep_entries)
        )
        removed = 0
        while count := await self.store.run(audit.remove_oldest, up_to, BATCH) if up_to else 0:
            removed += count
            await asyncio.sleep(PAUSE_SECONDS)
        if removed:
            log.info("audit.removed", entries=removed, up_to=up_to)

    async def _attempt(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (Retry, Unknown):
            pass  # the store has logged it, and unwritten entries stay
        except Exception:
            log.exception("audit.failed")
