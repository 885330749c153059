"""NMX-C on the wire: the gRPC channel, and the meaning of failed calls.

gRPC statuses by which a server shows that it did not act become `FabricRefused`. After any other failure the
outcome is unknown and becomes `FabricUnavailable`. Keepalive pings are rare because controllers drop clients
that ping often. `driver` makes the calls and detects a silent controller.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

import grpc
import grpc.aio

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable, TlsMaterial
from rackloom.carve.fabric.nmxc.nmx_c_pb2 import StReturnCode
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
    # gRPC would wait up to two minutes between attempts. A controller that restarts is back in seconds.
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
    """A channel to `http[s]://host[:port]`, which connects at the first call. Needs a running event loop.

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
    """Whether to use TLS, and `host:port`. Raises Refused if `url` is not an http or https address."""
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
"""gRPC statuses by which a server shows that it did not act. After any other the outcome is unknown."""


def return_code_name(code: StReturnCode.ValueType) -> str:
    """Name of a return code, as `RESOURCE_IN_USE`, or the number itself if it is not a published one."""
    try:
        return StReturnCode.Name(code).removeprefix("NMX_ST_")
    except ValueError:
        return str(code)


def error_from_status(rpc: str, error: grpc.aio.AioRpcError) -> FabricUnavailable | FabricRefused:
    """The meaning of a failed call to the caller of `execute`."""
    message = f"{rpc}: {error.code().name}: {error.details()}"
    if error.code() in _REFUSED_STATUSES:
        return FabricRefused(error.code().name, message)
    return FabricUnavailable(message)
