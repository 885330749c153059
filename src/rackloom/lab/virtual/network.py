"""The network between the site service and simulated controllers, without sockets: gRPC and HTTP.

`SimChannel` takes the place of a gRPC channel in the NMX-C driver. It serializes and parses every
message, and the controller answers through the same service class that the socket server uses.
`NmxmTransport` does the same for NMX-M as an httpx2 transport.

A `CallFate` describes the way of one call: how long each direction takes, whether it is refused,
whether the request or the reply is lost, and how often the controller receives it. Zero copies model a
proxy that reports success for a request that never arrived. A delay beyond the client's deadline makes
the controller act late: it does not stop when its client stops waiting.

`SimNetwork` draws these fates. Its fields are the network faults of the catalogue: down, dark (packets
vanish), slow, lost or duplicated notifications, and a queue of fates for the next mutations.

Each client call passes its process's crash point before the request and after the reply.
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Never

import grpc
import grpc.aio
import httpx2
import msgspec
from google.protobuf.message_factory import GetMessageClass
from grpc._common import deserialize

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.lab.switches.nmxm import NmxmService

_SERVICE = pb.DESCRIPTOR.services_by_name["NMX_Controller"]


class CallFate(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one call on its way."""

    there: float | None = 0.002
    """Seconds until the controller acts, or None if the call never arrives. The controller acts late if
    this is longer than the caller's deadline."""
    back: float | None = 0.002
    """Seconds until the answer arrives, or None if it is lost."""
    copies: int = 1
    """How often the controller receives the request. The answer to the first copy is the one that counts.
    0: a proxy reports success, and the request never arrives."""
    refused: bool = False
    """The call fails at once, because no server listens."""


class _Call(msgspec.Struct, frozen=True):
    """The details of a call that a gRPC server passes to its handlers."""

    method: str
    invocation_metadata: tuple[()]


MUTATIONS = frozenset({"CreatePartition", "DeletePartition", "AddGpusToPartition", "RemoveGpusFromPartition"})


class SimNetwork:
    """The network in front of one controller, with the faults that its fields set."""

    down = False
    """Connections are refused."""
    dark = False
    """Packets vanish."""
    slow = 0.0
    """Mean delay that is added to each direction, in seconds."""
    notice_loss = 0.0
    """Share of the notifications that are lost."""
    notice_copies = 1
    """How often a notification arrives."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next_mutations: deque[CallFate] = deque()
        """Fates of the next changes that are requested."""

    def heal(self) -> None:
        """Everything arrives, once and in time."""
        rng = self.rng
        vars(self).clear()
        self.__init__(rng)  # type: ignore[misc]

    def trip(self, rpc: str) -> CallFate:
        """The fate of a call that is made now."""
        if self.down:
            return CallFate(refused=True)
        if self.dark:
            return CallFate(there=None)
        # A queued fate belongs to the next change. Reads pass with the usual delay.
        if rpc in MUTATIONS and self.next_mutations:
            return self.next_mutations.popleft()
        return CallFate(there=self.delay(), back=self.delay())

    def deliveries(self) -> int:
        """How often a notification arrives."""
        return 0 if self.rng.random() < self.notice_loss else self.notice_copies

    def delay(self) -> float:
        """Seconds that one way takes now."""
        usual = self.rng.uniform(0.001, 0.02)
        return usual + (self.rng.expovariate(1 / self.slow) if self.slow else 0.0)


OnExecuted = Callable[[str, Any, Any, bool], None]
"""Called with every call that the controller has acted on: rpc, request, reply, and whether the client
expects the reply (the first copy, while the client still waits)."""

OnCrashPoint = Callable[[], None]
"""Called before a request leaves the client and after the reply has come. Raises if the client is dead."""


class SimCallContext:
    """The operations on a call that a servicer has besides answering it."""

    async def abort(self, code: grpc.StatusCode, details: str) -> Never:
        """End the call with a status."""
        raise rpc_failure(code, details)


def rpc_failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """The error that a gRPC client sees."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SimController:
    """A controller that can be reached through channels: its service, its network, its open streams."""

    def __init__(self, service: NmxcService, network: SimNetwork, executed: OnExecuted) -> None:
        self._handlers = service.handlers()
        self._network = network
        self._executed = executed
        self._streams: list[SimStream] = []
        self._under_way: set[asyncio.Task[bytes]] = set()

    def serve(self, service: NmxcService, executed: OnExecuted | None = None) -> None:
        """Answer from another state, as a standby does once it leads. Subscriptions end.

        `executed`, if given, is called from now on.
        """
        self._handlers = service.handlers()
        self._executed = executed or self._executed
        self.break_streams()

    def connect(self, checkpoint: OnCrashPoint) -> "SimChannel":
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
            raise rpc_failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        waiting = [True]
        try:
            async with asyncio.timeout(seconds):
                await _delay(0.0 if trip.there is not None else None)
                # A controller does not stop its work when its client stops waiting.
                reply = await asyncio.shield(self._begin(rpc, request, trip, waiting))
                await _delay(trip.back)
        except TimeoutError:
            raise rpc_failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            waiting.clear()
        return reply

    def subscribe(self, request: bytes, parse: Callable[[bytes], Any]) -> "SimStream":
        """Open a subscription."""
        return SimStream(self._notifications(request), self._network, self._streams, parse)

    def _begin(self, rpc: str, request: bytes, trip: CallFate, waiting: list[bool]) -> "asyncio.Task[bytes]":
        # Not as the client: a controller goes on when the process of its client is stopped.
        work = self._act(rpc, request, trip, waiting)
        acting = asyncio.create_task(work, context=contextvars.Context())
        self._under_way.add(acting)
        acting.add_done_callback(self._finished)
        return acting

    async def _act(self, rpc: str, request: bytes, trip: CallFate, waiting: list[bool]) -> bytes:
        await asyncio.sleep(trip.there or 0.0)
        if not trip.copies:
            # The proxy answers for the controller: a real header, and no effect on the fabric.
            hello = await self._once("Hello", pb.ClientHello().SerializeToString(), expected=lambda: False)
            return _hollow_success(rpc, hello)
        # `waiting` is emptied when the client gives up: an answer after that is not expected any more.
        reply = await self._once(rpc, request, expected=lambda: bool(waiting))
        for _ in range(trip.copies - 1):
            await self._once(rpc, request, expected=lambda: False)
        return reply

    async def _once(self, rpc: str, request: bytes, *, expected: Callable[[], bool]) -> bytes:
        handler = self._handler(rpc)
        parsed = handler.request_deserializer(request)
        reply = await handler.unary_unary(parsed, SimCallContext())
        # Only now: a controller that hung may have answered after the client gave up.
        self._executed(rpc, parsed, reply, expected())
        return bytes(handler.response_serializer(reply))

    async def _notifications(self, request: bytes) -> AsyncIterator[bytes]:
        if self._network.trip("Subscribe").refused:
            raise rpc_failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        handler = self._handler("Subscribe")
        async for notification in handler.unary_stream(
            handler.request_deserializer(request), SimCallContext()
        ):
            yield handler.response_serializer(notification)

    def _handler(self, rpc: str) -> Any:
        return self._handlers.service(_Call(f"/{_SERVICE.full_name}/{rpc}", ()))

    def _finished(self, task: "asyncio.Task[bytes]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: the caller may be gone


class SimStream:
    """A server stream as `grpc.aio` gives it: `read` one message, `cancel` the whole."""

    def __init__(
        self,
        messages: AsyncIterator[bytes],
        network: SimNetwork,
        streams: "list[SimStream]",
        parse: Callable[[bytes], Any],
    ) -> None:
        self._parse = parse
        self._arrived: asyncio.Queue[bytes | grpc.aio.AioRpcError] = asyncio.Queue()
        self._network = network
        self._streams = streams
        streams.append(self)
        self._pumping = asyncio.create_task(self._pump(messages))

    async def read(self) -> Any:
        """The next message. Raises AioRpcError if the stream is broken."""
        message = await self._arrived.get()
        if isinstance(message, grpc.aio.AioRpcError):
            raise message
        return deserialize(message, self._parse)

    def fail(self, why: str) -> None:
        """Break the stream."""
        self._arrived.put_nowait(rpc_failure(grpc.StatusCode.UNAVAILABLE, why))
        self.cancel()

    def cancel(self) -> None:
        """Stop listening."""
        if self in self._streams:
            self._streams.remove(self)
        self._pumping.cancel()

    async def _pump(self, messages: AsyncIterator[bytes]) -> None:
        acknowledged = False
        try:
            async for message in messages:
                # A stream that is lost before its acknowledgement is a lost connection, not a lost notice.
                for _ in range(self._network.deliveries() if acknowledged else 1):
                    self._arrived.put_nowait(message)
                acknowledged = True
        except grpc.aio.AioRpcError as error:
            self._arrived.put_nowait(error)


class SimChannel:
    """As much of `grpc.aio.Channel` as a generated stub uses."""

    def __init__(self, switch: SimController, checkpoint: OnCrashPoint) -> None:
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
            return deserialize(reply, response_deserializer)

        return call

    def unary_stream(
        self,
        _method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[..., SimStream]:
        """The caller of the one method that streams."""
        return lambda request: self._switch.subscribe(request_serializer(request), response_deserializer)

    async def close(self) -> None:
        """Nothing is held."""


async def _delay(seconds: float | None) -> None:
    if seconds is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(seconds)


def _hollow_success(rpc: str, hello: bytes) -> bytes:
    """A reply that reports success without effect. A new partition gets an id that does not exist."""
    reply: Any = GetMessageClass(_SERVICE.methods_by_name[rpc].output_type)()
    reply.server_header.CopyFrom(pb.ServerHello.FromString(hello).server_header)
    if rpc == "CreatePartition":
        reply.partition_id.partition_id = 32765
    return bytes(reply.SerializeToString())


CONNECT_FAILURE_SECONDS = 0.1
"""Seconds until a client learns that the connection is refused."""


# The same for NMX-M, which speaks HTTP.


class NmxmTransport(httpx2.AsyncBaseTransport):
    """Requests straight into the simulated NMX-M, as late as the network in front of a rack lets them be."""

    def __init__(self, service: NmxmService, network: SimNetwork, checkpoint: Callable[[], None]) -> None:
        self._inner = httpx2.ASGITransport(service)
        self._network = network
        self._checkpoint = checkpoint

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request. Raises ConnectError while the network is down."""
        self._checkpoint()
        if self._network.down:
            await asyncio.sleep(CONNECT_FAILURE_SECONDS)
            raise httpx2.ConnectError("nobody listens", request=request)
        await asyncio.sleep(self._network.delay())
        answer = await self._inner.handle_async_request(request)
        await asyncio.sleep(self._network.delay())
        self._checkpoint()
        return answer
