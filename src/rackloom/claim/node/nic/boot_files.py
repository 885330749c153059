"""Values of this boot, one file each, in memory as on the disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from rackloom.claim.node.files import PARTIAL, remove, write_whole


class OfBoot(Protocol):
    """What can be kept so: JSON that knows its name and its boot."""

    @property
    def key(self) -> str:
        """Name of its file."""
        ...

    @property
    def boot_id(self) -> str:
        """After another one it means nothing any more."""
        ...


T = TypeVar("T", bound=OfBoot)


class BootFiles(Generic[T]):
    """All values of `shape` below one directory. A change is on the disk before it is believed."""

    def __init__(self, root: Path, boot_id: str, shape: type[T]) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._root = root
        self._boot_id = boot_id
        self._shape = shape
        self._known = {one.key: one for one in self._read()}

    @property
    def boot_id(self) -> str:
        """The boot that they are of."""
        return self._boot_id

    def all(self) -> tuple[T, ...]:
        """All there are."""
        return tuple(self._known.values())

    def put(self, one: T) -> None:
        """Write one down, or what became of it."""
        write_whole(self._path(one.key), msgspec.json.encode(one))
        self._known[one.key] = one

    def drop(self, one: T) -> None:
        """Forget one."""
        remove(self._path(one.key))
        self._known.pop(one.key, None)

    def _path(self, key: str) -> Path:
        return self._root / f"{key}.json"

    def _read(self) -> Iterator[T]:
        for partial in self._root.glob(f".*{PARTIAL}"):
            remove(partial)
        for file in sorted(self._root.glob("*.json")):
            one = msgspec.json.decode(file.read_bytes(), type=self._shape)
            if one.boot_id == self._boot_id:
                yield one
            else:
                remove(file)
