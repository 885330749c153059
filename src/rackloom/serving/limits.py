"""The limits of every listener, and the number of open files that a process needs for them.

Any host that can route to a listener can connect to it, before any authentication. So each has limits that
hold from the moment of `accept`: `ConnectionLimits` of all connections, `HttpLimits` of HTTP/1.1 servers
(`serving.http_server`), `GrpcLimits` of gRPC servers (`serving.grpc_server`). `LISTENERS` is the complete
list, from which the site makes its reference.

Connections are limited in total and for each address. A proxy in front of REST is one address to it, so the
limit of one address is large. `serving.acceptor` decides which connection gives way to a new one.

A process that runs out of file descriptors can neither accept connections nor open its database. So it
counts at its start the files that its listeners may hold (`files_needed`), raises its soft limit of open
files as far as the hard limit allows (`plan_file_limit`), and refuses to start if that is too low.
"""

from enum import StrEnum
from typing import ClassVar

import msgspec

from rackloom.errors import Refused

# Kinds of limits, in seconds and bytes unless a name states another unit.


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all connections of a listener."""

    connections: int
    connections_of_an_address: int
    handshake_seconds: float = 3.0
    """Of the TLS handshake. With gRPC it ends when the client's HTTP/2 settings have arrived. With the
    transfer it ends when the initiator has proven that it holds the secret, and has made its offer. With the
    launcher of MPS daemons it ends when the request has arrived."""
    files_of_a_connection: ClassVar[int] = 1


class HttpLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of an HTTP/1.1 server. A deadline runs whenever the server waits for the client."""

    connections: int = 256
    """A connection with TLS takes 0.3 MiB of this process (asyncio's buffer alone is 256 KiB)."""
    connections_of_an_address: int = 192
    head_seconds: float = 5.0
    """From the handshake, or the first byte of a further request, to the end of the request's head."""
    body_seconds: float = 20.0
    """From the end of the head to the end of the body."""
    answer_seconds: float | None = None
    """From the end of the request to the end of its answer, or None if answers may be endless streams."""
    unread_seconds: float = 30.0
    """The time for which a client may leave unread more of an answer than the kernel takes."""
    idle_seconds: int = 5
    """From an answer to the next request."""
    head_bytes: int = 16 << 10
    head_fields: int = 64


class ProbeLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of a server without TLS that answers one request per connection and reads only its head."""

    head_seconds: float = 2.0
    head_bytes: int = 2 << 10
    unread_seconds: float = 2.0


class GrpcLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of a gRPC server."""

    streams: int = 32
    """Concurrent calls on a connection."""
    metadata_bytes: int = 16 << 10
    """The head of a call. gRPC refuses at random between half of it and all of it."""
    message_bytes: int = 4 << 20
    idle_seconds: float | None = 300.0
    """Without a call."""
    age_seconds: float | None = None
    """The age at which a connection takes no more calls, or None if subscriptions may stay open."""
    files_of_a_connection: ClassVar[int] = 3
    """The connection, and both ends of the one to gRPC."""


# The limits of each listener.


SITE_REST = HttpLimits(connections=1000, connections_of_an_address=750, head_bytes=32 << 10, head_fields=100)
SITE_ADMIN = GrpcLimits(connections=128, connections_of_an_address=64, age_seconds=3600.0)
PROBES = HttpLimits(connections=64, connections_of_an_address=48, answer_seconds=20.0)
"""/metrics, /healthz and /readyz."""
HEALTH = GrpcLimits(connections=32, connections_of_an_address=24, streams=4, age_seconds=60.0)
WEBHOOK = HttpLimits(
    answer_seconds=20.0,
    # Longer than the 90 s after which the API server closes an idle connection. If both closed it at the
    # same moment, a review would be lost, and its pod refused.
    idle_seconds=120,
)
SIMULATED_API_SERVER = HttpLimits()
SIMULATED_CONTROL = HttpLimits(connections=32, connections_of_an_address=24)
SIMULATED_NMX_C = GrpcLimits(connections=32, connections_of_an_address=24)
SIMULATED_NMX_M = HttpLimits()
PLUGIN_SOCKET = GrpcLimits(
    connections=32,
    connections_of_an_address=32,
    # If its connection ends, kubelet considers the plugin gone, and may delete its slices.
    idle_seconds=None,
)
IMEX_PROBE = ProbeLimits(connections=16, connections_of_an_address=16)
MPS_LAUNCHER = ConnectionLimits(connections=1, connections_of_an_address=1, handshake_seconds=5.0)
TRANSFER_CONTROL = ConnectionLimits(connections=1, connections_of_an_address=1, handshake_seconds=10.0)


# Every listener.


class Process(StrEnum):
    """The commands that listen."""

    SERVE = "serve"
    UP = "up"
    WEBHOOK = "webhook"
    CONTROLLER = "controller"
    NODE = "node"
    MPS = "node mps"
    IMEX = "imex run"
    TRANSFER = "transfer serve"


class Listener(msgspec.Struct, frozen=True):
    """One listener of a process."""

    process: Process
    name: str
    opener: str
    """The source file that opens it, below `src/rackloom`."""
    reachable: str
    """The hosts or users that can connect."""
    requires: str
    """The proof that a client must show to be served. The limits hold before."""
    limits: ConnectionLimits
    is_of_each_rack: bool = False


_CONFIGURED = "the address of the setting"
_THIS_MACHINE = "this machine"
_PODS = "the pod network"
_BEARER = "a bearer token; `/openapi.json` and the login page nothing"
_HTTP = "app/listeners.py"
LISTENERS = (
    Listener(Process.SERVE, "REST and rack map", _HTTP, _CONFIGURED, _BEARER, SITE_REST),
    Listener(
        Process.SERVE, "admin gRPC", "carve/admin/server.py", _CONFIGURED, "a client certificate", SITE_ADMIN
    ),
    Listener(Process.SERVE, "metrics and probes", _HTTP, _CONFIGURED, "nothing", PROBES),
    Listener(Process.UP, "REST and rack map", _HTTP, _THIS_MACHINE, _BEARER, SITE_REST),
    Listener(
        Process.UP, "simulated API server", _HTTP, _THIS_MACHINE, "a bearer token", SIMULATED_API_SERVER
    ),
    Listener(
        Process.UP,
        "control of the simulated site",
        _HTTP,
        _THIS_MACHINE,
        "the bearer token of `control.json`",
        SIMULATED_CONTROL,
    ),
    Listener(
        Process.UP,
        "simulated NMX-C, for each domain",
        "lab/switches/servers.py",
        _THIS_MACHINE,
        "nothing; in tests a client certificate",
        SIMULATED_NMX_C,
        is_of_each_rack=True,
    ),
    Listener(
        Process.WEBHOOK,
        "admission, metrics and probes",
        _HTTP,
        _PODS,
        "nothing: the API server shows no certificate",
        WEBHOOK,
    ),
    Listener(Process.CONTROLLER, "metrics and probes", _HTTP, _PODS, "nothing", PROBES),
    Listener(
        Process.NODE, "metrics and probes", _HTTP, f"{_PODS}; the NIC plugin: this machine", "nothing", PROBES
    ),
    Listener(Process.NODE, "gRPC health", "app/node/process.py", _PODS, "nothing", HEALTH),
    Listener(
        Process.NODE,
        "DRA and registration sockets of kubelet",
        "claim/node/run.py",
        "root of this machine (Unix sockets, mode 0600)",
        "nothing else",
        PLUGIN_SOCKET,
    ),
    Listener(
        Process.MPS,
        "starts of MPS daemons",
        "claim/node/gpu/mps_launcher.py",
        "root of this machine (Unix socket, mode 0600)",
        "nothing else",
        MPS_LAUNCHER,
    ),
    Listener(Process.IMEX, "probes", "claim/imex/daemon.py", _PODS, "nothing", IMEX_PROBE),
    Listener(
        Process.TRANSFER,
        "control channel",
        "prove/transfer/endpoints.py",
        "the address of `--listen`",
        "proof of the shared secret",
        TRANSFER_CONTROL,
    ),
)
"""Each listener of each long-running command."""


# Open files.


_OWN_FILES = 512
"""Files of a process without clients: database, log, connections to switch controllers and API servers."""
_FILES_OF_A_RACK = 8
"""Connections between a simulated rack and its controllers."""


def files_needed(process: Process, racks: int = 0) -> int:
    """The files that a process may have open while clients use all limits of its listeners."""
    needed = _OWN_FILES + racks * _FILES_OF_A_RACK
    for listener in LISTENERS:
        if listener.process is process:
            limits = listener.limits
            held = 1 + limits.connections * limits.files_of_a_connection
            needed += held * (racks if listener.is_of_each_rack else 1)
    return needed


def plan_file_limit(needed: int, soft: int, hard: int) -> int:
    """The soft limit of open files for a process that needs `needed`.

    Raises:
        Refused: the hard limit is lower, and only an administrator can raise it.
    """
    if soft >= needed:
        return soft
    if hard < needed:
        raise Refused(
            f"this process may have {hard} files open, and its connections may need {needed}",
            nearest_fix=f"raise the hard limit of open files to {needed} (LimitNOFILE, ulimit -Hn)",
        )
    return needed
