"""REST: a tenant's events as server-sent events that a client can resume.

Events are read from the outbox, so it does not matter which replica wrote them. A client resumes with
the `Last-Event-ID` header. If events were pruned, or the records are older than the client's newest event
(a restored backup), a `reset` event makes it list the objects again. A stream ends when its token expires.
An organization has at most `STREAMS_PER_ORG` streams. A stream is counted from its admission until its
response has ended, however it ends.

When the readings under recorded statuses become outdated, it may be impossible to write an event. So each
look at the outbox also finds the objects whose shown status differs from the recorded one. For each of them
the stream sends an event without a number, and another one when the record holds again. These are sent when
the client has all older events, and again after an event that contradicts them. So the last event of an
object in a stream matches the answer to a request for that object.

The id of an event is the client's position: the number of the newest outbox event that it has, with the
suffix `u` while its last event of some object differs from the record. The next stream does not know which
objects these are. So a client that resumes with the suffix first gets the new events, then a `reset`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import Depends, Header
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from rackloom.carve.api import routing
from rackloom.carve.api.routing import ApiDeps, Deps, TenantAdmin
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventNote, TenantEvent
from rackloom.carve.tenancy import entitlements, outdated
from rackloom.errors import Retry, Unknown

router = routing.Operations()

POLL_SECONDS = 0.5
"""The interval at which a stream reads the outbox."""
BATCH = 200
STREAMS_PER_ORG = 32
KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
"""A client that reads nothing for this time is disconnected. It may connect again."""
RESET = "reset"
"""Name of the event after which the client must list the objects again: it may have missed something."""
DOUBT_SUFFIX = "u"

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", pattern=rf"^\d{{1,15}}{DOUBT_SUFFIX}?$")]


class Position(msgspec.Struct, frozen=True):
    """The events of a client: the outbox up to `number`, and perhaps events that are not in the outbox."""

    number: int
    in_doubt: bool = False
    """Whether its last event of some object differs from the record."""

    def __str__(self) -> str:
        return f"{self.number}{DOUBT_SUFFIX if self.in_doubt else ''}"


def position_of(event_id: str) -> Position:
    """The position that an id of an event stands for."""
    return Position(int(event_id.removesuffix(DOUBT_SUFFIX)), event_id.endswith(DOUBT_SUFFIX))


async def _admitted(request: Request, caller: TenantAdmin) -> AsyncIterator[None]:
    """Count a stream of the organisation from here until its response has ended. Retry beyond the limit."""
    streams: Counter[str] = request.app.state.event_streams
    if streams[caller.org] >= STREAMS_PER_ORG:
        raise Retry(f"{STREAMS_PER_ORG} event streams of the org are open already", after=KEEP_ALIVE_SECONDS)
    streams[caller.org] += 1
    try:
        yield
    finally:
        streams[caller.org] -= 1


@router.get(
    "/event",
    "stream-event",
    None,
    response_class=EventSourceResponse,
    responses={200: {"description": "Server-sent events", "content": {"text/event-stream": {}}}},
    dependencies=[Depends(_admitted)],
)
async def stream(deps: Deps, caller: TenantAdmin, last_event_id: LastEventId = None) -> EventSourceResponse:
    """The events after Last-Event-ID (without the header, after now), then each event as it happens."""
    tenant_id, newest = await deps.store.read(_start, caller.org)
    first = Position(newest) if last_event_id is None else position_of(last_event_id)
    return EventSourceResponse(
        follow(deps, tenant_id, first, newest, caller.expires),
        ping=KEEP_ALIVE_SECONDS,
        send_timeout=SEND_SECONDS,
        sep="\n",
    )


async def follow(
    deps: ApiDeps, tenant_id: str, first: Position, newest: int, until: float
) -> AsyncIterator[ServerSentEvent]:
    """The tenant's events after the position `first`, until the time `until`."""
    number = min(first.number, newest)
    # A client that has newer events than the records saw them before a backup was restored.
    unsettled = first.in_doubt or first.number > newest
    shown: dict[str, EventNote] = {}
    while (now := deps.clock()) < until:
        try:
            found, outdated_now = await deps.store.read(_look, tenant_id, number, now - deps.valid_seconds)
            is_behind = len(found) == BATCH
            # Objects whose shown status is the recorded one again.
            ended = {key: note for key, note in shown.items() if key not in outdated_now}
            back = await deps.store.read(outdated.recorded_notes, ended) if ended and not is_behind else []
        except (Retry, Unknown):
            # The client connects again with the position that it has, and is answered 503 with the reason.
            return
        if found and found[0].number > number + 1:
            yield _reset(Position(found[0].number - 1, unsettled or bool(shown)))
        for event in found:
            number = event.number
            shown.pop(event.note.object_id, None)
            yield _event(Position(number, unsettled or bool(shown)), event.note, event.created)
        if is_behind:
            continue
        if unsettled:
            # Reset only now, so that the client's listing is no older than this stream's reading.
            unsettled = False
            yield _reset(Position(number, in_doubt=bool(outdated_now)))
        recorded = {note.object_id for note in back}
        shown = {key: note for key, note in shown.items() if key in outdated_now or key in recorded}
        for note in back:
            shown.pop(note.object_id, None)
            yield _event(Position(number, bool(shown)), note, now)
        for note in outdated_now.values():
            if shown.get(note.object_id) != note:
                shown[note.object_id] = note
                yield _event(Position(number, in_doubt=True), note, now)
        await asyncio.sleep(POLL_SECONDS)


def _look(
    conn: sa.Connection, tenant_id: str, after: int, valid_from: float
) -> tuple[tuple[TenantEvent, ...], dict[str, EventNote]]:
    return (
        journal.events_after(conn, tenant_id, after, BATCH),
        outdated.notes_of_tenant(conn, tenant_id, valid_from),
    )


def _start(conn: sa.Connection, org: str) -> tuple[str, int]:
    tenant_id: str = entitlements.tenant_id_of(conn, org)
    return tenant_id, journal.newest_event_number(conn, tenant_id)


def _reset(position: Position) -> ServerSentEvent:
    return _message(position, RESET, {"message": "some events were missed: list the objects again"})


def _event(position: Position, note: EventNote, created: float) -> ServerSentEvent:
    data: dict[str, Any] = {"kind": note.kind, "id": note.object_id, "status": note.status}
    return _message(position, note.kind, data | {"message": note.message, "created": rfc3339(created)})


def _message(position: Position, name: str, data: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(id=str(position), event=name, data=msgspec.json.encode(data).decode(), sep="\n")
