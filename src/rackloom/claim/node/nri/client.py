"""An NRI plugin: a connection to the container runtime's socket, and hooks for pod sandboxes.

One unix socket carries two logical connections: on the first the runtime calls the plugin, on the second
the plugin calls the runtime (to register). A mux frame is connection number and length (32 bits each, big
endian), then data. Inside is ttrpc: length, stream number, type and flags (32, 32, 8, 8 bits), then at
most 4 MiB of data. A message may span several mux frames. Streams that a client opens have odd numbers.

After every connection the runtime lists all living sandboxes (Synchronize, possibly in parts), and then
calls for each one that starts or stops. Requests are answered one after the other: a sandbox's end must
not overtake its start. A runtime that is away or restarts is waited for. An error in `run` fails the pod.
Runtimes before NRI 0.10 report all events by the method StateChange.

`HookMetrics` counts and times the calls: a runtime waits two seconds by default.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import structlog
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Counter, Histogram

from rackloom.claim.node.nri import nri_pb2 as wire
from rackloom.errors import Refused, Retry

# Sandboxes and their hooks.


class PodSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """One pod sandbox."""

    id: str
    pod: str
    """UID of the pod."""
    namespace: str
    name: str
    netns: str
    """Path of its network namespace. Empty for a pod in the host's."""


class SandboxHooks(Protocol):
    """Called for sandboxes, in the order of the events of each."""

    async def synchronize(self, living: tuple[PodSandbox, ...]) -> None:
        """All living sandboxes, after every connection. Must not raise."""

    async def run(self, sandbox: PodSandbox) -> None:
        """A sandbox is being started. An error fails the pod, which kubelet then tries again."""

    async def stop(self, sandbox: PodSandbox) -> None:
        """A sandbox is being stopped, but its namespace is still there. Must not raise."""


# Frames.


PLUGIN, RUNTIME = 1, 2
"""Connections: on the first the runtime calls the plugin, on the second the plugin calls the runtime."""
REQUEST, RESPONSE = 1, 2
LARGEST = 4 << 20
_MUX = struct.Struct(">II")
_TTRPC = struct.Struct(">IIBB")


class TtrpcFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One ttrpc message."""

    connection: int
    stream: int
    type: int
    data: bytes

    def encode(self) -> bytes:
        """The bytes on the socket: one mux frame, so that the reader needs no memory of earlier ones."""
        message = _TTRPC.pack(len(self.data), self.stream, self.type, 0) + self.data
        return _MUX.pack(self.connection, len(message)) + message


class MalformedFrame(Exception):
    """The peer does not speak ttrpc."""


async def read_frames(reader: asyncio.StreamReader) -> AsyncIterator[TtrpcFrame]:
    """Frames until the peer closes the connection. Raises `MalformedFrame`."""
    pending = {PLUGIN: b"", RUNTIME: b""}
    while True:
        try:
            connection, length = _MUX.unpack(await reader.readexactly(_MUX.size))
            if length > LARGEST + _TTRPC.size:
                raise MalformedFrame(f"a frame of {length} bytes")
            data = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if connection not in pending:
            continue
        pending[connection] += data
        while (found := _first_frame(connection, pending[connection])) is not None:
            frame, size = found
            pending[connection] = pending[connection][size:]
            yield frame


def _first_frame(connection: int, data: bytes) -> tuple[TtrpcFrame, int] | None:
    if len(data) < _TTRPC.size:
        return None
    length, stream, kind, _ = _TTRPC.unpack_from(data)
    if length > LARGEST:
        raise MalformedFrame(f"a message of {length} bytes")
    size = _TTRPC.size + length
    if len(data) < size:
        return None
    return TtrpcFrame(connection=connection, stream=stream, type=kind, data=data[_TTRPC.size : size]), size


# The plugin.


log = structlog.get_logger(__name__)

NRI_SOCKET = Path("/var/run/nri/nri.sock")
PLUGIN_INDEX = "00"
"""Plugins are called in the order of their indices. This one is first: others may expect the NIC to be
there."""
RECONNECT_SECONDS = 2.0
_REGISTER_STREAM = 1
_REGISTER_NANOS = 5_000_000_000
# An event's bit in the mask is its number less one (api.EventMask of containerd/nri).
_EVENTS = (1 << wire.RUN_POD_SANDBOX - 1) | (1 << wire.STOP_POD_SANDBOX - 1)
_UNKNOWN, _UNIMPLEMENTED = 2, 12
"""gRPC codes."""
_PLUGIN_SERVICE, _RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"


@dataclass(eq=False)
class NriPlugin:
    """A plugin of the runtime behind a socket."""

    name: str
    hooks: SandboxHooks
    socket: Path = NRI_SOCKET
    measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    """Entered for each call of a hook, with its name: `synchronize`, `run` or `stop`."""
    connected: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once the runtime has listed its sandboxes: from then on it calls for new ones."""
    _living: list[PodSandbox] = field(default_factory=list, init=False)

    async def run(self) -> None:
        """Serve for ever. A runtime that is away, or restarts, is waited for."""
        logged = ""
        while True:
            try:
                await self._session()
                logged = ""
                log.info("nri.disconnected", socket=str(self.socket))
            except (OSError, MalformedFrame, Refused) as trouble:
                if str(trouble) != logged:
                    logged = str(trouble)
                    log.warning("nri.not-connected", socket=str(self.socket), reason=logged)
            self.connected.clear()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        self._living = []
        with closing(writer):
            writer.write(self._register())
            async for frame in read_frames(reader):
                if frame.connection == PLUGIN and frame.type == REQUEST:
                    # One after the other: a sandbox's end must not overtake its start.
                    writer.write(await self._answer(frame))
                    await writer.drain()
                elif frame.connection == RUNTIME and frame.type == RESPONSE:
                    status = wire.Response.FromString(frame.data).status
                    if status.code:
                        raise Refused(f"the runtime does not take the plugin: {status.message}")

    def _register(self) -> bytes:
        registration = wire.RegisterPluginRequest(plugin_name=self.name, plugin_idx=PLUGIN_INDEX)
        request = wire.Request(
            service=_RUNTIME_SERVICE,
            method="RegisterPlugin",
            payload=registration.SerializeToString(),
            timeout_nano=_REGISTER_NANOS,
        )
        data = request.SerializeToString()
        return TtrpcFrame(connection=RUNTIME, stream=_REGISTER_STREAM, type=REQUEST, data=data).encode()

    async def _answer(self, frame: TtrpcFrame) -> bytes:
        response = wire.Response(status=wire.Status())
        try:
            request = wire.Request.FromString(frame.data)
            response.payload = (await self._call(request)).SerializeToString()
        except _Unimplemented as unknown:
            response.status.CopyFrom(wire.Status(code=_UNIMPLEMENTED, message=str(unknown)))
        except (Refused, Retry, DecodeError) as trouble:
            response.status.CopyFrom(wire.Status(code=_UNKNOWN, message=str(trouble)))
        data = response.SerializeToString()
        return TtrpcFrame(connection=PLUGIN, stream=frame.stream, type=RESPONSE, data=data).encode()

    async def _call(self, request: wire.Request) -> Message:
        methods: dict[str, Callable[[bytes], Awaitable[Message]]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": _nothing,
            "RunPodSandbox": lambda data: self._call_hook("run", wire.SandboxRequest.FromString(data).pod),
            "StopPodSandbox": lambda data: self._call_hook("stop", wire.SandboxRequest.FromString(data).pod),
            "StateChange": self._state_change,
        }
        method = methods.get(request.method)
        if request.service != _PLUGIN_SERVICE or method is None:
            raise _Unimplemented(f"{request.service}/{request.method}")
        return await method(request.payload)

    async def _configure(self, payload: bytes) -> Message:
        request = wire.ConfigureRequest.FromString(payload)
        log.info("nri.connected", runtime=request.runtime_name, version=request.runtime_version)
        return wire.ConfigureResponse(events=_EVENTS)

    async def _synchronize(self, payload: bytes) -> Message:
        """A long list comes in several parts. Only the last is without `more`."""
        request = wire.SynchronizeRequest.FromString(payload)
        self._living += [_sandbox(pod) for pod in request.pods]
        if not request.more:
            with self.measure("synchronize"):
                await self.hooks.synchronize(tuple(self._living))
            self._living = []
            self.connected.set()
        return wire.SynchronizeResponse(more=request.more)

    async def _call_hook(self, hook: Literal["run", "stop"], pod: wire.Sandbox) -> Message:
        call, sandbox = (self.hooks.run if hook == "run" else self.hooks.stop), _sandbox(pod)
        with self.measure(hook):
            await call(sandbox)
        return wire.Response()

    async def _state_change(self, payload: bytes) -> Message:
        """All events by one method: so do runtimes before NRI 0.10."""
        change = wire.StateChangeEvent.FromString(payload)
        if change.event == wire.RUN_POD_SANDBOX:
            return await self._call_hook("run", change.pod)
        if change.event == wire.STOP_POD_SANDBOX:
            return await self._call_hook("stop", change.pod)
        return wire.Response()


class _Unimplemented(Exception):
    """A method that this plugin does not have."""


async def _nothing(_payload: bytes) -> Message:
    return wire.Response()


def _sandbox(pod: wire.Sandbox) -> PodSandbox:
    netns = next((namespace.path for namespace in pod.linux.namespaces if namespace.type == "network"), "")
    return PodSandbox(id=pod.id, pod=pod.uid, namespace=pod.namespace, name=pod.name, netns=netns)


# Metrics.


HOOK_EVENTS = ("synchronize", "run", "stop")
NRI_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 5.0)
"""Seconds. A runtime waits two by default."""


class HookMetrics:
    """Counts the calls of hooks, and times them with `clock`, in seconds."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        help_text, labels = "Requests of the container runtime", ("event", "outcome")
        self._requests = Counter("rackloom_nri_requests", help_text, labels, registry=registry)
        self._seconds = Histogram(
            "rackloom_nri_request_duration_seconds",
            "Time that the container runtime waits",
            ("event",),
            buckets=NRI_DURATION_BUCKETS,
            registry=registry,
        )
        for event in HOOK_EVENTS:
            self._seconds.labels(event)
            for outcome in ("done", "failed"):
                self._requests.labels(event, outcome)

    @contextmanager
    def measure(self, event: str) -> Iterator[None]:
        """Measure one call."""
        start, outcome = self._clock(), "failed"
        try:
            yield
            outcome = "done"
        finally:
            self._requests.labels(event, outcome).inc()
            self._seconds.labels(event).observe(self._clock() - start)
