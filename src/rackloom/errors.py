"""The three errors that cross layers, named by the action of the caller.

`Retry` means that nothing was decided: call again after `after` seconds. `Refused` means that the request
will not be carried out as made. `nearest_fix` is the change that would make it acceptable, or None if no
change would. `Unknown` means that the state could not be observed since a point in time. A reconcile
loop can therefore derive its next step from the type of the error alone.

`Undecodable` is raised by `foreign_text` alone. It is also a DecodeError and a ValueError, as the errors of
the parsers behind it. `file_error_text` words an OSError or a decoding error for a sentence that already
names the file.
"""

import msgspec


class Retry(Exception):
    """Try again after `after` seconds: nothing was decided."""

    def __init__(self, reason: str, *, after: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Refused(Exception):
    """The request is refused. `nearest_fix` is the change that would make it acceptable, if there is one."""

    def __init__(self, reason: str, *, nearest_fix: str | None = None) -> None:
        super().__init__(reason if nearest_fix is None else f"{reason}; {nearest_fix}")
        self.reason = reason
        self.nearest_fix = nearest_fix


class Misuse(Refused):
    """The request contradicts itself or is incomplete: a mistake of the caller, not of a state."""


class Unknown(Exception):
    """The truth could not be observed since `since` (seconds since the epoch)."""

    def __init__(self, reason: str, *, since: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.since = since


class Undecodable(msgspec.DecodeError):
    """Text of another system, called `source`, cannot be decoded."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


def file_error_text(error: OSError | UnicodeError) -> str:
    """The reason why a file could not be read, without its name: the sentence around it has that."""
    if isinstance(error, UnicodeError):
        return "it is not text (UTF-8)"
    return error.strerror or str(error)
