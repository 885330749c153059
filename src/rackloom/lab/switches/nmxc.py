"""A simulated NMX-C controller: the RPCs of the gRPC interface over the state of one fabric.

Each unary RPC is a function of the fabric and a request. It returns the reply without its header, or
raises `FabricRefusal`. `NmxcService` takes the next fault for the RPC, does the work, and reports the
result in the server header, as the real controller does: a refusal is a return code, not a gRPC error.

A subscription first sends an acknowledgement, then a notification for each change, and a heart beat
after each silent interval that the client requested. A client is notified of its own changes only if it
requested that.

GPU lists with an attribute filter and location-based creation are not simulated and answer
NOT_SUPPORTED.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.lab.switches.fabric import (
    FabricGpu,
    FabricPartition,
    FabricRefusal,
    FabricSnapshot,
    SimulatedFabric,
)
from rackloom.lab.switches.faults import NmxcFaults

APP_VERSION = "twin"
CONFIGURED = 3
"""ControlPlaneState of a controller that is up."""
HEALTHY = 1


def server_header(fabric: SimulatedFabric, code: str = "SUCCESS") -> pb.ServerHeader:
    """The server header with a return code."""
    return pb.ServerHeader(
        domain_uuid=fabric.domain, app_ver=APP_VERSION, return_code=pb.StReturnCode.Value(f"NMX_ST_{code}")
    )


def answer_hello(_: SimulatedFabric, request: pb.ClientHello) -> pb.ServerHello:
    """The domain (in the header) and the client's version, which is accepted."""
    return pb.ServerHello(major_version=request.major_version, minor_version=request.minor_version)


def answer_domain_properties(
    fabric: SimulatedFabric, _: pb.GetDomainPropertiesRequest
) -> pb.DomainProperties:
    """The limits of the domain."""
    limits = fabric.limits
    return pb.DomainProperties(
        max_compute_nodes=limits.max_compute_nodes,
        max_gpus_per_compute_node=limits.max_gpus_per_compute_node,
        max_num_partitions=limits.max_partitions,
        max_multicast_groups=limits.max_multicast_groups,
    )


def answer_domain_state(fabric: SimulatedFabric, _: pb.GetDomainStateInfoRequest) -> pb.DomainStateInfo:
    """The state that heart beats carry."""
    allocated = sum(partition.multicast_groups for partition in fabric.partitions.values())
    return pb.DomainStateInfo(
        control_plane_state=CONFIGURED,
        available_multicast_groups=max(fabric.limits.max_multicast_groups - allocated, 0),
        nmx_controller_health=HEALTHY,
    )


def answer_gpus(fabric: SimulatedFabric, request: pb.GetGpuInfoListRequest) -> pb.GetGpuInfoListResponse:
    """Every GPU, by slot. Attribute filters are not simulated."""
    if request.attr != pb.NMX_GPU_ATTR_ALL:
        raise FabricRefusal("NOT_SUPPORTED")
    gpus = [_gpu_info(gpu, partition) for gpu, partition in fabric.gpus_by_slot()]
    return pb.GetGpuInfoListResponse(gpu_info_list=gpus)


def answer_nodes(
    fabric: SimulatedFabric, _: pb.GetComputeNodeInfoListRequest
) -> pb.GetComputeNodeInfoListResponse:
    """Every tray with a GPU in it."""
    trays: dict[int, list[FabricGpu]] = {}
    for gpu in fabric.gpus.values():
        trays.setdefault(gpu.host_id, []).append(gpu)
    return pb.GetComputeNodeInfoListResponse(
        node_info_list=[_node_info(fabric, trays[host_id]) for host_id in sorted(trays)]
    )


def answer_partitions(
    fabric: SimulatedFabric, request: pb.GetPartitionInfoListRequest
) -> pb.GetPartitionInfoListResponse:
    """The partitions with the requested ids or names, or all."""
    ids = {wanted.partition_id for wanted in request.partition_id_list}
    names = set(request.partition_name_list)
    chosen = [
        partition
        for partition in fabric.snapshot().partitions
        if not (ids or names) or partition.id in ids or partition.name in names
    ]
    return pb.GetPartitionInfoListResponse(
        partition_info_list=[_partition_info(fabric, partition) for partition in chosen]
    )


def answer_create(fabric: SimulatedFabric, request: pb.CreatePartitionRequest) -> pb.CreatePartitionResponse:
    """Create a GUID-based partition. One by location is not simulated."""
    if any(gpu.HasField("gpu_location") for gpu in request.gpu_resource_id):
        raise FabricRefusal("NOT_SUPPORTED")
    made = fabric.create(
        request.name,
        [gpu.gpu_uid for gpu in request.gpu_resource_id],
        partition_id=request.partition_id.partition_id,
        multicast_groups=request.attr.multicast_groups_limit,
    )
    return pb.CreatePartitionResponse(partition_id=_partition_id(made))


def answer_delete(fabric: SimulatedFabric, request: pb.DeletePartitionRequest) -> pb.DeletePartitionResponse:
    """Delete a partition, by id, by name or by both."""
    gone = fabric.delete(request.partition_id.partition_id, request.name)
    return pb.DeletePartitionResponse(partition_id=_partition_id(gone))


def _answer_update(
    change: Callable[[SimulatedFabric, int, Iterable[int], str], int],
) -> Callable[[SimulatedFabric, pb.UpdatePartitionRequest], pb.UpdatePartitionResponse]:
    """Add or remove members."""

    def answer(fabric: SimulatedFabric, request: pb.UpdatePartitionRequest) -> pb.UpdatePartitionResponse:
        changed = change(fabric, request.partition_id.partition_id, request.gpu_uid, request.name)
        return pb.UpdatePartitionResponse(partition_id=_partition_id(changed))

    return answer


def _partition_info(fabric: SimulatedFabric, partition: FabricPartition) -> pb.PartitionInfo:
    """One partition, its members by GUID or by location, depending on its type."""
    info = pb.PartitionInfo(
        partition_id=_partition_id(partition.id),
        name=partition.name,
        num_gpus=len(partition.guids),
        health=pb.PartitionHealth.ValueType(partition.health),
        num_allocated_multicast_groups=partition.multicast_groups,
    )
    if partition.guid_based:
        info.partition_type = pb.NMX_PARTITION_TYPE_GPUUID_BASED
        info.gpu_uid_list.extend(partition.guids)
        return info
    info.partition_type = pb.NMX_PARTITION_TYPE_LOCATION_BASED
    info.gpu_location_list.extend(
        pb.GpuLocation(loc=_location(gpu), gpu_id=gpu.module_id) for gpu in fabric.present_members(partition)
    )
    return info


def _gpu_info(gpu: FabricGpu, held_by: int) -> pb.GpuInfo:
    return pb.GpuInfo(
        loc=_location_info(gpu),
        gpu_id=gpu.module_id,
        gpu_uid=gpu.guid,
        gpu_health=pb.GpuHealth.ValueType(gpu.health),
        partition_id=_partition_id(held_by) if held_by else None,
    )


def _node_info(fabric: SimulatedFabric, gpus: list[FabricGpu]) -> pb.ComputeNodeInfo:
    holders = sorted({fabric.partition_of(gpu.guid) for gpu in gpus} - {0})
    return pb.ComputeNodeInfo(
        loc=_location_info(gpus[0]),
        num_gpus=len(gpus),
        node_health=pb.NMX_COMPUTE_NODE_HEALTH_HEALTHY,
        partition_id_list=[_partition_id(number) for number in holders],
    )


def _location_info(gpu: FabricGpu) -> pb.LocationInfo:
    return pb.LocationInfo(
        chassis_serial_number=gpu.chassis_serial, tray_index=gpu.tray_index, location=_location(gpu)
    )


def _location(gpu: FabricGpu) -> pb.Location:
    return pb.Location(chassis_id=gpu.chassis_id, slot_id=gpu.slot, host_id=gpu.host_id)


def _partition_id(number: int) -> pb.PartitionId:
    return pb.PartitionId(partition_id=number)


# The service: RPC dispatch, subscriptions, faults.


SERVICE = "nmx_c.NMX_Controller"
SubscriberQueue = asyncio.Queue[pb.ServerNotification | None]
"""Notifications to be sent. None ends the subscription."""

_UNARY: dict[str, Callable[[SimulatedFabric, Any], Any]] = {
    "Hello": answer_hello,
    "GetDomainProperties": answer_domain_properties,
    "GetDomainStateInfo": answer_domain_state,
    "GetComputeNodeInfoList": answer_nodes,
    "GetGpuInfoList": answer_gpus,
    "GetPartitionInfoList": answer_partitions,
    "CreatePartition": answer_create,
    "DeletePartition": answer_delete,
    "AddGpusToPartition": _answer_update(SimulatedFabric.add),
    "RemoveGpusFromPartition": _answer_update(SimulatedFabric.remove),
}
"""The function of each unary RPC. Its message types are those of the service descriptor."""
_METHODS = pb.DESCRIPTOR.services_by_name["NMX_Controller"].methods_by_name
NMXC_RPCS = frozenset({*_UNARY, "Subscribe"})
"""Every RPC that is served."""


class NmxcService:
    """Answers from a fabric's state. Calls fail according to `faults`."""

    def __init__(self, fabric: SimulatedFabric, faults: NmxcFaults) -> None:
        self._fabric = fabric
        self._faults = faults
        self._subscribers: dict[SubscriberQueue, pb.SubscribeRequest] = {}
        self._changed_by: str | None = None
        fabric.on_change(self._notify_change)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers with which a gRPC server serves this controller."""
        methods = {rpc: self._unary(rpc) for rpc in _UNARY}
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

    def _unary(self, rpc: str) -> grpc.RpcMethodHandler:
        request: Any = GetMessageClass(_METHODS[rpc].input_type)
        reply: Any = GetMessageClass(_METHODS[rpc].output_type)
        return grpc.unary_unary_rpc_method_handler(
            partial(self._answer, rpc),
            request_deserializer=request.FromString,
            response_serializer=reply.SerializeToString,
        )

    async def _answer(self, rpc: str, request: Any, context: Any) -> Any:
        """Do the work unless a fault or the fabric forbids it, and report the result in the header."""
        fault = self._faults.take(rpc)
        await asyncio.sleep(fault.delay)
        await self._faults.until_awake()
        if fault.status is not None:
            await context.abort(*fault.status)
        reply: Any = GetMessageClass(_METHODS[rpc].output_type)()
        code = fault.refuse or "SUCCESS"
        if fault.refuse is None and not fault.no_effect:
            # The fabric calls `_notify_change` before the operation returns: it leaves this client out.
            self._changed_by = request.gateway_id
            try:
                reply = _UNARY[rpc](self._fabric, request)
            except FabricRefusal as refusal:
                code = refusal.code
            self._changed_by = None
        if fault.drop_reply:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        self._faults.edit(reply)
        if fault.no_id:
            reply.ClearField("partition_id")
        if not fault.no_header:
            reply.server_header.CopyFrom(server_header(self._fabric, code))
        if fault.afterwards is not None:
            fault.afterwards()
        return reply

    async def _subscribe(
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.ServerNotification]:
        """An acknowledgement, then changes as they come, and heart beats (the interval is in seconds)."""
        subscriber = SubscriberQueue()
        self._subscribers[subscriber] = request
        try:
            code = self._faults.take("Subscribe").refuse or "SUCCESS"
            notice = pb.Notice(server_header=server_header(self._fabric, code))
            yield pb.ServerNotification(subscription_response=notice)
            while notification := await self._next(subscriber, request.heart_beat_rate):
                await self._faults.until_awake()
                yield notification
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the controller goes away")
        finally:
            del self._subscribers[subscriber]

    async def _next(
        self, subscriber: SubscriberQueue, heart_beat_seconds: int
    ) -> pb.ServerNotification | None:
        try:
            async with asyncio.timeout(heart_beat_seconds or None):
                return await subscriber.get()
        except TimeoutError:
            return self._beat()

    def _beat(self) -> pb.ServerNotification:
        state = answer_domain_state(self._fabric, pb.GetDomainStateInfoRequest())
        state.server_header.CopyFrom(server_header(self._fabric))
        return pb.ServerNotification(domain_state_info=state)

    def _notify_change(self, _: FabricSnapshot) -> None:
        event = pb.ServerNotification(fm_event=pb.Notice(server_header=server_header(self._fabric)))
        for subscriber, request in self._subscribers.items():
            if request.notify_on_self_change or request.gateway_id != self._changed_by:
                subscriber.put_nowait(event)
