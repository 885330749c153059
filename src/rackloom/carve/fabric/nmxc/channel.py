"""The connection to one controller: address, TLS, keepalive and how quickly a lost one is tried again."""

from collections.abc import Callable
from urllib.parse import urlsplit

import grpc
import grpc.aio

from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.errors import Refused

DEFAULT_PORT = 9370
"""NMX-C: port of the controller's gRPC server."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A dead peer must end a subscription, but controllers drop clients that ping often ("too many pings"
    # below five minutes is gRPC's own default); heart beats notice a silent controller sooner.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # gRPC would wait up to two minutes between attempts; a controller that restarts is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A whole domain in one reply: no limit of ours.
    ("grpc.max_receive_message_length", -1),
    # Switches are on a management network; a proxy meant for the web must not see these calls.
    ("grpc.enable_http_proxy", 0),
    # Drivers must not wait for one another's attempts.
    ("grpc.use_local_subchannel_pool", 1),
)


Connect = Callable[[str, TlsMaterial | None], grpc.aio.Channel]
"""Opens the connection to a controller."""


def open_channel(url: str, tls: TlsMaterial | None) -> grpc.aio.Channel:
    """A channel to `http[s]://host[:port]`; connects at the first call. Needs a running event loop.

    https means TLS, http plaintext. Raises Refused for any other URL, and for TLS material with http.
    """
    secure, target = parse_endpoint(url)
    if not secure:
        if tls is not None:
            raise Refused(f"{url} is plaintext, but TLS files are given", nearest_fix="use an https URL")
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    material = tls or TlsMaterial()
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
    named: tuple[tuple[str, str], ...] = ()
    if material.authority is not None:
        named = (("grpc.ssl_target_name_override", material.authority),)
    return grpc.aio.secure_channel(target, credentials, options=(*_OPTIONS, *named))


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
