"""Host states from an external provider: `GET <url>/<machine id>` answers `{"state": "ready"}`.

All machines are polled at each interval, 16 at a time, with limits on time and size of a response. A
response that is missing or not understood means Unknown, never Ready. Changed states are written with a
history entry, the status of the affected domains is derived again, and the reconciler is woken for them.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
import sqlalchemy as sa
import structlog

from rackloom.carve.store import journal
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import machine
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import status as tenancy_status
from rackloom.errors import Retry, Unknown
from rackloom.runtime.foreign_text import decode_json

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 5.0
"""Limit of the time for one complete response."""
MAX_BYTES = 65_536
"""Limit of the size of a response. No state is longer."""
MAX_CONCURRENT = 16
STATES = {"ready": Status.READY, "initializing": "Initializing", "error": Status.ERROR}
"""State in a response -> status of the machine."""


class HostStatePoller(msgspec.Struct, frozen=True):
    """Reads the state of every machine each `interval` seconds, and writes the changes."""

    url: str
    interval: float
    store: Store
    clock: Callable[[], float]
    transport: httpx2.AsyncBaseTransport | None = None

    async def run(self, wake: Callable[[frozenset[str]], None]) -> None:
        """Poll until cancelled. `wake` gets the domains with machines in a new state."""
        while True:
            try:
                wake(await self.ask())
            except (Retry, Unknown):
                pass  # the store has logged it
            except Exception:
                log.exception("host-state.failed")
            await asyncio.sleep(self.interval)

    async def ask(self) -> frozenset[str]:
        """Poll all machines once. Return the domains of those with a new state."""
        machines = await self.store.read(_machine_ids)
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        async with httpx2.AsyncClient(timeout=ANSWER_SECONDS, transport=self.transport) as client:
            states = await asyncio.gather(
                *(self._state(client, slots, machine_id) for machine_id in machines)
            )
        return await self.store.run(
            lambda conn: write_states(conn, dict(zip(machines, states, strict=True)), self.clock())
        )

    async def _state(self, client: httpx2.AsyncClient, slots: asyncio.Semaphore, machine_id: str) -> str:
        async with slots:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer: Any = await _get_json(
                        client, f"{self.url.rstrip('/')}/{quote(machine_id, safe='')}"
                    )
            except (httpx2.HTTPError, TimeoutError, ValueError):
                return Status.UNKNOWN
        state = answer.get("state") if isinstance(answer, dict) else None
        return STATES.get(state, Status.UNKNOWN) if isinstance(state, str) else Status.UNKNOWN


async def _get_json(client: httpx2.AsyncClient, url: str) -> Any:
    """JSON from `url`. Raises ValueError for anything else, and for more than `MAX_BYTES`."""
    body = b""
    async with client.stream("GET", url) as reply:
        reply.raise_for_status()
        async for part in reply.aiter_bytes(MAX_BYTES):
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError("the answer is too long")
    return decode_json(bytes(body), url)


def write_states(conn: sa.Connection, states: dict[str, str], now: float) -> frozenset[str]:
    """Write the states of machines. Return the domains of those that changed."""
    rows = conn.execute(sa.select(machine.c.id, machine.c.status, machine.c.domain)).all()
    changed = [row for row in rows if row.id in states and row.status != states[row.id]]
    for row in changed:
        status = states[row.id]
        conn.execute(sa.update(machine).where(machine.c.id == row.id).values(status=status, updated=now))
        journal.record_status(conn, row.id, status, "told by the host state provider", now)
    domains = {row.domain for row in changed}
    for domain in domains:
        tenancy_status.update_statuses(conn, domain, now)
    return frozenset(domain for domain in domains if domain is not None)


def _machine_ids(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(machine.c.id).order_by(machine.c.id)).scalars())
