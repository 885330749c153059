"""`FabricDriver` over NMX-C: reads a domain into one observation and executes partition operations.

An observation is complete or fails. The GPU list and the partition list are read one after the other.
Each GPU must have a unique GUID and each partition a unique id. A GPU whose partition does not list it is
uncertain, with all that shares these partitions: another client changed something between the lists, or
the controller omits a partition, which it was seen to do for a while. Without this the partition would be
taken for one that is gone. Members of location-based partitions are looked
up by location. A controller that does not report domain limits has none.

The number of free multicast groups is read last, once the lists have changed. If it cannot be read, it is
unknown and the reading is complete all the same.

The answers of an idle domain repeat themselves. The lists are fetched for each reading, but the objects read
from the last answers are used again if the new answers are the same byte for byte: for a rack, reading them
takes as long as two calls.

Every call has a deadline. A call that gRPC reports as OK may still have been refused: the answer is the
return code in the server header, and a reply without that header counts as no answer. `protocol` maps the
other failures to refused or unknown. `call_in` accepts a reply only from the domain that answered `Hello`.

`wake_ups` yields once for each new subscription, since anything may have been missed, once per change,
and at once when a subscription is lost. A heartbeat that repeats the last state is no change. Heartbeats
detect a silent controller: the subscription is lost once none came for `SILENT_BEATS` of them.
`heart_beat_rate` derives their rate from the interval of the site's passes, so that silence is noticed well
before the timer. A lost subscription is renewed with exponential backoff. Until it is, the session is
suspect: its next reading waits only `PROBE_SECONDS` for the first answer, because the loss is already one
sign that the controller does not answer.

Operations name a partition by id and name, so that
the controller refuses when the id has a new meaning. Before an operation, `Hello` must still report the
observed domain. A create requests multicast groups, and repeats without any when they are exhausted: the
factory default partition may hold all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from rackloom.carve.fabric.controller import (
    FabricRefused,
    FabricUnavailable,
    TlsMaterial,
    canonical_domain,
    contradicted_gpus,
)
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.nmx_c_pb2 import NMX_ST_SUCCESS, ServerHeader
from rackloom.carve.fabric.nmxc.nmx_c_pb2_grpc import NMX_ControllerStub
from rackloom.carve.fabric.nmxc.protocol import OpenChannel, error_from_status, open_channel, return_code_name
from rackloom.core.partitions.domain import (
    MAX_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
    PartitionOperation,
    RemoveGpus,
)

# Calls.


_OUTCOME_UNKNOWN_CODES = frozenset({"UNDEFINED", "TIMEOUT"})
"""Return codes after which the change may have been made."""


def require_success(rpc: str, reply: Any) -> ServerHeader:
    """The header of `reply`, any NMX-C response, if its return code is success.

    Raises FabricRefused with the name of the return code (StReturnCode without its prefix), FabricUnavailable
    if the outcome is unknown. gRPC returns None for bytes that are no message.
    """
    if reply is None or not reply.HasField("server_header"):
        raise FabricUnavailable(f"{rpc}: the reply has no server header")
    header: ServerHeader = reply.server_header
    code = header.return_code
    if code == NMX_ST_SUCCESS:
        return header
    name = return_code_name(code)
    if name in _OUTCOME_UNKNOWN_CODES:
        raise FabricUnavailable(f"{rpc}: the controller answered {name}")
    raise FabricRefused(name, f"{rpc}: the controller answered {name}")


MAJOR_VERSION, MINOR_VERSION = 2, 20
"""Protocol version that the client announces."""
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 1.0
"""For the first answer of a controller after its subscription was lost."""
CALL_SECONDS = 10.0


class NmxcSession:
    """The connection to one controller, and the name by which it knows this client."""

    def __init__(
        self, url: str, tls: TlsMaterial | None, gateway_id: str, connect: OpenChannel = open_channel
    ) -> None:
        self.url = url
        self.gateway_id = gateway_id
        self.is_suspect = False
        """Whether a subscription was lost and none has begun since."""
        self._channel = connect(url, tls)
        self._stub = NMX_ControllerStub(self._channel)

    async def hello(self, seconds: float = CONNECT_SECONDS) -> str:
        """Say hello and return the uuid of the domain that answers."""
        request = pb.ClientHello(
            gateway_id=self.gateway_id, major_version=MAJOR_VERSION, minor_version=MINOR_VERSION
        )
        reply: pb.ServerHello = await self.call("Hello", request, seconds=seconds)
        return canonical_domain(reply.server_header.domain_uuid)

    async def call(self, rpc: str, request: Message, *, seconds: float = CALL_SECONDS) -> Any:
        """The reply of `rpc`, which the caller annotates with its type.

        Raises FabricRefused when the controller refuses, FabricUnavailable when the outcome is unknown.
        """
        try:
            reply = await getattr(self._stub, rpc)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(rpc, error) from error
        require_success(rpc, reply)
        return reply

    async def call_in(self, domain: str, rpc: str, request: Message, *, seconds: float = CALL_SECONDS) -> Any:
        """As `call`. Raises FabricUnavailable for a reply of another domain than `domain`."""
        reply = await self.call(rpc, request, seconds=seconds)
        speaker = reply.server_header.domain_uuid
        if speaker != domain and (speaker := canonical_domain(speaker)) != domain:
            raise FabricUnavailable(f"{rpc}: answered by domain {speaker}, {domain} had said hello")
        return reply

    def subscribe(self, heart_beat_seconds: int) -> "grpc.aio.UnaryStreamCall[Any, pb.ServerNotification]":
        """Subscribe to notifications, also of our own changes: one that is executed late is news."""
        request = pb.SubscribeRequest(
            gateway_id=self.gateway_id, notify_on_self_change=True, heart_beat_rate=heart_beat_seconds
        )
        return self._stub.Subscribe(request)

    async def close(self) -> None:
        """Release the connection."""
        await self._channel.close()


# Subscription.


MAX_HEART_BEAT_SECONDS = 10
"""How often the controller shall send its state when nothing changes, at most."""
SILENT_BEATS = 2.5
"""Number of heart beat intervals without a heart beat after which the subscription counts as lost."""
FIRST_RESUBSCRIBE_DELAY, MAX_RESUBSCRIBE_DELAY = 0.5, 30.0
"""Seconds before a lost subscription is tried again. They double until one holds."""


def heart_beat_rate(interval: float) -> int:
    """Seconds between heart beats if a pass runs every `interval` seconds.

    Silence and one unanswered call then end within half an interval of a few seconds or more.
    """
    return max(1, min(MAX_HEART_BEAT_SECONDS, int(interval / 6)))


async def wake_ups(
    session: NmxcSession,
    sleep: Callable[[float], Awaitable[None]],
    heart_beat_seconds: int = MAX_HEART_BEAT_SECONDS,
) -> AsyncGenerator[None, None]:
    """One item when a subscription begins (anything may have been missed before), changes, or is lost."""
    delay = FIRST_RESUBSCRIBE_DELAY
    while True:
        has_begun = False
        # The next observation meets and reports the same error. Here it only means to subscribe again.
        with suppress(FabricUnavailable, FabricRefused):
            async with aclosing(_subscription(session, heart_beat_seconds)) as items:
                async for is_first in items:
                    has_begun, session.is_suspect = True, False
                    yield
                    if not is_first:
                        delay = FIRST_RESUBSCRIBE_DELAY
        if has_begun:
            session.is_suspect = True
            yield
        await sleep(delay)
        delay = min(2 * delay, MAX_RESUBSCRIBE_DELAY)


async def _subscription(session: NmxcSession, heart_beat_seconds: int) -> AsyncGenerator[bool, None]:
    """One subscription, until it is lost. Yields True for its first item, and False for the others."""
    await session.hello()
    call = session.subscribe(heart_beat_seconds)
    try:
        await _read_notification(call, CALL_SECONDS)
        yield True
        last_state: bytes | None = None
        while True:
            notification = await _read_notification(call, SILENT_BEATS * heart_beat_seconds)
            state = _domain_state(notification)
            if state is None or state != last_state:
                yield False
            last_state = state or last_state
    finally:
        call.cancel()


async def _read_notification(
    call: "grpc.aio.UnaryStreamCall[pb.SubscribeRequest, pb.ServerNotification]", seconds: float
) -> pb.ServerNotification:
    try:
        async with asyncio.timeout(seconds):
            notification: pb.ServerNotification = await call.read()
    except grpc.aio.AioRpcError as error:
        raise FabricUnavailable(f"Subscribe: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise FabricUnavailable(f"Subscribe: nothing heard for {seconds:g} s") from error
    if notification is None:
        raise FabricUnavailable("Subscribe: the notification cannot be decoded")
    if notification is grpc.aio.EOF:
        raise FabricUnavailable("Subscribe: the controller ended the subscription")
    if notification.HasField("subscription_response"):
        require_success("Subscribe", notification.subscription_response)
    return notification


def _domain_state(notification: pb.ServerNotification) -> bytes | None:
    """The state in a heart beat. A heart beat that repeats the last state is no change."""
    if not notification.HasField("domain_state_info"):
        return None
    return notification.domain_state_info.SerializeToString(deterministic=True)


# Operations.


DEFAULT_MULTICAST_GROUPS = 16
"""Multicast groups requested for a new partition. NMX-C: a multiple of 4, of the domain's 1024, fixed at
creation."""


def membership_request(operation: AddGpus | RemoveGpus, gateway_id: str) -> pb.UpdatePartitionRequest:
    """Addition or removal of members, by id and name as for a deletion."""
    return pb.UpdatePartitionRequest(
        context=pb.Context(),
        partition_id=pb.PartitionId(partition_id=operation.partition_id),
        name=operation.name,
        gpu_uid=operation.guids,
        gateway_id=gateway_id,
        reroute=True,
    )


# From lists to an observation.


class DomainLists(msgspec.Struct, frozen=True, gc=False):
    """The content of the two lists of a domain, without their time."""

    gpus: tuple[ObservedGpu, ...]
    partitions: tuple[ObservedPartition, ...]
    uncertain: frozenset[int]


def read_lists(gpus: pb.GetGpuInfoListResponse, partitions: pb.GetPartitionInfoListResponse) -> DomainLists:
    """Both lists together. Raises FabricUnavailable where either names something twice or not at all."""
    listed = read_partitions(partitions.partition_info_list, gpus.gpu_info_list)
    claims = {gpu.gpu_uid: gpu.partition_id.partition_id for gpu in gpus.gpu_info_list}
    return DomainLists(read_gpus(gpus.gpu_info_list), listed, contradicted_gpus(claims, listed))


GpuLocation = tuple[int, int, int, int]
"""Chassis id, slot id, host id and GPU id: how a location-based partition names its members."""


def read_gpus(infos: Sequence[pb.GpuInfo]) -> tuple[ObservedGpu, ...]:
    """GPUs by GUID. Raises FabricUnavailable when one has no GUID, or two have the same."""
    gpus = {info.gpu_uid: _observed_gpu(info) for info in infos}
    if 0 in gpus or len(gpus) != len(infos):
        raise FabricUnavailable("GetGpuInfoList: GPUs without a GUID of their own")
    return tuple(gpus[guid] for guid in sorted(gpus))


def read_partitions(
    infos: Sequence[pb.PartitionInfo], gpus: Sequence[pb.GpuInfo]
) -> tuple[ObservedPartition, ...]:
    """Partitions by id, the members of location-based ones looked up.

    Raises FabricUnavailable when one has no id, or two have the same.
    """
    locations = {_gpu_location(gpu.loc.location, gpu.gpu_id): gpu.gpu_uid for gpu in gpus}
    partitions = {info.partition_id.partition_id: _observed_partition(info, locations) for info in infos}
    if 0 in partitions:
        raise FabricUnavailable("GetPartitionInfoList: a partition without an id")
    if len(partitions) != len(infos):
        raise FabricUnavailable("GetPartitionInfoList: two partitions with one id")
    if any(number > MAX_PARTITION_ID for number in partitions):
        raise FabricUnavailable("GetPartitionInfoList: a partition whose id is out of range")
    return tuple(partitions[number] for number in sorted(partitions))


def read_limits(properties: pb.DomainProperties) -> DomainLimits:
    """Limits of the domain. Zero means that the limit is not reported."""
    return DomainLimits(
        max_partitions=properties.max_num_partitions or None,
        max_multicast_groups=properties.max_multicast_groups or None,
        max_compute_nodes=properties.max_compute_nodes or None,
        max_gpus_per_compute_node=properties.max_gpus_per_compute_node or None,
    )


def _observed_gpu(info: pb.GpuInfo) -> ObservedGpu:
    return ObservedGpu(
        guid=info.gpu_uid,
        chassis_serial=info.loc.chassis_serial_number.strip(),
        slot=info.loc.location.slot_id,
        tray_index=info.loc.tray_index,
        module_id=info.gpu_id,
        health=_enum_value(GpuHealth, info.gpu_health),
    )


def _observed_partition(info: pb.PartitionInfo, locations: dict[GpuLocation, int]) -> ObservedPartition:
    # A location without a GPU is empty, not a member.
    members = {_gpu_location(member.loc, member.gpu_id) for member in info.gpu_location_list}
    return ObservedPartition(
        id=info.partition_id.partition_id,
        name=info.name,
        members=frozenset(info.gpu_uid_list) | {locations[place] for place in members & locations.keys()},
        health=_enum_value(PartitionHealth, info.health),
        guid_based=info.partition_type != pb.NMX_PARTITION_TYPE_LOCATION_BASED,
        multicast_groups=info.num_allocated_multicast_groups,
    )


def _gpu_location(location: pb.Location, gpu_id: int) -> GpuLocation:
    return (location.chassis_id, location.slot_id, location.host_id, gpu_id)


Health = TypeVar("Health", GpuHealth, PartitionHealth)


def _enum_value(kind: type[Health], value: int) -> Health:
    """Unknown for a value that a later version of the protocol may add."""
    try:
        return kind(value)
    except ValueError:
        return kind.UNKNOWN


# The driver.


_LIMITS_UNSUPPORTED = ("NOT_SUPPORTED", "UNIMPLEMENTED")
"""A controller's return codes for limits that it does not report."""


class NmxcDriver:
    """One NMX-C endpoint. Construct it in the event loop that uses it, and close it there.

    `clock` gives seconds since the epoch. The controller identifies its clients by `gateway_id`, and shall
    give a sign of life every `heart_beat_seconds`. Simulations replace `sleep` and `connect`.
    """

    def __init__(
        self,
        endpoint_url: str,
        *,
        clock: Callable[[], float],
        tls: TlsMaterial | None = None,
        gateway_id: str = "rackloom",
        heart_beat_seconds: int = MAX_HEART_BEAT_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        connect: OpenChannel = open_channel,
    ) -> None:
        self._session = NmxcSession(endpoint_url, tls, gateway_id, connect)
        self._clock = clock
        self._sleep = sleep
        self._heart_beat_seconds = heart_beat_seconds
        self._domain: str | None = None
        self._last: tuple[tuple[bytes, bytes], DomainLists] | None = None
        """The newest answers with both lists, and the values they were read into."""
        self._free_groups: int | None = None
        """Free multicast groups since the lists are these: only a change of partitions changes them."""

    async def observe(self) -> DomainObservation:
        """Read the whole domain. Raises FabricUnavailable instead of returning a partial reading."""
        observed_at = self._clock()
        try:
            observation = await self._read(observed_at)
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        self._domain = observation.domain
        return observation

    async def execute(self, operation: PartitionOperation) -> int:
        """Execute one operation and return the partition id it acted on.

        Raises FabricRefused when the controller refuses, FabricUnavailable when the outcome is unknown or,
        before anything is requested, when another domain answers than was observed.
        """
        domain = await self._session.hello()
        if self._domain is not None and domain != self._domain:
            raise FabricUnavailable(f"{self._session.url} is now domain {domain}, it was {self._domain}")
        gateway = self._session.gateway_id
        match operation:
            case CreatePartition():
                return await self._create(operation)
            case DeletePartition():
                await self._session.call(
                    "DeletePartition",
                    pb.DeletePartitionRequest(
                        context=pb.Context(),
                        partition_id=pb.PartitionId(partition_id=operation.partition_id),
                        name=operation.name,
                        gateway_id=gateway,
                    ),
                )
            case AddGpus():
                await self._session.call("AddGpusToPartition", membership_request(operation, gateway))
            case RemoveGpus():
                await self._session.call("RemoveGpusFromPartition", membership_request(operation, gateway))
        return operation.partition_id

    def notifications(self) -> AsyncIterator[None]:
        """One item for each notification of a change, after each (re)connection, and when one is lost.

        It renews a lost subscription and never ends. Close the iterator before the driver.
        """
        return wake_ups(self._session, self._sleep, self._heart_beat_seconds)

    async def close(self) -> None:
        """Release the connection."""
        await self._session.close()

    async def _read(self, observed_at: float) -> DomainObservation:
        client: dict[str, Any] = {"context": pb.Context(), "gateway_id": self._session.gateway_id}
        patience = PROBE_SECONDS if self._session.is_suspect else CONNECT_SECONDS
        domain = await self._session.hello(patience)
        limits = await self._limits(domain)
        gpus: pb.GetGpuInfoListResponse = await self._session.call_in(
            domain, "GetGpuInfoList", pb.GetGpuInfoListRequest(attr=pb.NMX_GPU_ATTR_ALL, **client)
        )
        partitions: pb.GetPartitionInfoListResponse = await self._session.call_in(
            domain, "GetPartitionInfoList", pb.GetPartitionInfoListRequest(**client)
        )
        known = self._last
        # Decode these answers, or use the last values if the answers are the same, byte for byte.
        answers = gpus.SerializeToString(deterministic=True), partitions.SerializeToString(deterministic=True)
        if self._last is None or self._last[0] != answers:
            self._last = answers, read_lists(gpus, partitions)
        lists = self._last[1]
        if self._free_groups is None or self._last is not known:
            self._free_groups = await self._read_free_groups(domain, pb.GetDomainStateInfoRequest(**client))
        return DomainObservation(
            domain=domain,
            gpus=lists.gpus,
            partitions=lists.partitions,
            limits=msgspec.structs.replace(limits, free_multicast_groups=self._free_groups),
            observed_at=observed_at,
            uncertain=lists.uncertain,
        )

    async def _limits(self, domain: str) -> DomainLimits:
        request = pb.GetDomainPropertiesRequest(context=pb.Context(), gateway_id=self._session.gateway_id)
        try:
            return read_limits(await self._session.call_in(domain, "GetDomainProperties", request))
        except FabricRefused as refusal:
            if refusal.code in _LIMITS_UNSUPPORTED:
                return DomainLimits()
            raise

    async def _read_free_groups(self, domain: str, request: pb.GetDomainStateInfoRequest) -> int | None:
        try:
            state: pb.DomainStateInfo = await self._session.call_in(
                domain, "GetDomainStateInfo", request, seconds=CONNECT_SECONDS
            )
        except (FabricRefused, FabricUnavailable):
            return None
        return state.available_multicast_groups

    async def _create(self, operation: CreatePartition) -> int:
        try:
            return await self._create_with(operation, DEFAULT_MULTICAST_GROUPS)
        except FabricRefused as refusal:
            if refusal.code != "RESOURCE_EXHAUSTED":
                raise
        # The factory default partition may hold all multicast groups: without any it still shares memory.
        return await self._create_with(operation, 0)

    async def _create_with(self, operation: CreatePartition, multicast_groups: int) -> int:
        request = pb.CreatePartitionRequest(
            context=pb.Context(),
            name=operation.name,
            gpu_resource_id=[pb.GpuResourceId(gpu_uid=guid) for guid in operation.guids],
            attr=pb.PartitionAttr(multicast_groups_limit=multicast_groups),
            gateway_id=self._session.gateway_id,
        )
        reply: pb.CreatePartitionResponse = await self._session.call("CreatePartition", request)
        if not reply.partition_id.partition_id:
            raise FabricUnavailable("CreatePartition: the reply names no partition")
        return reply.partition_id.partition_id
