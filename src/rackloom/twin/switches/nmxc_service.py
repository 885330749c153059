"""The RPCs of a simulated controller, behind whatever faults a test asks for."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.twin.switches import nmxc_answers as answers
from rackloom.twin.switches.fabric import FabricRefusal, FabricSnapshot, SimulatedFabric
from rackloom.twin.switches.faults import Faults

SERVICE = "nmx_c.NMX_Controller"
Subscriber = asyncio.Queue[pb.ServerNotification | None]
"""Notifications to be sent; None ends the subscription."""

_UNARY: dict[str, tuple[type[Any], type[Any], Callable[[SimulatedFabric, Any], Any]]] = {
    "Hello": (pb.ClientHello, pb.ServerHello, answers.hello),
    "GetDomainProperties": (
        pb.GetDomainPropertiesRequest,
        pb.DomainProperties,
        answers.domain_properties,
    ),
    "GetDomainStateInfo": (pb.GetDomainStateInfoRequest, pb.DomainStateInfo, answers.domain_state),
    "GetComputeNodeInfoList": (
        pb.GetComputeNodeInfoListRequest,
        pb.GetComputeNodeInfoListResponse,
        answers.nodes,
    ),
    "GetGpuInfoList": (pb.GetGpuInfoListRequest, pb.GetGpuInfoListResponse, answers.gpus),
    "GetPartitionInfoList": (
        pb.GetPartitionInfoListRequest,
        pb.GetPartitionInfoListResponse,
        answers.partitions,
    ),
    "CreatePartition": (pb.CreatePartitionRequest, pb.CreatePartitionResponse, answers.create),
    "DeletePartition": (pb.DeletePartitionRequest, pb.DeletePartitionResponse, answers.delete),
    "AddGpusToPartition": (pb.UpdatePartitionRequest, pb.UpdatePartitionResponse, answers.add_gpus),
    "RemoveGpusFromPartition": (
        pb.UpdatePartitionRequest,
        pb.UpdatePartitionResponse,
        answers.remove_gpus,
    ),
}
"""RPC name -> type of the request, type of the reply, and what is done."""
RPCS = frozenset({*_UNARY, "Subscribe"})
"""Every RPC that is served."""


class NmxcService:
    """Answers from a fabric's state; mistreats calls as `faults` say."""

    def __init__(self, fabric: SimulatedFabric, faults: Faults) -> None:
        self._fabric = fabric
        self._faults = faults
        self._subscribers: dict[Subscriber, pb.SubscribeRequest] = {}
        self._changed_by: str | None = None
        fabric.on_change(self._tell_change)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to serve this controller."""
        methods = {rpc: self._unary(rpc, request) for rpc, (request, _, _) in _UNARY.items()}
        methods["Subscribe"] = grpc.unary_stream_rpc_method_handler(
            self._subscribe,
            request_deserializer=pb.SubscribeRequest.FromString,
            response_serializer=pb.ServerNotification.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def heart_beat(self) -> None:
        """Send the state of the domain to all subscribers now."""
        for subscriber in self._subscribers:
            subscriber.put_nowait(self._beat())

    def hang_up(self) -> None:
        """End every subscription."""
        for subscriber in self._subscribers:
            subscriber.put_nowait(None)

    def _unary(self, rpc: str, request: type[Any]) -> grpc.RpcMethodHandler:
        async def answer(asked: Any, context: Any) -> Any:
            return await self._answer(rpc, asked, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=request.FromString, response_serializer=_serialized
        )

    async def _answer(self, rpc: str, request: Any, context: Any) -> Any:
        """Do the work unless a fault or the fabric forbids it, and say in the header how it went."""
        fault = self._faults.take(rpc)
        await asyncio.sleep(fault.delay)
        _, empty, work = _UNARY[rpc]
        reply, code = empty(), fault.refuse or "SUCCESS"
        if fault.refuse is None:
            self._changed_by = request.gateway_id
            try:
                reply = work(self._fabric, request)
            except FabricRefusal as refusal:
                code = refusal.code
            self._changed_by = None
        if fault.drop_reply:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        self._faults.edit(reply)
        if not fault.no_header:
            reply.server_header.CopyFrom(answers.header(self._fabric, code))
        return reply

    async def _subscribe(
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.ServerNotification]:
        """An acknowledgement, then changes as they come, and heart beats (asked for in seconds)."""
        subscriber = Subscriber()
        self._subscribers[subscriber] = request
        try:
            yield self._acknowledgement()
            while notification := await self._next(subscriber, request.heart_beat_rate):
                yield notification
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the controller goes away")
        finally:
            del self._subscribers[subscriber]

    def _acknowledgement(self) -> pb.ServerNotification:
        code = self._faults.take("Subscribe").refuse or "SUCCESS"
        notice = pb.Notice(server_header=answers.header(self._fabric, code))
        return pb.ServerNotification(subscription_response=notice)

    async def _next(self, subscriber: Subscriber, heart_beat_seconds: int) -> pb.ServerNotification | None:
        try:
            async with asyncio.timeout(heart_beat_seconds or None):
                return await subscriber.get()
        except TimeoutError:
            return self._beat()

    def _beat(self) -> pb.ServerNotification:
        state = answers.domain_state(self._fabric, pb.GetDomainStateInfoRequest())
        return pb.ServerNotification(domain_state_info=state)

    def _tell_change(self, _: FabricSnapshot) -> None:
        event = pb.ServerNotification(fm_event=pb.Notice(server_header=answers.header(self._fabric)))
        for subscriber, request in self._subscribers.items():
            if request.notify_on_self_change or request.gateway_id != self._changed_by:
                subscriber.put_nowait(event)


def _serialized(reply: Any) -> bytes:
    serialized: bytes = reply.SerializeToString()
    return serialized
