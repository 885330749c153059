"""The changes of a tenant's objects, as they happen.

A stream that ends or breaks is opened again where it was, so that nothing is missed. It ends for good after
the attempts of the client's policy without an event between; a token that has ended is an error at once.
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
    """A change of an object; or, with the kind `reset`, that some were missed: list the objects again."""

    position: str
    """To be given as `after`, to go on behind this event."""
    kind: Literal["reset"] | str
    message: str
    id: str | None = None
    status: str | None = None
    """`Deleted` at the end."""
    created: str | None = None


class _Data(msgspec.Struct):
    message: str = ""
    id: str | None = None
    status: str | None = None
    created: str | None = None


def event_of(sent: httpx2.ServerSentEvent) -> Event | None:
    """The event, or None for a sign of life. Raises NotUnderstood for one of another service."""
    if not sent.data:
        return None
    try:
        data = decode_json(sent.data, "an event", _Data)
    except Undecodable as error:
        raise NotUnderstood(f"an event is not what this client knows: {error.reason}") from error
    return Event(sent.id, sent.event, data.message, data.id, data.status, data.created)
