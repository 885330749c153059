"""Tokens for an embedded site, signed with the key that lies in its home."""

import time
from collections.abc import Sequence

from rackloom.app.home import Home
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.errors import Refused


def mint(home: Home, *, org: str, roles: Sequence[str], hours: float) -> str:
    """A bearer token for `org`. Refused when no site lives in `home`."""
    if not home.keys.is_dir():
        raise Refused(
            f"no site lives in {home.path}",
            nearest_fix=f"start one with: rackloom up --home {home.path}",
        )
    return LocalIssuer(home.keys).mint(org, roles, now=time.time(), ttl=hours * 3600)
