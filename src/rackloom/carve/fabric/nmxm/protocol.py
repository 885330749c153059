"""NMX-M protocol: JSON bodies below `/nmx/v1` (API 85.1), authenticated HTTP calls, and TLS.

Only the fields that are used are declared. NMX-M gives each entity an `ID` of 24 hexadecimal digits.
GPUs also have a fabric GUID (`DeviceUID`), partitions also the number by which the network knows them
(`PartitionID`).

Each call has a deadline and HTTP basic authentication. A 401 makes the next call read the password
again. Statuses by which NMX-M shows that it did not act become `FabricRefused`. Any other failure
becomes `FabricUnavailable`, because 5xx answers also come from the gateway in front, which may have
passed the request on. A collection is complete only when its count equals the number of listed
entities.

A client certificate is loaded from a private temporary file, because OpenSSL takes a key only from a
file.
"""

import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable, TlsMaterial
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import MAX_BYTES, decode_json
from rackloom.serving.request_log import asked

# JSON bodies.


T = TypeVar("T")
_UPPERCASE_PARTS = frozenset({"id", "uid", "uri", "uuid"})


def _json_field_name(name: str) -> str:
    return "".join(
        part.upper() if part in _UPPERCASE_PARTS else part.capitalize() for part in name.split("_")
    )


class MemberLocation(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A member of a location-based partition."""

    domain_uuid: str
    chassis_id: int
    slot_id: int
    host_id: int
    device_id: int


PartitionMember = str | MemberLocation
"""A GPU by its entity ID, or a location. The members of a partition are of one kind."""


class NmxmLocation(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """The location of an entity."""

    chassis_id: int
    slot_id: int
    host_id: int
    tray_index: int
    chassis_serial_number: str = ""


class NmxmChassis(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A chassis, and the number that locations in its domain have for it."""

    domain_uuid: str
    internal_id: int
    serial_number: str = ""


class NmxmComputeNode(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A compute tray."""

    domain_uuid: str
    location_info: NmxmLocation
    health: str = "UNKNOWN"


class NmxmGpu(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A GPU. `device_id` is its module in the tray. `partition_id` is the partition's number, or 0."""

    id: str
    domain_uuid: str
    location_info: NmxmLocation
    device_uid: int
    device_id: int
    partition_id: int = 0
    health: str = "UNKNOWN"


class NmxmPartition(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A partition. Null members are none."""

    id: str
    partition_id: int
    name: str
    type: str
    health: str
    members: tuple[PartitionMember, ...] | None


class CollectionCount(msgspec.Struct, frozen=True):
    """The size of a collection."""

    total: int


class AcceptedOperation(msgspec.Struct, frozen=True, rename={"operation_id": "operationId"}):
    """The answer 202 to a change."""

    operation_id: str


class NmxmOperationRequest(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """The request that began an operation."""

    method: str
    uri: str
    body: Any = None


class NmxmOperationResult(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """The result of an operation."""

    error: str = ""
    details: str = ""


class NmxmOperation(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """A change that is pending or has ended."""

    id: str
    status: str
    request: NmxmOperationRequest
    result: NmxmOperationResult | None = None


class NmxmProblem(msgspec.Struct, frozen=True, rename={"code": "customErrorCode"}):
    """The body of a refusal."""

    code: str = ""
    description: str = ""


class MembershipBody(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """PUT partitions/{id}: the full list. A GPU that is left out leaves the partition."""

    members: tuple[PartitionMember, ...]


class NewPartitionBody(msgspec.Struct, frozen=True, kw_only=True, rename=_json_field_name):
    """POST partitions."""

    name: str
    members: tuple[PartitionMember, ...]


def decode_answer(call: str, body: bytes, shape: type[T]) -> T:
    """`body` as `shape`. Raises FabricUnavailable when it is anything else: half an answer is none."""
    try:
        return decode_json(body, "not an answer of NMX-M", shape)
    except Undecodable as error:
        raise FabricUnavailable(f"{call}: {error}") from error


# TLS.


def client_tls_context(material: TlsMaterial) -> ssl.SSLContext:
    """A context that trusts `material.ca` (else the system) and shows its client certificate, if it has one.

    Reads and writes files. Raises Refused for PEM that is none.
    """
    try:
        context = ssl.create_default_context(cadata=material.ca.decode() if material.ca else None)
        if material.certificate is not None and material.key is not None:
            # OpenSSL takes a key only from a file. No other account can read it, and it is gone at once.
            with tempfile.TemporaryDirectory() as directory:
                pem = Path(directory) / "client.pem"
                pem.touch(mode=0o600)
                pem.write_bytes(material.certificate + b"\n" + material.key)
                context.load_cert_chain(pem)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise Refused(
            f"the TLS material is not usable: {error}", nearest_fix="give a CA, certificate and key as PEM"
        ) from error
    return context


# Calls.


CALL_SECONDS = 10.0

_REFUSED_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "NOT_SUPPORTED",
    409: "CONFLICT",
}
"""Statuses by which NMX-M shows that it did not act. After any other the outcome is unknown: 500 and 503 also
come from the gateway in front of it, which may have passed the request on."""

_FAILED_STATUSES = {500: "INTERNAL", 502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


class NmxmLogin(msgspec.Struct, frozen=True):
    """Name and password for HTTP basic authentication."""

    username: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.username!r}, ***)"


ReadLogin = Callable[[], Awaitable[NmxmLogin]]
"""Reads the login from its store. Raises FabricUnavailable if it cannot be read."""


class NmxmSession:
    """The connection to one NMX-M. `base_url` ends in `/nmx/v1`.

    `tls` is for https. None trusts the usual roots. `server_name` is expected in the certificate if it is
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
        self._login: NmxmLogin | None = None
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

    async def hello(self) -> tuple[NmxmChassis, ...]:
        """The chassis of this NMX-M: the first and smallest request of every reading."""
        return decode_answer("Hello", await self._send("Hello", "GET", "chassis"), tuple[NmxmChassis, ...])

    async def get(self, call: str, path: str, shape: type[T]) -> T:
        """One entity, or a list."""
        return decode_answer(call, await self._send(call, "GET", path), shape)

    async def get_all(self, call: str, collection: str, shape: type[T]) -> tuple[T, ...]:
        """A complete collection. Raises FabricUnavailable when its count differs from the list."""
        listed = await self.get(call, collection, list[shape])  # type: ignore[valid-type]
        counted = await self.get(call, f"{collection}/count", CollectionCount)
        if len(listed) != counted.total:
            raise FabricUnavailable(f"{call}: {len(listed)} listed, {counted.total} counted")
        return tuple(listed)

    async def begin(self, call: str, method: str, path: str, body: msgspec.Struct | None = None) -> str:
        """Request a change and return the id of its operation."""
        return decode_answer(call, await self._send(call, method, path, body), AcceptedOperation).operation_id

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def _send(self, call: str, method: str, path: str, body: msgspec.Struct | None = None) -> bytes:
        """Raises FabricRefused when NMX-M refuses, FabricUnavailable when the outcome is unknown."""
        if self._login is None:
            self._login = await self._read_login()
        login = self._login
        try:
            with asked(method, self.url, path) as request:
                async with self._client.stream(
                    method,
                    f"{self.url}/{path}",
                    auth=httpx2.BasicAuth(login.username, login.password),
                    content=None if body is None else msgspec.json.encode(body),
                    headers={"content-type": "application/json"} if body is not None else None,
                    extensions=self._extensions,
                ) as reply:
                    request.outcome = reply.status_code
                    content = bytearray()
                    async for part in reply.aiter_bytes():
                        content += part
                        if len(content) > MAX_BYTES:
                            raise FabricUnavailable(f"{call}: more than {MAX_BYTES} bytes")
        except httpx2.TimeoutException as error:
            raise FabricUnavailable(f"{call}: DEADLINE_EXCEEDED: {self.url} did not answer") from error
        except httpx2.HTTPError as error:
            raise FabricUnavailable(f"{call}: UNAVAILABLE: {self.url}: {error!r}") from error
        if reply.status_code == httpx2.codes.UNAUTHORIZED:
            # The password may have been changed since it was read.
            self._login = None
        return _checked_content(
            call,
            reply.status_code,
            bytes(content),
            httpx2.codes.OK if method == "GET" else httpx2.codes.ACCEPTED,
        )


def _checked_content(call: str, status: int, content: bytes, expected: int) -> bytes:
    if status == expected:
        return content
    code = _REFUSED_STATUSES.get(status)
    text = f"NMX-M answered {status} {_problem_text(content)}".rstrip()
    if code is None:
        raise FabricUnavailable(f"{call}: {_FAILED_STATUSES.get(status, 'UNKNOWN')}: {text}")
    raise FabricRefused(code, f"{call}: {code}: {text}")


def _problem_text(content: bytes) -> str:
    try:
        problem = decode_json(content, "problem", NmxmProblem)
    except Undecodable:
        return ""
    return f"{problem.code}: {problem.description}"
