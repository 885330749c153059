"""From the bytes of an API server to objects, watch events and errors.

JSON that nests too deeply is cut: an API server stores up to 10000 levels, and every writer of a
ResourceClaim may put them into its opaque parameters. A marker replaces each such value, so that only this
object suffers. It keeps its name and allocation, and is never written back.

A watch is one JSON document per line, split at line feeds only. An answer that is no success becomes
one of the named errors of `api`. 401 stays a plain, retried error, because a rotated token is read again
before the next attempt.
"""

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from rackloom.claim.kube.api import Conflict, Expired, KubeError, NotFound, Rejected, WatchEvent
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import MAX_DEPTH, decode_json, nests_too_deeply

# Errors.


_ERRORS_BY_CODE: Mapping[int, type[KubeError]] = {
    404: NotFound,
    409: Conflict,
    410: Expired,
    **dict.fromkeys((400, 403, 405, 413, 415, 422), Rejected),
}


def status_error(code: int, status: Mapping[str, Any], retry_after: float | None = None) -> KubeError:
    """The error of a `Status` body (metav1): one of the named ones, or plain: try again.

    401 is plain: a token that was rotated is read again before the next attempt.
    """
    details = status.get("details") or {}
    after = retry_after if retry_after is not None else details.get("retryAfterSeconds")
    reason = str(status.get("reason") or "Unknown")
    message = str(status.get("message") or f"the API server answered {code}")
    meaning = _ERRORS_BY_CODE.get(code, KubeError)
    return meaning(code, reason, message, retry_after=None if after is None else float(after))


def unreachable_error(error: Exception) -> KubeError:
    """There was no answer."""
    return KubeError(0, "Unreachable", f"the API server was not reached: {error or type(error).__name__}")


# JSON documents of bounded depth.


MAX_BYTES = 1 << 30
"""Of one answer. A list of all pods of a large cluster has tens of megabytes."""
TOO_DEEP_MARKER = "rackloom: nested too deeply to be read"
"""The text that replaces a value below `MAX_DEPTH` levels."""
_MARK = msgspec.json.encode(TOO_DEEP_MARKER)
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
log = logging.getLogger(__name__)


def decode_document(content: bytes) -> Any:
    """Decode a JSON document. Values that nest too deeply become `TOO_DEEP_MARKER`, and are logged.

    The rest of such an object is kept. A claim keeps its name and its allocation, so its devices do not count
    as free. Its parameters fit no driver and are refused. Raises Undecodable for invalid JSON.
    """
    try:
        return decode_json(content, "API server", max_bytes=MAX_BYTES)
    except Undecodable:
        if not nests_too_deeply(content):
            raise
    document = decode_json(_cut_deep_values(content), "API server", max_bytes=MAX_BYTES)
    _log_cut_objects(document)
    return document


def contains_cut_value(document: bytes) -> bool:
    """Whether an encoded document was cut when it was read, so that writing it would lose data."""
    return _MARK in document


def _cut_deep_values(content: bytes) -> bytes:
    """The document with too deep values replaced. Invalid JSON stays invalid."""
    parts, level, kept = [], 0, 0
    for token in _TOKEN.finditer(content):
        if token[0] in b"[{":
            level += 1
            if level == MAX_DEPTH + 1:
                parts += [content[kept : token.start()], _MARK]
        elif token[0] in b"]}":
            if level == MAX_DEPTH + 1:
                kept = token.end()
            level -= 1
    return b"" if level else b"".join([*parts, content[kept:]])


def _log_cut_objects(document: Any) -> None:
    """Log the names of objects that were not read whole."""
    for obj in _objects_in(document):
        if contains_cut_value(msgspec.json.encode(obj)):
            meta = obj.get("metadata") or {}
            name = f"{meta.get('namespace', '')}/{meta.get('name', '')}"
            log.warning("%s: nested too deeply: not read below %d levels", name, MAX_DEPTH)


def _objects_in(document: Any) -> Iterable[Any]:
    """The objects of a list, or that of an event, or the one itself."""
    if not isinstance(document, dict):
        return ()
    items = document.get("items")
    found = items if isinstance(items, list) else [document.get("object", document)]
    return [entry for entry in found if isinstance(entry, dict)]


# Watch streams.


async def watch_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[WatchEvent, None]:
    """The events in the chunks of a body. Raises the error of an ERROR event, usually `Expired`."""
    async with aclosing(_lines(chunks)) as lines:
        async for line in lines:
            yield _decode_event(line)


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


def _decode_event(line: bytes) -> WatchEvent:
    try:
        event: dict[str, Any] = decode_document(line)
    except msgspec.DecodeError as error:
        raise unreachable_error(error) from error
    if event["type"] == "ERROR":
        status = event["object"]
        raise status_error(int(status.get("code") or 0), status)
    return WatchEvent(event["type"], event["object"])
