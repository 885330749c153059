"""The choice of a PostgreSQL server for a connection: the URL may name several, and one of them takes writes.

The URL has libpq's form, `postgresql://USER:PASSWORD@HOST:PORT,HOST:PORT/DATABASE`. The servers are tried one
after another, first the one that took the last connection. A standby is passed over: `target_session_attrs`
is `read-write` if several servers are named, unless the URL sets something else. Each server has the
time that one has alone: a host without power does not answer at all, and must not use up the time of those
behind it. If none serves, that is an `OSError`, as it is for a single server.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

from rackloom.errors import Refused

CONNECT_SECONDS = 5.0
"""The longest time that a server may take to accept a connection."""
_NEXT_SERVER = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TargetServerAttributeNotMatched,
)
"""Out of reach, silent (`TimeoutError` is an `OSError`), gone during the handshake, starting or stopping, a
standby."""


class PostgresServers:
    """Opens connections to the server that takes writes, among those of a URL."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """`options` are arguments of `asyncpg.connect`. Raises Refused for another kind of URL."""
        first, others = _split_hosts(url)
        _, parameters = PGDialect_asyncpg().create_connect_args(_parse(first))  # type: ignore[no-untyped-call]
        self._addresses = [*_addresses(parameters), *(_addresses_of(host) for host in others)]
        self._options = {**parameters, **options, "timeout": CONNECT_SECONDS}
        if len(self._addresses) > 1:
            self._options.setdefault("target_session_attrs", "read-write")

    async def connect(self) -> asyncpg.Connection:
        """A connection to the first server that serves. Raises OSError when none does."""
        failures = []
        for address in tuple(self._addresses):
            try:
                connection = await asyncpg.connect(**{**self._options, **address})
            except _NEXT_SERVER as error:
                failures.append(error)
                continue
            self._addresses.sort(key=lambda candidate: candidate != address)
            return connection
        if len(failures) == 1 and isinstance(failures[0], OSError | asyncpg.CannotConnectNowError):
            raise failures[0]
        reasons = "; ".join(str(failure) or type(failure).__name__ for failure in failures)
        raise ConnectionError(f"no server takes writes: {reasons}")


def _split_hosts(url: str) -> tuple[str, Sequence[str]]:
    """The URL with its first server, and the `HOST:PORT` of each other server."""
    parts = urlsplit(url)
    credentials, at, servers = parts.netloc.rpartition("@")
    first, *others = servers.split(",")
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{first}")), others


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # The URL is not repeated: it may hold a password.
        raise Refused(
            "the database URL is not one of PostgreSQL",
            nearest_fix="use postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    return parsed.set(drivername="postgresql+asyncpg")


def _addresses(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Host and port of each server in the parameters of a connection, which lose them."""
    hosts, ports = parameters.pop("host", None), parameters.pop("port", None)
    if isinstance(hosts, list):
        return [{"host": host, "port": port} for host, port in zip(hosts, ports, strict=True)]
    return [{name: value for name, value in (("host", hosts), ("port", ports)) if value is not None}]


def _addresses_of(server: str) -> dict[str, Any]:
    (address,) = _addresses(PGDialect_asyncpg().create_connect_args(_parse(f"postgresql://{server}"))[1])  # type: ignore[no-untyped-call]
    return address
