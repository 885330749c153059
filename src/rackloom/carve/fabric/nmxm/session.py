"""Calls to one NMX-M: each with a deadline and a name and password, each status checked."""

import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx2
import msgspec

from rackloom.carve.fabric.nmxm import wire
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable

T = TypeVar("T")
CALL_SECONDS = 10.0

_REFUSALS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "NOT_SUPPORTED",
    409: "CONFLICT",
}
"""Statuses by which NMX-M says that it did not act. After any other the outcome is unknown: 500 and 503 also
come from the gateway in front of it, which may have passed the request on."""

_FAILURES = {500: "INTERNAL", 502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


class Login(msgspec.Struct, frozen=True):
    """Name and password for HTTP basic authentication."""

    username: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.username!r}, ***)"


ReadLogin = Callable[[], Awaitable[Login]]
"""Reads the login where it is kept. Raises FabricUnavailable when it cannot be had."""


class Session:
    """The connection to one NMX-M. `base_url` ends in `/nmx/v1`.

    `tls` is for https; None trusts the usual roots. `server_name` is expected in the certificate where it is
    not the host's. `transport` is another way to the server than the network.
    """

    def __init__(
        self,
        base_url: str,
        login: ReadLogin,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = base_url
        self._read_login = login
        self._login: Login | None = None
        self._extensions = {"sni_hostname": server_name} if server_name else None
        # trust_env: switches are on a management network, which no proxy and no .netrc is to see.
        self._client = httpx2.AsyncClient(
            # Without https there is nothing to verify, and to load trusted roots takes long.
            verify=base_url.startswith("https:") if tls is None else tls,
            timeout=CALL_SECONDS,
            transport=transport,
            trust_env=False,
            follow_redirects=False,
        )

    async def hello(self) -> tuple[wire.Chassis, ...]:
        """The chassis that this NMX-M speaks for: the first and smallest question of every look."""
        return wire.read("Hello", await self._send("Hello", "GET", "chassis"), tuple[wire.Chassis, ...])

    async def get(self, call: str, path: str, shape: type[T]) -> T:
        """One thing, or a list of them."""
        return wire.read(call, await self._send(call, "GET", path), shape)

    async def get_all(self, call: str, collection: str, shape: type[T]) -> tuple[T, ...]:
        """A whole collection. Raises FabricUnavailable when NMX-M counts more or fewer than it listed."""
        listed = await self.get(call, collection, list[shape])  # type: ignore[valid-type]
        counted = await self.get(call, f"{collection}/count", wire.Count)
        if len(listed) != counted.total:
            raise FabricUnavailable(f"{call}: {len(listed)} listed, {counted.total} counted")
        return tuple(listed)

    async def begin(self, call: str, method: str, path: str, body: msgspec.Struct | None = None) -> str:
        """Ask for a change and return the id of the operation that carries it out."""
        return wire.read(call, await self._send(call, method, path, body), wire.Accepted).operation_id

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def _send(self, call: str, method: str, path: str, body: msgspec.Struct | None = None) -> bytes:
        """Raises FabricRefused when NMX-M says no, FabricUnavailable when it is not known what it did."""
        login = await self._logged_in()
        try:
            reply = await self._client.request(
                method,
                f"{self.url}/{path}",
                auth=httpx2.BasicAuth(login.username, login.password),
                content=None if body is None else msgspec.json.encode(body),
                headers={"content-type": "application/json"} if body is not None else None,
                extensions=self._extensions,
            )
        except httpx2.TimeoutException as error:
            raise FabricUnavailable(f"{call}: DEADLINE_EXCEEDED: {self.url} did not answer") from error
        except httpx2.HTTPError as error:
            raise FabricUnavailable(f"{call}: UNAVAILABLE: {self.url}: {error!r}") from error
        if reply.status_code == httpx2.codes.UNAUTHORIZED:
            # The password may have been changed since it was read.
            self._login = None
        return _content(call, reply, httpx2.codes.OK if method == "GET" else httpx2.codes.ACCEPTED)

    async def _logged_in(self) -> Login:
        if self._login is None:
            self._login = await self._read_login()
        return self._login


def _content(call: str, reply: httpx2.Response, expected: int) -> bytes:
    if reply.status_code == expected:
        return reply.content
    code = _REFUSALS.get(reply.status_code)
    said = f"NMX-M answered {reply.status_code} {_told(reply)}".rstrip()
    if code is None:
        raise FabricUnavailable(f"{call}: {_FAILURES.get(reply.status_code, 'UNKNOWN')}: {said}")
    raise FabricRefused(code, f"{call}: {code}: {said}")


def _told(reply: httpx2.Response) -> str:
    try:
        problem = msgspec.json.decode(reply.content, type=wire.Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f"{problem.code}: {problem.description}"
