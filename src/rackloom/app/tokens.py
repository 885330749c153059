"""Tokens for an embedded site, signed with the key that lies in its home."""

import re
import time
from collections.abc import Sequence

from rackloom.app.home import Home
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.errors import Refused

_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MOST_HOURS = 24 * 366


def mint(home: Home, *, org: str, roles: Sequence[str], hours: float) -> str:
    """A bearer token for `org`. Refused when no site lives in `home`."""
    _check(org, hours)
    if not home.keys.is_dir():
        raise Refused(
            f"no site lives in {home.path}",
            nearest_fix=f"start one with: rackloom up --home {home.path}",
        )
    return LocalIssuer(home.keys).mint(org, tuple(dict.fromkeys(roles)), now=time.time(), ttl=hours * 3600)


def _check(org: str, hours: float) -> None:
    if not _ORG.fullmatch(org):
        raise Refused(
            f"{org!r} cannot be an organisation: it is part of a path",
            nearest_fix="use letters, digits, dots, dashes and underscores, 63 at most",
        )
    if not 0 < hours <= _MOST_HOURS:
        raise Refused(f"a token cannot be valid for {hours} hours", nearest_fix=f"use up to {_MOST_HOURS}")
