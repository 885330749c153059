"""The three errors that cross rooms, named by what the caller should do; and what errors of files say."""


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


class Unknown(Exception):
    """The truth could not be observed since `since` (seconds since the epoch)."""

    def __init__(self, reason: str, *, since: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.since = since


def why(error: OSError | UnicodeError) -> str:
    """What kept a file from being read, in words and without its name: the sentence around it has that."""
    if isinstance(error, UnicodeError):
        return "it is not text (UTF-8)"
    return error.strerror or str(error)
