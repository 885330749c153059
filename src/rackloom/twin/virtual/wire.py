"""The way between a client and a simulated controller, without sockets: the same bytes, the same service.

`SimChannel` is handed to the NMX-C driver in place of a gRPC channel. Every message is serialized and parsed
as it would be on a wire, and the controller answers through the service that also stands behind the real
server. What a network does to calls is decided call by call by a `Trip`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Never, Protocol

import grpc
import grpc.aio
import msgspec
from google.protobuf.message_factory import GetMessageClass

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.twin.switches.nmxc_service import NmxcService

_SERVICE = pb.DESCRIPTOR.services_by_name["NMX_Controller"]


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one call on its way."""

    there: float | None = 0.002
    """Seconds until the controller acts. Longer than the caller's deadline: it acts late. None: it never
    hears of the call."""
    back: float | None = 0.002
    """Seconds until the answer arrives; None: it is lost."""
    copies: int = 1
    """How often the controller receives the request; the answer to the first copy is the one that counts.
    0: something in between says that all is well, and the controller never hears of it."""
    refused: bool = False
    """Nobody listens: the call fails at once."""


class _Call(msgspec.Struct, frozen=True):
    """What a gRPC server tells its handlers of a call."""

    method: str
    invocation_metadata: tuple[()]


class Network(Protocol):
    """Decides what happens to calls and notifications of one controller."""

    def trip(self, rpc: str) -> Trip:
        """The fate of a call that is made now."""

    def deliveries(self) -> int:
        """How often a notification that is sent now arrives; 0: it is lost."""


Executed = Callable[[str, Any, Any, bool], None]
"""Told of every call that the controller has acted on: rpc, request, reply, and whether it is what the
client expects (the first copy, while the client still waits)."""

Checkpoint = Callable[[], None]
"""Called before a request leaves the client and after the reply has come; a dead client raises here."""


class SimContext:
    """What a servicer may do with a call besides answering it."""

    async def abort(self, code: grpc.StatusCode, details: str) -> Never:
        """End the call with a status."""
        raise failure(code, details)


def failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """The error that a gRPC client sees."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SimSwitch:
    """A controller that can be reached through channels: its service, its network, its open streams."""

    def __init__(self, service: NmxcService, network: Network, executed: Executed) -> None:
        self._handlers = service.handlers()
        self._network = network
        self._executed = executed
        self._streams: list[SimStream] = []
        self._under_way: set[asyncio.Task[bytes]] = set()

    def serve(self, service: NmxcService, executed: Executed | None = None) -> None:
        """Answer from another state, as a standby does once it leads. Subscriptions end.

        `executed` is told of calls from now on, where somebody else is to be.
        """
        self._handlers = service.handlers()
        self._executed = executed or self._executed
        self.break_streams()

    def connect(self, checkpoint: Checkpoint) -> "SimChannel":
        """A channel to this controller for one client."""
        return SimChannel(self, checkpoint)

    def break_streams(self) -> None:
        """End all subscriptions, as a controller that restarts does."""
        for stream in list(self._streams):
            stream.fail("the connection was reset")

    async def unary(self, rpc: str, request: bytes, seconds: float) -> bytes:
        """One call, its request and its reply serialized. Raises AioRpcError."""
        trip = self._network.trip(rpc)
        if trip.refused:
            raise failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        waiting = [True]
        try:
            async with asyncio.timeout(seconds):
                await _travel(0.0 if trip.there is not None else None)
                # A controller does not stop what it does when its client stops waiting.
                reply = await asyncio.shield(self._begin(rpc, request, trip, waiting))
                await _travel(trip.back)
        except TimeoutError:
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            waiting.clear()
        return reply

    def subscribe(self, request: bytes) -> "SimStream":
        """Open a subscription."""
        return SimStream(self._notifications(request), self._network, self._streams)

    def _begin(self, rpc: str, request: bytes, trip: Trip, waiting: list[bool]) -> "asyncio.Task[bytes]":
        acting = asyncio.create_task(self._act(rpc, request, trip, waiting))
        self._under_way.add(acting)
        acting.add_done_callback(self._finished)
        return acting

    async def _act(self, rpc: str, request: bytes, trip: Trip, waiting: list[bool]) -> bytes:
        await asyncio.sleep(trip.there or 0.0)
        if not trip.copies:
            hello = await self._once("Hello", pb.ClientHello().SerializeToString(), expected=False)
            return _hollow_success(rpc, hello)
        reply = await self._once(rpc, request, expected=bool(waiting))
        for _ in range(trip.copies - 1):
            await self._once(rpc, request, expected=False)
        return reply

    async def _once(self, rpc: str, request: bytes, *, expected: bool) -> bytes:
        handler = self._handler(rpc)
        parsed = handler.request_deserializer(request)
        reply = await handler.unary_unary(parsed, SimContext())
        self._executed(rpc, parsed, reply, expected)
        return bytes(handler.response_serializer(reply))

    async def _notifications(self, request: bytes) -> AsyncIterator[bytes]:
        if self._network.trip("Subscribe").refused:
            raise failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        handler = self._handler("Subscribe")
        async for one in handler.unary_stream(handler.request_deserializer(request), SimContext()):
            yield handler.response_serializer(one)

    def _handler(self, rpc: str) -> Any:
        return self._handlers.service(_Call(f"/{_SERVICE.full_name}/{rpc}", ()))

    def _finished(self, task: "asyncio.Task[bytes]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone: nobody else will look at it


class SimStream:
    """A server stream as `grpc.aio` gives it: `read` one message, `cancel` the whole."""

    def __init__(self, messages: AsyncIterator[bytes], network: Network, streams: "list[SimStream]") -> None:
        self._arrived: asyncio.Queue[bytes | grpc.aio.AioRpcError] = asyncio.Queue()
        self._network = network
        self._streams = streams
        streams.append(self)
        self._pumping = asyncio.create_task(self._pump(messages))

    async def read(self) -> bytes:
        """The next message; raises AioRpcError when the stream is broken."""
        one = await self._arrived.get()
        if isinstance(one, grpc.aio.AioRpcError):
            raise one
        return one

    def fail(self, why: str) -> None:
        """Break the stream."""
        self._arrived.put_nowait(failure(grpc.StatusCode.UNAVAILABLE, why))
        self.cancel()

    def cancel(self) -> None:
        """Stop listening."""
        if self in self._streams:
            self._streams.remove(self)
        self._pumping.cancel()

    async def _pump(self, messages: AsyncIterator[bytes]) -> None:
        acknowledged = False
        try:
            async for one in messages:
                # A stream that is lost before its acknowledgement is a lost connection, not a lost notice.
                for _ in range(self._network.deliveries() if acknowledged else 1):
                    self._arrived.put_nowait(one)
                acknowledged = True
        except grpc.aio.AioRpcError as error:
            self._arrived.put_nowait(error)


class SimChannel:
    """As much of `grpc.aio.Channel` as a generated stub uses."""

    def __init__(self, switch: SimSwitch, checkpoint: Checkpoint) -> None:
        self._switch = switch
        self._checkpoint = checkpoint

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[..., Awaitable[Any]]:
        """The caller of a unary method."""
        rpc = method.rpartition("/")[2]

        async def call(request: Any, *, timeout: float) -> Any:  # noqa: ASYNC109 (the stub's signature)
            self._checkpoint()
            reply = await self._switch.unary(rpc, request_serializer(request), timeout)
            self._checkpoint()
            return response_deserializer(reply)

        return call

    def unary_stream(
        self,
        _method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[..., "_Reading"]:
        """The caller of the one method that streams."""
        return lambda request: _Reading(
            self._switch.subscribe(request_serializer(request)), response_deserializer
        )

    async def close(self) -> None:
        """Nothing is held."""


class _Reading:
    """A stream whose messages are parsed."""

    def __init__(self, stream: SimStream, parse: Callable[[bytes], Any]) -> None:
        self._stream = stream
        self._parse = parse

    async def read(self) -> Any:
        return self._parse(await self._stream.read())

    def cancel(self) -> None:
        self._stream.cancel()


async def _travel(seconds: float | None) -> None:
    if seconds is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(seconds)


def _hollow_success(rpc: str, hello: bytes) -> bytes:
    """A reply that says success and nothing else; a new partition gets an id that nobody has."""
    reply: Any = GetMessageClass(_SERVICE.methods_by_name[rpc].output_type)()
    reply.server_header.CopyFrom(pb.ServerHello.FromString(hello).server_header)
    if rpc == "CreatePartition":
        reply.partition_id.partition_id = 32765
    return bytes(reply.SerializeToString())
