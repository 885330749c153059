"""The NRI side of a container runtime, written from the protocol, not from the plugin it calls.

It accepts one plugin at a time on a Unix socket. The connection multiplexes two ttRPC services.
Messages are split into small frames, as real runtimes split them by their buffers. After registration
it configures the plugin and synchronises all sandboxes, one per message. Before NRI 0.10 all events
share the method StateChange. Later each event has its own. Both forms are supported.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from google.protobuf.message import Message

from rackloom.claim.node.nri import nri_pb2 as wire

_PLUGIN, _RUNTIME = 1, 2
_REQUEST, _RESPONSE = 1, 2
_FAILED_PRECONDITION = 9
_FRAME_BYTES = 40
_PLUGIN_SERVICE, _RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"


class NriRuntime:
    """Accepts one plugin at a time on the socket `path`, and calls it.

    Before NRI 0.10 there is `one_method_for_events` (StateChange). Later each event has its own.
    """

    def __init__(self, path: Path, *, one_method_for_events: bool = True) -> None:
        self.path = path
        self.one_method_for_events = one_method_for_events
        self.sandboxes: dict[str, wire.Sandbox] = {}
        """Those that live, by the pod's UID."""
        self.registered: list[wire.RegisterPluginRequest] = []
        self.events = 0
        """The events that the plugin subscribed to."""
        self.ready = asyncio.Event()
        """Set while a plugin is connected and knows all sandboxes."""
        self.refuse = ""
        """The reason to take no plugin. Empty if all are taken."""
        self._stream = 1
        self._pending: dict[int, asyncio.Future[wire.Response]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._greeting: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["NriRuntime"]:
        """Listen while the context is entered."""
        server = await asyncio.start_unix_server(self._session, str(self.path))
        try:
            yield self
        finally:
            server.close()
            await self.hang_up()

    async def hang_up(self) -> None:
        """Close the connection, as a runtime does that ends."""
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    async def run(self, pod_uid: str, netns: Path | str, name: str = "p") -> str:
        """Start a sandbox. Return the complaint of the plugin, or an empty text if the pod may start."""
        pod = _pod_sandbox(pod_uid, netns, name)
        answer = await self._event(wire.RUN_POD_SANDBOX, "RunPodSandbox", pod)
        if not answer.status.code:
            self.sandboxes[pod_uid] = pod
        return str(answer.status.message)

    def add_sandbox(self, pod_uid: str, netns: Path | str) -> None:
        """A sandbox that was started when no plugin was connected."""
        self.sandboxes[pod_uid] = _pod_sandbox(pod_uid, netns, "p")

    async def stop(self, pod_uid: str) -> str:
        """End a sandbox. Returns the plugin's complaint."""
        pod = self.sandboxes.pop(pod_uid)
        return str((await self._event(wire.STOP_POD_SANDBOX, "StopPodSandbox", pod)).status.message)

    async def call(self, method: str, request: Message) -> wire.Response:
        """Any method of the plugin."""
        stream, self._stream = self._stream, self._stream + 2
        self._pending[stream] = asyncio.get_running_loop().create_future()
        body = wire.Request(service=_PLUGIN_SERVICE, method=method, payload=request.SerializeToString())
        self._send(_PLUGIN, stream, _REQUEST, body.SerializeToString())
        return await self._pending[stream]

    async def _event(self, event: "wire.Event.ValueType", method: str, pod: wire.Sandbox) -> wire.Response:
        if self.one_method_for_events:
            return await self.call("StateChange", wire.StateChangeEvent(event=event, pod=pod))
        return await self.call(method, wire.SandboxRequest(pod=pod))

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            while True:
                await self._message(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ready.clear()
        finally:
            writer.close()

    async def _message(self, reader: asyncio.StreamReader) -> None:
        connection, length = struct.unpack(">II", await reader.readexactly(8))
        data = await reader.readexactly(length)
        size, stream, _, _ = struct.unpack(">IIBB", data[:10])
        payload = data[10:]
        while len(payload) < size:
            _, more = struct.unpack(">II", await reader.readexactly(8))
            payload += await reader.readexactly(more)
        if connection == _RUNTIME:
            self._registered(wire.Request.FromString(payload), stream)
        else:
            self._pending.pop(stream).set_result(wire.Response.FromString(payload))

    def _registered(self, request: wire.Request, stream: int) -> None:
        if (request.service, request.method) != (_RUNTIME_SERVICE, "RegisterPlugin"):
            raise ValueError(f"the plugin calls {request.service}/{request.method}")
        self.registered.append(wire.RegisterPluginRequest.FromString(request.payload))
        refused = wire.Status(code=_FAILED_PRECONDITION, message=self.refuse)
        status = refused if self.refuse else wire.Status()
        self._send(_RUNTIME, stream, _RESPONSE, wire.Response(status=status).SerializeToString())
        if not self.refuse:
            self._greeting = asyncio.create_task(self._greet())

    async def _greet(self) -> None:
        answer = await self.call(
            "Configure", wire.ConfigureRequest(runtime_name="runtime", runtime_version="9")
        )
        self.events = wire.ConfigureResponse.FromString(answer.payload).events
        pods = list(self.sandboxes.values())
        for number, pod in enumerate(pods or [None]):
            more = number + 1 < len(pods)
            await self.call("Synchronize", wire.SynchronizeRequest(pods=[pod] if pod else [], more=more))
        self.ready.set()

    def _send(self, connection: int, stream: int, kind: int, data: bytes) -> None:
        """As real runtimes do: the message in as many mux frames as their buffers make of it."""
        if self._writer is None:
            raise ConnectionError("no plugin is connected")
        message = struct.pack(">IIBB", len(data), stream, kind, 0) + data
        for at in range(0, len(message), _FRAME_BYTES):
            part = message[at : at + _FRAME_BYTES]
            self._writer.write(struct.pack(">II", connection, len(part)) + part)


def _pod_sandbox(pod_uid: str, netns: Path | str, name: str) -> wire.Sandbox:
    spaces = [wire.Namespace(type="pid", path="/proc/1/ns/pid")]
    if netns:
        spaces.append(wire.Namespace(type="network", path=str(netns)))
    pod = wire.Sandbox(id=f"sandbox-{pod_uid}", uid=pod_uid, name=name, namespace="default")
    pod.linux.namespaces.extend(spaces)
    return pod
