"""Calls to one controller: each with a deadline, each reply checked before anybody reads it."""

from typing import Any

import grpc.aio
from google.protobuf.message import Message

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.channel import Connect, open_channel
from rackloom.carve.fabric.nmxc.nmx_c_pb2_grpc import NMX_ControllerStub
from rackloom.carve.fabric.nmxc.replies import domain_of, from_status, require_success
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.fabric.tls import TlsMaterial

MAJOR_VERSION, MINOR_VERSION = 2, 20
"""Version of the protocol that the client says it speaks."""
CONNECT_SECONDS = 5.0
CALL_SECONDS = 10.0


class Session:
    """The connection to one controller, and the name by which it knows this client."""

    def __init__(
        self, url: str, tls: TlsMaterial | None, gateway_id: str, connect: Connect = open_channel
    ) -> None:
        self.url = url
        self.gateway_id = gateway_id
        self._channel = connect(url, tls)
        self._stub = NMX_ControllerStub(self._channel)

    async def hello(self) -> str:
        """Say hello and return the uuid of the domain that answers."""
        request = pb.ClientHello(
            gateway_id=self.gateway_id, major_version=MAJOR_VERSION, minor_version=MINOR_VERSION
        )
        reply: pb.ServerHello = await self.call("Hello", request, seconds=CONNECT_SECONDS)
        return domain_of(reply.server_header)

    async def call(self, rpc: str, request: Message, *, seconds: float = CALL_SECONDS) -> Any:
        """The reply of `rpc`, which the caller annotates with its type.

        Raises FabricRefused when the controller says no, FabricUnavailable when it is not known what it did.
        """
        try:
            reply = await getattr(self._stub, rpc)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise from_status(rpc, error) from error
        require_success(rpc, reply)
        return reply

    async def call_in(self, domain: str, rpc: str, request: Message) -> Any:
        """As `call`, for a reply that only counts if it comes from `domain`."""
        reply = await self.call(rpc, request)
        speaker = domain_of(reply.server_header)
        if speaker != domain:
            raise FabricUnavailable(f"{rpc}: answered by domain {speaker}, {domain} had said hello")
        return reply

    def subscribe(self, heart_beat_seconds: int) -> "grpc.aio.UnaryStreamCall[Any, pb.ServerNotification]":
        """Ask for notifications, our own changes among them: one that comes late is news too."""
        request = pb.SubscribeRequest(
            gateway_id=self.gateway_id, notify_on_self_change=True, heart_beat_rate=heart_beat_seconds
        )
        return self._stub.Subscribe(request)

    async def close(self) -> None:
        """Release the connection."""
        await self._channel.close()
