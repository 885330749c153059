"""REST: a tenant's events as server-sent events that a client can resume.

Events are read from the outbox, so it does not matter which replica wrote them. A client resumes with
the `Last-Event-ID` header. When events were pruned, or the records are older than what the client has
seen (a restored backup), a `reset` event tells it to list the objects again. A stream ends when its
token expires; an organization has at most `STREAMS_PER_ORG` streams.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Header
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import ApiDeps, Deps, TenantAdmin
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal
from rackloom.carve.store.journal import TenantEvent
from rackloom.carve.tenancy import entitlements
from rackloom.errors import Retry

router = APIRouter()

POLL_SECONDS = 0.5
"""How long an event may lie in the outbox before a stream looks."""
BATCH = 200
STREAMS_PER_ORG = 32
KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
"""A client that takes nothing for so long has gone; it may come again."""
RESET = "reset"
"""Name of the event that says: some were missed, list the objects again."""

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", pattern=r"^\d{1,15}$")]


@router.get(
    "/event",
    operation_id="stream-event",
    response_class=EventSourceResponse,
    responses={200: {"description": "Server-sent events", "content": {"text/event-stream": {}}}},
)
async def stream(
    request: Request, deps: Deps, caller: TenantAdmin, last_event_id: LastEventId = None
) -> EventSourceResponse:
    """The events after Last-Event-ID, then each as it happens; without the header, those from now on."""
    tenant_id, newest = await deps.store.read(_start, caller.org)
    first = newest if last_event_id is None else int(last_event_id)
    streams: Counter[str] = request.app.state.event_streams
    if streams[caller.org] >= STREAMS_PER_ORG:
        raise Retry(f"{STREAMS_PER_ORG} event streams of the org are open already", after=KEEP_ALIVE_SECONDS)
    return EventSourceResponse(
        _counted(streams, caller, follow(deps, tenant_id, first, newest, caller.expires)),
        ping=KEEP_ALIVE_SECONDS,
        send_timeout=SEND_SECONDS,
        sep="\n",
    )


async def follow(
    deps: ApiDeps, tenant_id: str, after: int, newest: int, until: float
) -> AsyncIterator[ServerSentEvent]:
    """The tenant's events after number `after`, until the time `until`."""
    if after > newest:
        # The records are older than what the client has seen: they were restored from a backup.
        yield _reset(newest)
        after = newest
    while deps.clock() < until:
        found = await deps.store.read(journal.events_after, tenant_id, after, BATCH)
        if found and found[0].number > after + 1:
            yield _reset(found[0].number - 1)
        for event in found:
            after = event.number
            yield _shown(event)
        if len(found) < BATCH:
            await asyncio.sleep(POLL_SECONDS)


async def _counted(
    streams: Counter[str], caller: Caller, source: AsyncIterator[ServerSentEvent]
) -> AsyncIterator[ServerSentEvent]:
    with _one_more(streams, caller.org):
        async for event in source:
            yield event


@contextmanager
def _one_more(streams: Counter[str], org: str) -> Iterator[None]:
    streams[org] += 1
    try:
        yield
    finally:
        streams[org] -= 1


def _start(conn: sa.Connection, org: str) -> tuple[str, int]:
    tenant_id: str = entitlements.tenant_id_of(conn, org)
    return tenant_id, journal.newest_event_number(conn, tenant_id)


def _reset(number: int) -> ServerSentEvent:
    return _message(number, RESET, {"message": "some events were missed: list the objects again"})


def _shown(event: TenantEvent) -> ServerSentEvent:
    note = event.note
    about: dict[str, Any] = {"kind": note.kind, "id": note.object_id, "status": note.status}
    return _message(
        event.number, note.kind, {**about, "message": note.message, "created": rfc3339(event.created)}
    )


def _message(number: int, name: str, data: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(id=str(number), event=name, data=msgspec.json.encode(data).decode(), sep="\n")
