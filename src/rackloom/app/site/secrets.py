"""Passwords and keys: a value that is never printed, one provider protocol, local providers.

A secret has a path and a few fields: `nmxm/default/auth` has `username` and `password`. `Secret` shows
stars in logs, tracebacks and format strings, and refuses to be pickled. Only `reveal` gives the text. A
path with words that could lead elsewhere (`..`) is refused.

Providers: files `<directory>/<path>/<field>`, which is also how Kubernetes mounts a Secret, environment
variables such as `RACKLOOM_SECRET_NMXM_DEFAULT_AUTH__PASSWORD`, Kubernetes Secrets, and Vault. A file that
all users can read is refused. The environment is read only. Kubernetes Secrets and Vault, which need client
libraries, are in `secret_stores`.

Providers raise `Retry` if the store cannot be reached, and `Refused` if it denies access.
"""

import asyncio
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from rackloom.errors import Refused
from rackloom.runtime.durable_files import PARTIAL, write_durably

# The value and the protocol.


_WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Secret:
    """Text that only `reveal` returns: logs, tracebacks and format strings show stars."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text: Final = text

    def reveal(self) -> str:
        """The text itself. Use it in the call that needs it, and nowhere else."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __format__(self, _spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not written anywhere")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class SecretProvider(Protocol):
    """Named secrets, each a few fields: `nmxm/default/auth` has `username` and `password`.

    Raises Retry if the store cannot be reached, and Refused if it denies access.
    """

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The fields of `path`, or None if there is no such secret."""
        ...

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Store `fields` at `path`, in place of its present fields."""
        ...

    async def delete(self, path: str) -> None:
        """Delete `path`. Nothing happens if it does not exist."""
        ...


def secret_of(content: bytes, where: str) -> Secret:
    """The secret that `where` holds. Refused for bytes that are no text. The refusal does not show them."""
    try:
        return Secret(content.decode())
    except UnicodeDecodeError:
        raise Refused(
            f"{where} is not text (UTF-8)", nearest_fix="keep certificates and keys as PEM"
        ) from None


def path_words(path: str) -> list[str]:
    """The words of a path. Refused for a path that could lead elsewhere (`..`)."""
    words = path.split("/")
    if not all(_WORD.fullmatch(word) for word in words):
        raise Refused(
            f"{path!r} cannot name a secret",
            nearest_fix="use words of letters, digits, '.', '_' and '-', joined by '/'",
        )
    return words


def read_only_refusal(what: str) -> Refused:
    """The refusal of a write to a store that is read only."""
    return Refused(f"secrets in {what} are read only", nearest_fix=f"change them with the tools of {what}")


# Environment variables.


VARIABLE_PREFIX = "RACKLOOM_SECRET_"


class EnvironmentSecrets:
    """The environment that the process was started with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """Every variable of `path`, by the lower-case name of its field."""
        prefix = variable_prefix(path)
        found = {
            name.removeprefix(prefix).lower(): Secret(value)
            for name, value in self._environment.items()
            if name.startswith(prefix) and len(name) > len(prefix)
        }
        return found or None

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Refused: a process cannot change the environment of its next start."""
        raise read_only_refusal("the environment")

    async def delete(self, path: str) -> None:
        """Refused, as `write`."""
        raise read_only_refusal("the environment")


def variable_prefix(path: str) -> str:
    """The prefix of the variables of `path`."""
    return VARIABLE_PREFIX + re.sub(r"[^A-Z0-9]", "_", "_".join(path_words(path)).upper()) + "__"


# Files.


class FileSecrets:
    """A directory that only its owner may read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The files of the directory of `path`, without their final newline."""
        return await asyncio.to_thread(self._read, path)

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Write each field as a file of mode 0600. Fields that are not given are removed."""
        await asyncio.to_thread(self._write, path, fields)

    async def delete(self, path: str) -> None:
        """Remove the files of `path`."""
        await asyncio.to_thread(self._write, path, {})

    def _place(self, path: str) -> Path:
        return self._directory.joinpath(*path_words(path))

    def _read(self, path: str) -> Mapping[str, Secret] | None:
        place = self._place(path)
        if not place.is_dir():
            return None
        try:
            found = {file.name: _field_content(file) for file in sorted(place.iterdir()) if _is_field(file)}
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
                write_durably(place / "".join(path_words(name)), value.reveal().encode())
            for file in place.iterdir() if place.is_dir() else ():
                if _is_field(file) and file.name not in fields:
                    file.unlink()
        except OSError as error:
            raise Refused(
                f"cannot write {place}: {error.strerror}", nearest_fix="let this process write there"
            ) from error


def _is_field(file: Path) -> bool:
    # Kubernetes keeps links and directories beside the fields. Their names begin with two dots.
    return file.is_file() and not file.name.startswith(".") and file.suffix != PARTIAL


def _field_content(file: Path) -> Secret:
    with file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if mode & stat.S_IROTH:
            raise Refused(
                f"{file} can be read by everybody", nearest_fix=f"chmod o-rwx {file}, and replace the secret"
            )
        return secret_of(opened.read().removesuffix(b"\n"), str(file))
