"""Connecting to a runtime's NRI socket, and answering it for as long as it is there."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError, Message

from rackloom.claim.node.nri import nri_pb2 as wire
from rackloom.claim.node.nri.framing import PLUGIN, REQUEST, RESPONSE, RUNTIME, Frame, Malformed, frames
from rackloom.claim.node.nri.hooks import Hooks, Sandbox
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

SOCKET = Path("/var/run/nri/nri.sock")
INDEX = "00"
"""Plugins are called in the order of their indices: before the others, a NIC may be what they look for."""
AGAIN_SECONDS = 2.0
_REGISTER_STREAM = 1
_REGISTER_NANOS = 5_000_000_000
_EVENTS = (1 << wire.RUN_POD_SANDBOX - 1) | (1 << wire.STOP_POD_SANDBOX - 1)
_UNKNOWN, _UNIMPLEMENTED = 2, 12
"""gRPC codes."""
_PLUGIN_SERVICE, _RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"


class NriPlugin:
    """A plugin of the runtime behind a socket."""

    def __init__(self, name: str, hooks: Hooks, socket: Path = SOCKET) -> None:
        self._name = name
        self._hooks = hooks
        self._socket = socket
        self._living: list[Sandbox] = []
        self.connected = asyncio.Event()
        """Set while the runtime has told of all its sandboxes and calls us for new ones."""

    async def run(self) -> None:
        """Serve for ever; a runtime that is away, or restarts, is waited for."""
        told = ""
        while True:
            try:
                await self._session()
                told = ""
                log.info("nri.disconnected", socket=str(self._socket))
            except (OSError, Malformed, Refused) as trouble:
                if str(trouble) != told:
                    told = str(trouble)
                    log.warning("nri.not-connected", socket=str(self._socket), reason=told)
            self.connected.clear()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        self._living = []
        with closing(writer):
            writer.write(self._register())
            async for frame in frames(reader):
                if frame.connection == PLUGIN and frame.type == REQUEST:
                    # One after the other: a sandbox's end must not overtake its start.
                    writer.write(await self._answer(frame))
                    await writer.drain()
                elif frame.connection == RUNTIME and frame.type == RESPONSE:
                    _check_registered(frame.data)

    def _register(self) -> bytes:
        request = wire.Request(
            service=_RUNTIME_SERVICE,
            method="RegisterPlugin",
            payload=wire.RegisterPluginRequest(plugin_name=self._name, plugin_idx=INDEX).SerializeToString(),
            timeout_nano=_REGISTER_NANOS,
        )
        frame = Frame(
            connection=RUNTIME, stream=_REGISTER_STREAM, type=REQUEST, data=request.SerializeToString()
        )
        return frame.encode()

    async def _answer(self, frame: Frame) -> bytes:
        response = wire.Response(status=wire.Status())
        try:
            request = wire.Request.FromString(frame.data)
            response.payload = (await self._call(request)).SerializeToString()
        except _Unimplemented as unknown:
            response.status.CopyFrom(wire.Status(code=_UNIMPLEMENTED, message=str(unknown)))
        except (Refused, Retry, DecodeError) as trouble:
            response.status.CopyFrom(wire.Status(code=_UNKNOWN, message=str(trouble)))
        data = response.SerializeToString()
        return Frame(connection=PLUGIN, stream=frame.stream, type=RESPONSE, data=data).encode()

    async def _call(self, request: wire.Request) -> Message:
        methods: dict[str, Callable[[bytes], Awaitable[Message]]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": _nothing,
            "RunPodSandbox": self._run,
            "StopPodSandbox": self._stop,
            "StateChange": self._state_change,
        }
        method = methods.get(request.method)
        if request.service != _PLUGIN_SERVICE or method is None:
            raise _Unimplemented(f"{request.service}/{request.method}")
        return await method(request.payload)

    async def _configure(self, payload: bytes) -> Message:
        told = wire.ConfigureRequest.FromString(payload)
        log.info("nri.connected", runtime=told.runtime_name, version=told.runtime_version)
        return wire.ConfigureResponse(events=_EVENTS)

    async def _synchronize(self, payload: bytes) -> Message:
        """A long list comes in several parts; only the last is without `more`."""
        told = wire.SynchronizeRequest.FromString(payload)
        self._living += [_sandbox(pod) for pod in told.pods]
        if not told.more:
            await self._hooks.synchronize(tuple(self._living))
            self._living = []
            self.connected.set()
        return wire.SynchronizeResponse(more=told.more)

    async def _run(self, payload: bytes) -> Message:
        await self._hooks.run(_sandbox(wire.SandboxRequest.FromString(payload).pod))
        return wire.Response()

    async def _stop(self, payload: bytes) -> Message:
        await self._hooks.stop(_sandbox(wire.SandboxRequest.FromString(payload).pod))
        return wire.Response()

    async def _state_change(self, payload: bytes) -> Message:
        """How runtimes before NRI 0.10 tell of sandboxes: one method for all events."""
        told = wire.StateChangeEvent.FromString(payload)
        if told.event == wire.RUN_POD_SANDBOX:
            await self._hooks.run(_sandbox(told.pod))
        elif told.event == wire.STOP_POD_SANDBOX:
            await self._hooks.stop(_sandbox(told.pod))
        return wire.Response()


class _Unimplemented(Exception):
    """A method that this plugin does not have."""


async def _nothing(_payload: bytes) -> Message:
    return wire.Response()


def _check_registered(data: bytes) -> None:
    status = wire.Response.FromString(data).status
    if status.code:
        raise Refused(f"the runtime does not take the plugin: {status.message}")


def _sandbox(pod: wire.Sandbox) -> Sandbox:
    netns = next((one.path for one in pod.linux.namespaces if one.type == "network"), "")
    return Sandbox(id=pod.id, pod=pod.uid, namespace=pod.namespace, name=pod.name, netns=netns)
