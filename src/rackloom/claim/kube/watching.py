"""The stream of a watch: one JSON document a line."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from rackloom.claim.kube.api import WatchEvent
from rackloom.claim.kube.nesting import decoded
from rackloom.claim.kube.refusals import error_of, unreachable


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[WatchEvent, None]:
    """The events in the chunks of a body. Raises what an ERROR event says: `Expired` is the usual one."""
    async with aclosing(_lines(chunks)) as lines:
        async for line in lines:
            yield _event(line)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Split at line feeds only: the other line ends of Unicode may stand inside a JSON string."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        *whole, tail = rest.split(b"\n")
        rest = tail
        for line in whole:
            if line:
                yield bytes(line)


def _event(line: bytes) -> WatchEvent:
    try:
        event: dict[str, Any] = decoded(line)
    except msgspec.DecodeError as error:
        raise unreachable(error) from error
    if event["type"] == "ERROR":
        status = event["object"]
        raise error_of(int(status.get("code") or 0), status)
    return WatchEvent(event["type"], event["object"])
