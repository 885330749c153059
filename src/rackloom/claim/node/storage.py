"""A plugin's state across a crash, a restart and a reboot: the checkpoint and files of one boot.

Every file is replaced durably (`durable_files`), so after a crash or a power loss it is there whole or not at
all. A change is on the disk before the copy in memory has it.

`Checkpoint` holds one entry for each claim UID. Its format is `{"format": "rackloom-checkpoint",
"version": 1, "checksum": ..., "content": {...}}`. The checksum is the SHA-256 of the content's bytes as
they are in the file, so fields that a newer plugin added are covered and may be ignored. A damaged file
is refused, never guessed: without it the plugin does not know which claims it has prepared.

A reboot loses everything that was prepared on the node, but not changes made elsewhere, such as a node
label. So entries of another boot id count as started only: they are prepared again or undone, and never
forgotten.

`plugin_lock` keeps a second process from the same files.

`BootScopedFiles` stores values that mean nothing after a reboot, one JSON file each (NIC attachments and
DHCP leases). Files of another boot are deleted when the directory is read.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState
from rackloom.claim.node.takeover.nvidia_checkpoint import is_nvidia_checkpoint
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.durable_files import PARTIAL, remove_durably, write_durably
from rackloom.runtime.foreign_text import decode_json

# The checkpoint of prepared claims.


CHECKPOINT_FORMAT = "rackloom-checkpoint"
CHECKPOINT_VERSION = 1


class CheckpointContent(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint: the boot that it belongs to, and an entry per claim UID."""

    boot_id: str
    claims: dict[str, CheckpointEntry] = {}


class _CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    checksum: str
    content: msgspec.Raw


class Checkpoint:
    """The entries. A change is on the disk before it is visible in memory (write-ahead)."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot_id = boot_id
        self._claims = _read_checkpoint(path, boot_id)

    @property
    def claims(self) -> Mapping[str, CheckpointEntry]:
        """Entries by claim UID."""
        return self._claims

    def put(self, entry: CheckpointEntry) -> None:
        """Add or replace the entry of a claim."""
        self._write({**self._claims, entry.ref.uid: entry})

    def drop(self, uid: str) -> None:
        """Forget a claim. Does nothing if the claim is unknown."""
        if uid in self._claims:
            self._write({kept: entry for kept, entry in self._claims.items() if kept != uid})

    def _write(self, claims: dict[str, CheckpointEntry]) -> None:
        write_durably(self._path, encode_checkpoint(CheckpointContent(boot_id=self._boot_id, claims=claims)))
        self._claims = claims


def encode_checkpoint(content: CheckpointContent) -> bytes:
    """The bytes of the file."""
    raw = msgspec.json.encode(content)
    file = _CheckpointFile(
        format=CHECKPOINT_FORMAT,
        version=CHECKPOINT_VERSION,
        checksum=_checksum(raw),
        content=msgspec.Raw(raw),
    )
    return msgspec.json.encode(file) + b"\n"


def decode_checkpoint(data: bytes, path: Path) -> CheckpointContent:
    """Read the file's bytes. Raises `Refused` with the fault of `path` and the remedy."""
    if is_nvidia_checkpoint(data):
        raise Refused(
            f"checkpoint {path} is of NVIDIA's DRA driver, whose claims may still be in use",
            nearest_fix="take it over: rackloom takeover plan, then rackloom takeover apply",
        )
    try:
        file = decode_json(data, path.name, _CheckpointFile)
    except Undecodable as error:
        raise _damaged_checkpoint(path, f"it is no checkpoint: {error.reason}") from error
    if file.format != CHECKPOINT_FORMAT:
        raise _damaged_checkpoint(path, f"its format is {file.format!r}, not {CHECKPOINT_FORMAT!r}")
    if file.version > CHECKPOINT_VERSION:
        raise Refused(
            f"checkpoint {path} has version {file.version}; this plugin reads up to {CHECKPOINT_VERSION}",
            nearest_fix="run the newer version of the plugin that wrote it",
        )
    found = _checksum(bytes(file.content))
    if found != file.checksum:
        raise _damaged_checkpoint(path, f"its content has SHA-256 {found}, but {file.checksum} was written")
    try:
        return decode_json(file.content, path.name, CheckpointContent)
    except Undecodable as error:
        raise _damaged_checkpoint(path, error.reason) from error


def _read_checkpoint(path: Path, boot_id: str) -> dict[str, CheckpointEntry]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    content = decode_checkpoint(data, path)
    if content.boot_id == boot_id:
        return content.claims
    return {uid: as_started(entry) for uid, entry in content.claims.items()}


def as_started(entry: CheckpointEntry) -> CheckpointEntry:
    """After a reboot nothing is prepared on the node, but changes made elsewhere must still be undone."""
    return msgspec.structs.replace(
        entry, state=PrepareState.STARTED, devices=(), undoing=False, aborted_at=None
    )


def _checksum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _damaged_checkpoint(path: Path, what: str) -> Refused:
    return Refused(
        f"checkpoint {path} cannot be read: {what}",
        nearest_fix=f"drain the node, move {path} away and start the plugin again;"
        " without it the plugin cannot tell which claims it has prepared",
    )


# The lock of a plugin's directory.


class StillRunning(Refused):
    """A process works with these files. Once it has ended, the call may be repeated."""


@contextmanager
def plugin_lock(home: Path, driver: str) -> Iterator[None]:
    """Hold `plugin.lock` in the directory `home`. The kernel drops the lock when the process ends.

    Two processes with one checkpoint would undo each other's work. Raises `StillRunning` if another
    one has it.
    """
    path = home / "plugin.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StillRunning(
            f"another process serves {driver} on this node (it holds {path})",
            nearest_fix="stop it, or wait until it has ended",
        ) from error
    try:
        yield
    finally:
        os.close(handle)


# A directory of values that are valid for one boot.


class BootScoped(Protocol):
    """A value about one device of one claim that means nothing after a reboot."""

    @property
    def key(self) -> str:
        """`<claim UID>-<device>`, the name of its file."""

    @property
    def claim(self) -> str:
        """UID of the claim."""

    @property
    def boot_id(self) -> str:
        """The boot of the node in which it is valid."""


T = TypeVar("T", bound=BootScoped)


class BootScopedFiles(Generic[T]):
    """All values of the type `shape` below one directory, as JSON. The file is written before the memory."""

    shape: type[T]

    def __init__(self, root: Path, boot_id: str) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._root = root
        self.boot_id = boot_id
        self._known = {value.key: value for value in self._read()}

    def get(self, claim: str, device: str) -> T | None:
        """The value of one device of a claim."""
        return self._known.get(f"{claim}-{device}")

    def of_claim(self, claim: str) -> tuple[T, ...]:
        """All values of a claim."""
        return tuple(value for value in self._known.values() if value.claim == claim)

    def all(self) -> tuple[T, ...]:
        """All values."""
        return tuple(self._known.values())

    def put(self, value: T) -> None:
        """Add or replace a value."""
        write_durably(self._root / f"{value.key}.json", msgspec.json.encode(value))
        self._known[value.key] = value

    def drop(self, value: T) -> None:
        """Delete a value."""
        remove_durably(self._root / f"{value.key}.json")
        self._known.pop(value.key, None)

    def _read(self) -> Iterator[T]:
        for partial in self._root.glob(f".*{PARTIAL}"):
            remove_durably(partial)
        for file in sorted(self._root.glob("*.json")):
            value = decode_json(file.read_bytes(), str(file), self.shape)
            if value.boot_id == self.boot_id:
                yield value
            else:
                remove_durably(file)
