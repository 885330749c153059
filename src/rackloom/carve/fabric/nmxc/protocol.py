"""NMX-C protocol: gRPC channel, checked calls, reply codes, and the notification subscription.

Every call has a deadline. A call that gRPC reports as OK may still have been refused: the answer is the
return code in the server header, and a reply without that header counts as no answer. gRPC statuses by
which a server says that it did not act become `FabricRefused`; after any other failure the outcome is
unknown and becomes `FabricUnavailable`. `call_in` accepts a reply only from the domain that answered
`Hello`.

Keepalive pings are rare because controllers drop clients that ping often. Heartbeats detect a silent
controller: the subscription is lost once none came for `SILENT_BEATS` of them. `heart_beat_rate` derives
their rate from the interval of the site's passes, so that silence is noticed well before the timer.

`wake_ups` yields once for each new subscription, since anything may have been missed, once per change,
and at once when a subscription is lost. A heartbeat that repeats the last state is no change. A lost
subscription is renewed with exponential backoff. Until it is, the session is suspect: its next reading
waits only `PROBE_SECONDS` for the first answer, because the loss is already one sign that nobody answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from google.protobuf.message import Message

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable, TlsMaterial, canonical_domain
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.nmx_c_pb2 import NMX_ST_SUCCESS, ServerHeader, StReturnCode
from rackloom.carve.fabric.nmxc.nmx_c_pb2_grpc import NMX_ControllerStub
from rackloom.errors import Refused
from rackloom.runtime.foreign_text import MAX_BYTES

# Channel.


DEFAULT_PORT = 9370
"""NMX-C: port of the controller's gRPC server."""

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A dead peer must end a subscription, but controllers drop clients that ping often: five minutes is the
    # minimum that gRPC servers accept by default. Heart beats detect a silent controller sooner.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # gRPC would wait up to two minutes between attempts; a controller that restarts is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A reply may hold a whole domain. gRPC fails a larger one before it is parsed.
    ("grpc.max_receive_message_length", MAX_BYTES),
    # Switches are on a management network: no web proxy.
    ("grpc.enable_http_proxy", 0),
    # Drivers must not share connection attempts and backoff.
    ("grpc.use_local_subchannel_pool", 1),
)


OpenChannel = Callable[[str, TlsMaterial | None], grpc.aio.Channel]
"""Opens the connection to a controller."""


def open_channel(url: str, tls: TlsMaterial | None) -> grpc.aio.Channel:
    """A channel to `http[s]://host[:port]`; connects at the first call. Needs a running event loop.

    https means TLS, http plaintext. Raises Refused for any other URL, and for TLS material with http.
    """
    secure, target = parse_endpoint(url)
    if not secure:
        if tls is not None:
            raise Refused(f"{url} is plaintext, but TLS files are given", nearest_fix="use an https URL")
        return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
    material = tls or TlsMaterial()
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
    named: tuple[tuple[str, str], ...] = ()
    if material.authority is not None:
        named = (("grpc.ssl_target_name_override", material.authority),)
    return grpc.aio.secure_channel(target, credentials, options=(*_CHANNEL_OPTIONS, *named))


def parse_endpoint(url: str) -> tuple[bool, str]:
    """Whether to use TLS, and `host:port`. Raises Refused for what is no http or https address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username if host else None
    if host is None or extra or parts.scheme not in ("http", "https"):
        raise Refused(
            f"{url!r} is not the address of a switch controller",
            nearest_fix=f"use https://HOST:PORT, or http://HOST:PORT; the port is {DEFAULT_PORT} if left out",
        )
    bracketed = f"[{host}]" if ":" in host else host
    return parts.scheme == "https", f"{bracketed}:{port or DEFAULT_PORT}"


# Replies and errors.


_OUTCOME_UNKNOWN_CODES = frozenset({"UNDEFINED", "TIMEOUT"})
"""Return codes after which the change may have been made."""

_REFUSED_STATUSES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
"""gRPC statuses by which a server says that it did not act. After any other the outcome is unknown."""


def require_success(rpc: str, reply: Any) -> ServerHeader:
    """The header of `reply`, any NMX-C response, if it says success.

    Raises FabricRefused with the name of the return code (StReturnCode without its prefix), FabricUnavailable
    if the outcome is unknown. gRPC returns None for bytes that are no message.
    """
    if reply is None or not reply.HasField("server_header"):
        raise FabricUnavailable(f"{rpc}: the reply has no server header")
    header: ServerHeader = reply.server_header
    code = header.return_code
    if code == NMX_ST_SUCCESS:
        return header
    name = return_code_name(code)
    if name in _OUTCOME_UNKNOWN_CODES:
        raise FabricUnavailable(f"{rpc}: the controller answered {name}")
    raise FabricRefused(name, f"{rpc}: the controller answered {name}")


def return_code_name(code: StReturnCode.ValueType) -> str:
    """Name of a return code, as `RESOURCE_IN_USE`; the number itself where it is not a published one."""
    try:
        return StReturnCode.Name(code).removeprefix("NMX_ST_")
    except ValueError:
        return str(code)


def error_from_status(rpc: str, error: grpc.aio.AioRpcError) -> FabricUnavailable | FabricRefused:
    """What a failed call means to the caller of `execute`."""
    message = f"{rpc}: {error.code().name}: {error.details()}"
    if error.code() in _REFUSED_STATUSES:
        return FabricRefused(error.code().name, message)
    return FabricUnavailable(message)


# Calls.


MAJOR_VERSION, MINOR_VERSION = 2, 20
"""Protocol version that the client announces."""
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 1.0
"""For the first answer of a controller whose subscription was lost."""
CALL_SECONDS = 10.0


class NmxcSession:
    """The connection to one controller, and the name by which it knows this client."""

    def __init__(
        self, url: str, tls: TlsMaterial | None, gateway_id: str, connect: OpenChannel = open_channel
    ) -> None:
        self.url = url
        self.gateway_id = gateway_id
        self.is_suspect = False
        """Whether a subscription was lost and none has begun since."""
        self._channel = connect(url, tls)
        self._stub = NMX_ControllerStub(self._channel)

    async def hello(self, seconds: float = CONNECT_SECONDS) -> str:
        """Say hello and return the uuid of the domain that answers."""
        request = pb.ClientHello(
            gateway_id=self.gateway_id, major_version=MAJOR_VERSION, minor_version=MINOR_VERSION
        )
        reply: pb.ServerHello = await self.call("Hello", request, seconds=seconds)
        return canonical_domain(reply.server_header.domain_uuid)

    async def call(self, rpc: str, request: Message, *, seconds: float = CALL_SECONDS) -> Any:
        """The reply of `rpc`, which the caller annotates with its type.

        Raises FabricRefused when the controller refuses, FabricUnavailable when the outcome is unknown.
        """
        try:
            reply = await getattr(self._stub, rpc)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(rpc, error) from error
        require_success(rpc, reply)
        return reply

    async def call_in(self, domain: str, rpc: str, request: Message, *, seconds: float = CALL_SECONDS) -> Any:
        """As `call`. Raises FabricUnavailable for a reply of another domain than `domain`."""
        reply = await self.call(rpc, request, seconds=seconds)
        speaker = reply.server_header.domain_uuid
        if speaker != domain and (speaker := canonical_domain(speaker)) != domain:
            raise FabricUnavailable(f"{rpc}: answered by domain {speaker}, {domain} had said hello")
        return reply

    def subscribe(self, heart_beat_seconds: int) -> "grpc.aio.UnaryStreamCall[Any, pb.ServerNotification]":
        """Subscribe to notifications, also of our own changes: one that is executed late is news."""
        request = pb.SubscribeRequest(
            gateway_id=self.gateway_id, notify_on_self_change=True, heart_beat_rate=heart_beat_seconds
        )
        return self._stub.Subscribe(request)

    async def close(self) -> None:
        """Release the connection."""
        await self._channel.close()


# Subscription.


MAX_HEART_BEAT_SECONDS = 10
"""How often the controller shall send its state when nothing changes, at most."""
SILENT_BEATS = 2.5
"""After the time of so many heart beats without any the subscription counts as lost."""
FIRST_RESUBSCRIBE_DELAY, MAX_RESUBSCRIBE_DELAY = 0.5, 30.0
"""Seconds before a lost subscription is tried again; doubled until one holds."""


def heart_beat_rate(interval: float) -> int:
    """Seconds between heart beats where a pass runs every `interval` seconds.

    Silence and one unanswered call then end within half an interval of a few seconds or more.
    """
    return max(1, min(MAX_HEART_BEAT_SECONDS, int(interval / 6)))


async def wake_ups(
    session: NmxcSession,
    sleep: Callable[[float], Awaitable[None]],
    heart_beat_seconds: int = MAX_HEART_BEAT_SECONDS,
) -> AsyncGenerator[None, None]:
    """One item when a subscription begins (anything may have been missed before), changes, or is lost."""
    delay = FIRST_RESUBSCRIBE_DELAY
    while True:
        has_begun = False
        # The next observation meets and reports the same error; here it only means to subscribe again.
        with suppress(FabricUnavailable, FabricRefused):
            async with aclosing(_subscription(session, heart_beat_seconds)) as items:
                async for is_first in items:
                    has_begun, session.is_suspect = True, False
                    yield
                    if not is_first:
                        delay = FIRST_RESUBSCRIBE_DELAY
        if has_begun:
            session.is_suspect = True
            yield
        await sleep(delay)
        delay = min(2 * delay, MAX_RESUBSCRIBE_DELAY)


async def _subscription(session: NmxcSession, heart_beat_seconds: int) -> AsyncGenerator[bool, None]:
    """One subscription, until it is lost; yields whether the item is its beginning."""
    await session.hello()
    call = session.subscribe(heart_beat_seconds)
    try:
        await _read_notification(call, CALL_SECONDS)
        yield True
        last_state: bytes | None = None
        while True:
            notification = await _read_notification(call, SILENT_BEATS * heart_beat_seconds)
            state = _domain_state(notification)
            if state is None or state != last_state:
                yield False
            last_state = state or last_state
    finally:
        call.cancel()


async def _read_notification(
    call: "grpc.aio.UnaryStreamCall[pb.SubscribeRequest, pb.ServerNotification]", seconds: float
) -> pb.ServerNotification:
    try:
        async with asyncio.timeout(seconds):
            notification: pb.ServerNotification = await call.read()
    except grpc.aio.AioRpcError as error:
        raise FabricUnavailable(f"Subscribe: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise FabricUnavailable(f"Subscribe: nothing heard for {seconds:g} s") from error
    if notification is None:
        raise FabricUnavailable("Subscribe: the notification cannot be decoded")
    if notification is grpc.aio.EOF:
        raise FabricUnavailable("Subscribe: the controller ended the subscription")
    if notification.HasField("subscription_response"):
        require_success("Subscribe", notification.subscription_response)
    return notification


def _domain_state(notification: pb.ServerNotification) -> bytes | None:
    """The state in a heart beat; a heart beat that repeats the last state is no change."""
    if not notification.HasField("domain_state_info"):
        return None
    return notification.domain_state_info.SerializeToString(deterministic=True)
