"""JSON that nests without end: an API server keeps 10000 levels (encoding/json), which nobody here reads.

Whoever may write a ResourceClaim may put it into the opaque parameters; it must cost that object only.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import msgspec

DEEPEST = 100
"""Levels of a document that are always read; what Kubernetes itself writes has no more than some dozens."""
TOO_DEEP = "rackloom: nested too deeply to be read"
"""What is read in place of a value below `DEEPEST` levels, where it is not read."""
_FEW = 200
"""Levels that are read anywhere: of Python's 1000, most are left to whoever walks through what was read."""
_SPARE = 700
_MARK = msgspec.json.encode(TOO_DEEP)
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_log = logging.getLogger(__name__)


def decoded(content: bytes) -> Any:
    """What a JSON document says, but for values nested too deeply: each of them is `TOO_DEEP`.

    All else of such an object is as it was written. A claim keeps its name and its allocation, so that its
    devices are not free; its parameters are no driver's, which are refused, and no claim without any. It is
    told in the log. Raises msgspec.DecodeError for what is no JSON.
    """
    try:
        return _decoded(content, 0 if _is_flat(content) else _SPARE)
    except RecursionError:
        document = msgspec.json.decode(_shallow(content))
        _tell(document)
        return document


def was_cut(document: bytes) -> bool:
    """Whether what is encoded here was not read whole: to write it would lose what it was."""
    return _MARK in document


def _is_flat(content: bytes) -> bool:
    return content.count(b"[") + content.count(b"{") <= _FEW


def _decoded(content: bytes, spare: int) -> Any:
    # msgspec counts its levels on top of Python's calls, so that calls are what bounds them.
    return _decoded(content, spare - 1) if spare else msgspec.json.decode(content)


def _shallow(content: bytes) -> bytes:
    """The document with its too deep values replaced; what is no JSON stays none."""
    parts, level, kept = [], 0, 0
    for token in _TOKEN.finditer(content):
        if token[0] in b"[{":
            level += 1
            if level == DEEPEST + 1:
                parts += [content[kept : token.start()], _MARK]
        elif token[0] in b"]}":
            if level == DEEPEST + 1:
                kept = token.end()
            level -= 1
    return b"" if level else b"".join([*parts, content[kept:]])


def _tell(document: Any) -> None:
    """Name in the log what was not read whole."""
    for obj in _objects(document):
        if was_cut(msgspec.json.encode(obj)):
            told = obj.get("metadata") or {}
            name = f"{told.get('namespace', '')}/{told.get('name', '')}"
            _log.warning("%s: nested too deeply: not read below %d levels", name, DEEPEST)


def _objects(document: Any) -> Iterable[Any]:
    """The objects of a list, or that of an event, or the one itself."""
    if not isinstance(document, dict):
        return ()
    items = document.get("items")
    found = items if isinstance(items, list) else [document.get("object", document)]
    return [one for one in found if isinstance(one, dict)]
