"""A secret that cannot be printed by mistake, and what every place that keeps secrets can do."""

import re
from collections.abc import Mapping
from typing import Final, Protocol

from rackloom.errors import Refused

_PART = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Secret:
    """Text that shows itself only to `reveal`: logs, tracebacks and format strings get stars."""

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

    Raises Retry where the place cannot be reached, Refused where it does not let us.
    """

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The fields of `path`; None when there is no such secret."""
        ...

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Keep `fields` at `path`, in place of what was there."""
        ...

    async def delete(self, path: str) -> None:
        """Forget `path`; nothing happens when it does not exist."""
        ...


def secret_of(content: bytes, where: str) -> Secret:
    """What is kept at `where`. Refused for bytes that are no text, which are not told."""
    try:
        return Secret(content.decode())
    except UnicodeDecodeError:
        raise Refused(
            f"{where} is not text (UTF-8)", nearest_fix="keep certificates and keys as PEM"
        ) from None


def parts(path: str) -> list[str]:
    """The words of a path. Refused for one that could mean another place than it says (`..`)."""
    words = path.split("/")
    if not all(_PART.fullmatch(word) for word in words):
        raise Refused(
            f"{path!r} cannot name a secret",
            nearest_fix="use words of letters, digits, '.', '_' and '-', joined by '/'",
        )
    return words


def read_only(what: str) -> Refused:
    """The refusal of a place that we only read."""
    return Refused(f"secrets in {what} are read only", nearest_fix=f"change them with the tools of {what}")
