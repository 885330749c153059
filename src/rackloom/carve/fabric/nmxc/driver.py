"""`FabricDriver` over NMX-C."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc import requests
from rackloom.carve.fabric.nmxc.channel import Connect, open_channel
from rackloom.carve.fabric.nmxc.notify import wake_ups
from rackloom.carve.fabric.nmxc.reading import read_gpus, read_limits, read_partitions
from rackloom.carve.fabric.nmxc.session import Session
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable
from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.carve.plan.values import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    Limits,
    Observation,
    Operation,
    RemoveGpus,
)

_NO_LIMITS = ("NOT_SUPPORTED", "UNIMPLEMENTED")
"""How a controller says that it does not report limits."""


class NmxcDriver:
    """One NMX-C endpoint. Construct it in the event loop that uses it, and close it there.

    `clock` gives seconds since the epoch. `gateway_id` is how the controller tells its clients apart.
    `sleep` and `connect` are there for whoever has another idea of time, or of the way to the controller.
    """

    def __init__(
        self,
        endpoint_url: str,
        *,
        clock: Callable[[], float],
        tls: TlsMaterial | None = None,
        gateway_id: str = "rackloom",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        connect: Connect = open_channel,
    ) -> None:
        self._session = Session(endpoint_url, tls, gateway_id, connect)
        self._clock = clock
        self._sleep = sleep
        self._domain: str | None = None

    async def observe(self) -> Observation:
        """Read the whole domain. Raises FabricUnavailable; never returns a partial reading."""
        observed_at = self._clock()
        try:
            observation = await self._read(observed_at)
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        self._domain = observation.domain
        return observation

    async def execute(self, operation: Operation) -> int:
        """Carry out one operation and return the partition id it acted on.

        Raises FabricRefused when the controller says no, FabricUnavailable when the outcome is unknown or,
        before anything is asked for, when another domain answers than was observed.
        """
        domain = await self._session.hello()
        if self._domain is not None and domain != self._domain:
            raise FabricUnavailable(f"{self._session.url} is now domain {domain}, it was {self._domain}")
        gateway = self._session.gateway_id
        match operation:
            case CreatePartition():
                return await self._create(operation)
            case DeletePartition():
                await self._session.call("DeletePartition", requests.delete(operation, gateway))
            case AddGpus():
                await self._session.call("AddGpusToPartition", requests.update(operation, gateway))
            case RemoveGpus():
                await self._session.call("RemoveGpusFromPartition", requests.update(operation, gateway))
        return operation.partition_id

    def notifications(self) -> AsyncIterator[None]:
        """One item each time the fabric says that something changed, and after each (re)connection.

        It takes a lost subscription up again by itself and never ends; close the iterator before the driver.
        """
        return wake_ups(self._session, self._sleep)

    async def close(self) -> None:
        """Release the connection."""
        await self._session.close()

    async def _read(self, observed_at: float) -> Observation:
        gateway = self._session.gateway_id
        domain = await self._session.hello()
        limits = await self._limits(domain)
        gpus: pb.GetGpuInfoListResponse = await self._session.call_in(
            domain, "GetGpuInfoList", requests.all_gpus(gateway)
        )
        partitions: pb.GetPartitionInfoListResponse = await self._session.call_in(
            domain, "GetPartitionInfoList", requests.all_partitions(gateway)
        )
        return Observation(
            domain=domain,
            gpus=read_gpus(gpus.gpu_info_list),
            partitions=read_partitions(partitions.partition_info_list, gpus.gpu_info_list),
            limits=limits,
            observed_at=observed_at,
        )

    async def _limits(self, domain: str) -> Limits:
        request = requests.domain_properties(self._session.gateway_id)
        try:
            return read_limits(await self._session.call_in(domain, "GetDomainProperties", request))
        except FabricRefused as refusal:
            if refusal.code in _NO_LIMITS:
                return Limits()
            raise

    async def _create(self, operation: CreatePartition) -> int:
        try:
            return await self._create_with(operation, requests.MULTICAST_GROUPS)
        except FabricRefused as refusal:
            if refusal.code != "RESOURCE_EXHAUSTED":
                raise
        # The factory default partition may hold all multicast groups: without any it still shares memory.
        return await self._create_with(operation, 0)

    async def _create_with(self, operation: CreatePartition, multicast_groups: int) -> int:
        request = requests.create(operation, self._session.gateway_id, multicast_groups)
        reply: pb.CreatePartitionResponse = await self._session.call("CreatePartition", request)
        if not reply.partition_id.partition_id:
            raise FabricUnavailable("CreatePartition: the reply names no partition")
        return reply.partition_id.partition_id
