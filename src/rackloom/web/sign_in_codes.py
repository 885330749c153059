"""Links that sign a browser in: a code in the address stands for an organisation and its token.

A token in an address would stay in the history of the browser and in logs. A code is random, known only to
the process that offered it, and ends after fifteen minutes. The token behind it is verified again at each
use. Only a process whose user may sign tokens anyway offers codes (`rackloom up`). No other process can make
one, so a link cannot sign a browser in as an organisation that its user did not choose.
"""

import secrets
from collections.abc import Callable

CODE_SECONDS = 900.0
MOST_CODES = 64
"""The oldest ends when one more is offered."""


class SignInCodes:
    """The codes that one process offers. `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offered: dict[str, tuple[float, str, str]] = {}

    def offer(self, org: str, token: str) -> str:
        """The path, with its code, that signs a browser in with this token."""
        code = secrets.token_urlsafe(24)
        while len(self._offered) >= MOST_CODES:
            del self._offered[next(iter(self._offered))]
        self._offered[code] = (self._clock() + CODE_SECONDS, org, token)
        return f"/map/login?code={code}"

    def find(self, code: str) -> tuple[str, str] | None:
        """Organisation and token of a code, or None if it was never offered or is over."""
        ends, org, token = self._offered.get(code, (0.0, "", ""))
        return (org, token) if self._clock() < ends else None
