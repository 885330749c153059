"""A container runtime as far as NRI goes: written from the protocol, apart from the code under test."""

import asyncio
import struct
from contextlib import asynccontextmanager, suppress

from rackloom.claim.node.nri import nri_pb2 as wire


class Runtime:
    """Accepts one plugin at a time and calls it."""

    def __init__(self, path, *, one_method_for_events=True):
        self.path = path
        self.one_method_for_events = one_method_for_events
        self.sandboxes = {}
        self.registered = []
        self.events = 0
        self.ready = asyncio.Event()
        self.refuse = ""
        self._stream = 1
        self._pending = {}
        self._writer = None

    @asynccontextmanager
    async def serving(self):
        server = await asyncio.start_unix_server(self._session, str(self.path))
        try:
            yield self
        finally:
            server.close()
            await self.hang_up()

    async def hang_up(self):
        """Close the connection, as a runtime does that ends."""
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    async def _session(self, reader, writer):
        self._writer = writer
        try:
            while True:
                connection, length = struct.unpack(">II", await reader.readexactly(8))
                data = await reader.readexactly(length)
                size, stream, kind, _ = struct.unpack(">IIBB", data[:10])
                payload = data[10:]
                while len(payload) < size:
                    _, more = struct.unpack(">II", await reader.readexactly(8))
                    payload += await reader.readexactly(more)
                if connection == 2:
                    assert kind == 1
                    await self._registered(wire.Request.FromString(payload), stream)
                else:
                    self._pending.pop(stream).set_result(wire.Response.FromString(payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ready.clear()
        finally:
            writer.close()

    async def _registered(self, request, stream):
        assert request.service == "nri.pkg.api.v1alpha1.Runtime"
        assert request.method == "RegisterPlugin"
        self.registered.append(wire.RegisterPluginRequest.FromString(request.payload))
        status = wire.Status(code=9, message=self.refuse) if self.refuse else wire.Status()
        self._send(2, stream, 2, wire.Response(status=status).SerializeToString())
        if not self.refuse:
            self._greeting = asyncio.create_task(self._greet())

    async def _greet(self):
        told = await self.call(
            "Configure", wire.ConfigureRequest(runtime_name="runtime", runtime_version="9")
        )
        self.events = wire.ConfigureResponse.FromString(told.payload).events
        pods = list(self.sandboxes.values())
        for number, pod in enumerate(pods or [None]):
            more = number + 1 < len(pods)
            await self.call("Synchronize", wire.SynchronizeRequest(pods=[pod] if pod else [], more=more))
        self.ready.set()

    async def call(self, method, request):
        stream, self._stream = self._stream, self._stream + 2
        self._pending[stream] = asyncio.get_running_loop().create_future()
        service = "nri.pkg.api.v1alpha1.Plugin"
        body = wire.Request(service=service, method=method, payload=request.SerializeToString())
        self._send(1, stream, 1, body.SerializeToString())
        return await self._pending[stream]

    def _send(self, connection, stream, kind, data):
        """As real runtimes do: the message in as many mux frames as their buffers make of it."""
        message = struct.pack(">IIBB", len(data), stream, kind, 0) + data
        for at in range(0, len(message), 40):
            part = message[at : at + 40]
            self._writer.write(struct.pack(">II", connection, len(part)) + part)

    async def run(self, pod_uid, netns, name="p"):
        """Start a sandbox; what the plugin answers."""
        pod = _sandbox(pod_uid, netns, name)
        answer = await self._event(wire.RUN_POD_SANDBOX, "RunPodSandbox", pod)
        if not answer.status.code:
            self.sandboxes[pod_uid] = pod
        return answer.status.message

    def knows(self, pod_uid, netns):
        """A sandbox that was started when no plugin was connected."""
        self.sandboxes[pod_uid] = _sandbox(pod_uid, netns, "p")

    async def stop(self, pod_uid):
        """End a sandbox."""
        pod = self.sandboxes.pop(pod_uid)
        return (await self._event(wire.STOP_POD_SANDBOX, "StopPodSandbox", pod)).status.message

    async def _event(self, event, method, pod):
        if self.one_method_for_events:
            return await self.call("StateChange", wire.StateChangeEvent(event=event, pod=pod))
        return await self.call(method, wire.SandboxRequest(pod=pod))


def _sandbox(pod_uid, netns, name):
    spaces = [wire.Namespace(type="pid", path="/proc/1/ns/pid")]
    if netns:
        spaces.append(wire.Namespace(type="network", path=str(netns)))
    pod = wire.Sandbox(id=f"sandbox-{pod_uid}", uid=pod_uid, name=name, namespace="default")
    pod.linux.namespaces.extend(spaces)
    return pod
