"""REST: a tenant's events as server-sent events that a client can resume.

Events are read from the outbox, so it does not matter which replica wrote them. A client resumes with
the `Last-Event-ID` header. When events were pruned, or the records are older than what the client has
seen (a restored backup), a `reset` event makes it list the objects again. A stream ends when its
token expires; an organization has at most `STREAMS_PER_ORG` streams.

When the readings under recorded statuses become outdated, nothing may be able to write an event. So each
look at the outbox also looks for objects that are shown otherwise than recorded, and sends an event without
a number for each, then another when the record holds again. The client's position is not changed by them.
They are sent when the client has all older events, and again after an event that says otherwise: so the last
event of an object in a stream is what a request for that object would answer. A new stream does not know what
was sent without a number before: who resumes lists the objects for which such an event came last.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import Header
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from rackloom.carve.api import routing
from rackloom.carve.api.routing import ApiDeps, Deps, TenantAdmin
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventNote, TenantEvent
from rackloom.carve.tenancy import entitlements, outdated
from rackloom.errors import Retry, Unknown

router = routing.operations()

POLL_SECONDS = 0.5
"""How often a stream reads the outbox."""
BATCH = 200
STREAMS_PER_ORG = 32
KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
"""A client that reads nothing for so long is disconnected; it may connect again."""
RESET = "reset"
"""Name of the event for a gap: the client must list the objects again."""

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
        _counted(streams, caller.org, follow(deps, tenant_id, first, newest, caller.expires)),
        ping=KEEP_ALIVE_SECONDS,
        send_timeout=SEND_SECONDS,
        sep="\n",
    )


async def follow(
    deps: ApiDeps, tenant_id: str, after: int, newest: int, until: float
) -> AsyncIterator[ServerSentEvent]:
    """The tenant's events after number `after`, until the time `until`."""
    if after > newest:
        # The client has newer events than the records, which were restored from a backup.
        yield _reset(newest)
        after = newest
    shown: Mapping[str, EventNote] = {}
    while (now := deps.clock()) < until:
        try:
            found, outdated_now = await deps.store.read(_look, tenant_id, after, now - deps.valid_seconds)
            is_behind = len(found) == BATCH
            back = [] if is_behind else await _recorded_again(deps, shown, outdated_now)
        except (Retry, Unknown):
            # The client connects again with the number that it has, and is answered 503 with the reason.
            return
        if found and found[0].number > after + 1:
            yield _reset(found[0].number - 1)
        for event in found:
            after = event.number
            yield _sent_event(event)
        reported = {event.note.object_id for event in found}
        shown = {key: note for key, note in shown.items() if key not in reported}
        if is_behind:
            continue
        new = [note for key, note in outdated_now.items() if shown.get(key) != note]
        for note in [*back, *new]:
            yield _unnumbered_event(note, now)
        shown = outdated_now
        await asyncio.sleep(POLL_SECONDS)


def _look(
    conn: sa.Connection, tenant_id: str, after: int, valid_from: float
) -> tuple[tuple[TenantEvent, ...], dict[str, EventNote]]:
    return (
        journal.events_after(conn, tenant_id, after, BATCH),
        outdated.notes_of_tenant(conn, tenant_id, valid_from),
    )


async def _recorded_again(
    deps: ApiDeps, shown: Mapping[str, EventNote], now: Mapping[str, EventNote]
) -> list[EventNote]:
    """What is recorded of objects that were shown otherwise, and are no longer."""
    ended = {key: note for key, note in shown.items() if key not in now}
    return await deps.store.read(outdated.recorded_notes, ended) if ended else []


async def _counted(
    streams: Counter[str], org: str, source: AsyncIterator[ServerSentEvent]
) -> AsyncIterator[ServerSentEvent]:
    """`source`, counted in `streams` while it is read."""
    streams[org] += 1
    try:
        async for event in source:
            yield event
    finally:
        streams[org] -= 1


def _start(conn: sa.Connection, org: str) -> tuple[str, int]:
    tenant_id: str = entitlements.tenant_id_of(conn, org)
    return tenant_id, journal.newest_event_number(conn, tenant_id)


def _reset(number: int) -> ServerSentEvent:
    return _message(number, RESET, {"message": "some events were missed: list the objects again"})


def _sent_event(event: TenantEvent) -> ServerSentEvent:
    return _message(event.number, event.note.kind, _event_data(event.note, event.created))


def _unnumbered_event(note: EventNote, now: float) -> ServerSentEvent:
    """An event that is not in the outbox; it leaves the client's position as it is."""
    return _message(None, note.kind, _event_data(note, now))


def _event_data(note: EventNote, created: float) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": note.kind, "id": note.object_id, "status": note.status}
    return data | {"message": note.message, "created": rfc3339(created)}


def _message(number: int | None, name: str, data: dict[str, Any]) -> ServerSentEvent:
    position = None if number is None else str(number)
    return ServerSentEvent(id=position, event=name, data=msgspec.json.encode(data).decode(), sep="\n")
