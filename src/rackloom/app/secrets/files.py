"""Secrets as files: `<directory>/<path>/<field>`, which is also how Kubernetes mounts a Secret."""

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from rackloom.app.home import write_durably
from rackloom.app.secrets.values import Secret, parts, secret_of
from rackloom.errors import Refused


class FileSecrets:
    """A directory that only its owner may read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The files of the directory of `path`, without their final newline."""
        return await asyncio.to_thread(self._read, path)

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Write each field as a file of mode 0600; fields that are not given are removed."""
        await asyncio.to_thread(self._write, path, fields)

    async def delete(self, path: str) -> None:
        """Remove the files of `path`."""
        await asyncio.to_thread(self._write, path, {})

    def _place(self, path: str) -> Path:
        return self._directory.joinpath(*parts(path))

    def _read(self, path: str) -> Mapping[str, Secret] | None:
        place = self._place(path)
        if not place.is_dir():
            return None
        try:
            found = {file.name: _content(file) for file in sorted(place.iterdir()) if _is_field(file)}
        except OSError as error:
            raise Refused(
                f"cannot read {error.filename}: {error.strerror}", nearest_fix="let this process read it"
            ) from error
        return found or None

    def _write(self, path: str, fields: Mapping[str, Secret]) -> None:
        place = self._place(path)
        try:
            if fields:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, value in fields.items():
                write_durably(place / "".join(parts(name)), value.reveal().encode())
            for file in place.iterdir() if place.is_dir() else ():
                if _is_field(file) and file.name not in fields:
                    file.unlink()
        except OSError as error:
            raise Refused(
                f"cannot write {place}: {error.strerror}", nearest_fix="let this process write there"
            ) from error


def _is_field(file: Path) -> bool:
    # Kubernetes keeps its own bookkeeping beside the fields, under names that begin with two dots.
    return file.is_file() and not file.name.startswith(".") and file.suffix != ".partial"


def _content(file: Path) -> Secret:
    with file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if mode & stat.S_IROTH:
            raise Refused(
                f"{file} can be read by everybody", nearest_fix=f"chmod o-rwx {file}, and replace the secret"
            )
        return secret_of(opened.read().removesuffix(b"\n"), str(file))
