"""What this node has prepared, across restarts of the plugin.

A JSON file of our own: `{"format": "rackloom-checkpoint", "version": 1, "checksum": ..., "content": {...}}`.
The checksum is the SHA-256 of the content's bytes as they stand in the file, so fields that a newer plugin
added are covered and may be ignored. A node that was booted since has lost everything that was prepared on
it, but not what was done for it elsewhere (a node label): entries of another boot count as only begun, so
that they are prepared anew or undone, and never forgotten.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackloom.claim.node.files import write_whole
from rackloom.claim.node.values import Entry, State
from rackloom.errors import Refused

FORMAT = "rackloom-checkpoint"
VERSION = 1


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint: the boot that it is about, and an entry per claim UID."""

    boot_id: str
    claims: dict[str, Entry] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    checksum: str
    content: msgspec.Raw


class Checkpoint:
    """The entries, in memory as they are on the disk: a change is written before it is believed."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot_id = boot_id
        self._claims = _read(path, boot_id)

    @property
    def claims(self) -> Mapping[str, Entry]:
        """Entries by claim UID."""
        return self._claims

    def put(self, entry: Entry) -> None:
        """Add or replace the entry of a claim."""
        self._write({**self._claims, entry.ref.uid: entry})

    def drop(self, uid: str) -> None:
        """Forget a claim; nothing happens where it is not known."""
        if uid in self._claims:
            self._write({known: entry for known, entry in self._claims.items() if known != uid})

    def _write(self, claims: dict[str, Entry]) -> None:
        write_whole(self._path, encode(Content(boot_id=self._boot_id, claims=claims)))
        self._claims = claims


def encode(content: Content) -> bytes:
    """The bytes of the file."""
    raw = msgspec.json.encode(content)
    file = _File(format=FORMAT, version=VERSION, checksum=_checksum(raw), content=msgspec.Raw(raw))
    return msgspec.json.encode(file) + b"\n"


def decode(data: bytes, path: Path) -> Content:
    """Read the file's bytes. Raises `Refused` naming what is wrong with `path` and what to do."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, f"it is no checkpoint: {error}") from error
    if file.format != FORMAT:
        raise _damaged(path, f"its format is {file.format!r}, not {FORMAT!r}")
    if file.version > VERSION:
        raise Refused(
            f"checkpoint {path} has version {file.version}; this plugin reads up to {VERSION}",
            nearest_fix="run the newer version of the plugin that wrote it",
        )
    found = _checksum(bytes(file.content))
    if found != file.checksum:
        raise _damaged(path, f"its content has SHA-256 {found}, but {file.checksum} was written")
    try:
        return msgspec.json.decode(file.content, type=Content)
    except msgspec.ValidationError as error:
        raise _damaged(path, str(error)) from error


def _read(path: Path, boot_id: str) -> dict[str, Entry]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    content = decode(data, path)
    if content.boot_id == boot_id:
        return content.claims
    return {uid: _begun(entry) for uid, entry in content.claims.items()}


def _begun(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, state=State.STARTED, devices=(), undoing=False, aborted_at=None)


def _checksum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _damaged(path: Path, what: str) -> Refused:
    return Refused(
        f"checkpoint {path} cannot be read: {what}",
        nearest_fix=f"drain the node, move {path} away and start the plugin again;"
        " without it the plugin cannot tell which claims it has prepared",
    )
