"""The three errors that cross layers, named by what the caller should do.

`Retry` means that nothing was decided: call again after `after` seconds. `Refused` means that the request
will not be carried out as made; `nearest_fix` is the change that would make it acceptable, or None where
no change would. `Unknown` means that the state could not be observed since a point in time. A reconcile
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
    """It will not happen as asked. `nearest_fix` is what would make it acceptable; None if nothing would."""

    def __init__(self, reason: str, *, nearest_fix: str | None = None) -> None:
        super().__init__(reason if nearest_fix is None else f"{reason}; {nearest_fix}")
        self.reason = reason
        self.nearest_fix = nearest_fix


class Misuse(Refused):
    """What was asked for contradicts itself, or is incomplete: a mistake of whoever asks, not of a state."""


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
    """What kept a file from being read, in words and without its name: the sentence around it has that."""
    if isinstance(error, UnicodeError):
        return "it is not text (UTF-8)"
    return error.strerror or str(error)
