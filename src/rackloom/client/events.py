"""The changes of a tenant's objects, as they happen.

A stream that ends or breaks is opened again at the same position, so that no event is missed. It ends for
good if the attempts of the client's policy bring no event. An expired token is an error at once.
"""

from typing import Literal

import httpx2
import msgspec

from rackloom.client.errors import NotUnderstood
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

PATH = "event"
RESET = "reset"


class Event(msgspec.Struct, frozen=True):
    """A change of an object. The kind `reset` means that changes were missed: list the objects again."""

    position: str
    """Pass it as `after` to continue after this event."""
    kind: Literal["reset"] | str
    message: str
    id: str | None = None
    status: str | None = None
    """`Deleted` once the object is gone."""
    created: str | None = None


class _Data(msgspec.Struct):
    message: str = ""
    id: str | None = None
    status: str | None = None
    created: str | None = None


def event_of(sent: httpx2.ServerSentEvent) -> Event | None:
    """The event, or None for a keep-alive. Raises NotUnderstood if it has another form."""
    if not sent.data:
        return None
    try:
        data = decode_json(sent.data, "an event", _Data)
    except Undecodable as error:
        raise NotUnderstood(f"an event is not what this client knows: {error.reason}") from error
    return Event(sent.id, sent.event, data.message, data.id, data.status, data.created)
