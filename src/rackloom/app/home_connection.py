"""A client's access to the site of a home: its address, and a new token for each request.

It is apart from `rackloom.app.home`, because few of those who need a home need a client.
"""

from collections.abc import Sequence

from rackloom.app.home import Home, mint_token
from rackloom.client.connection import Connection
from rackloom.errors import Refused

_TOKEN_HOURS = 0.1
"""Each token is used at once."""


def home_connection(home: Home, *, org: str, roles: Sequence[str]) -> Connection:
    """The access of a client of `org` with `roles` to the site of `home`. Refused if none runs."""

    def token() -> str:
        return mint_token(home, org=org, roles=roles, hours=_TOKEN_HOURS)

    token()
    try:
        url = home.address.read_text()
    except FileNotFoundError as error:
        raise Refused(
            f"the site of {home.path} does not run",
            nearest_fix=f"start it with: rackloom up --home {home.path}",
        ) from error
    return Connection(url=url, org=org, token=token)
