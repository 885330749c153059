"""`FabricDriver` over NMX-M: partition changes as complete member lists, confirmed by reading again.

NMX-M has no "add" or "remove". A change sends the full list of members, and a member that is left out
leaves the partition. Therefore, before every change:

1. The domain is read again. The partition must be as the plan found it, and the lists must agree about
   the GPUs that the change concerns.
2. No other change of the domain's partitions may be pending: a late PUT would undo changes made since
   then.

A change is an asynchronous operation. The driver polls it, cancels it when time is up, and then reads
the domain until the change is visible, because the lists lag behind the operations. An operation that
failed or was cancelled is refused. One whose end or effect is not seen in time has an unknown outcome.

NMX-M has no subscription and no domain limits. The reconciler's timer triggers the passes.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from urllib.parse import urlsplit

import httpx2
import msgspec

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxm import protocol, reading
from rackloom.carve.fabric.nmxm.protocol import NmxmSession, ReadLogin
from rackloom.carve.fabric.nmxm.reading import DomainReading, GpuGuids, NmxmLists, PartitionState
from rackloom.core.partitions.domain import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainLimits,
    DomainObservation,
    PartitionOperation,
    RemoveGpus,
)

# Asynchronous operations.


POLL_SECONDS = 0.5
"""Between two reads of an operation, as upstream."""
_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9_]*")
"""An error that is a code. Any other is a sentence, and goes into the message only."""
_PENDING_STATES = ("pending", "in-progress")


class PollPolicy(msgspec.Struct, frozen=True):
    """How long a change may take, in seconds, and how time passes."""

    seconds: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> bool:
        """Poll until `condition` is true, or return False when time is up."""
        deadline = self.clock() + self.seconds
        while not await condition():
            if self.clock() >= deadline:
                return False
            await self.sleep(POLL_SECONDS)
        return True


async def wait_for_operation(session: NmxmSession, call: str, operation_id: str, poll: PollPolicy) -> None:
    """Return when the operation has completed.

    Raises FabricRefused when it failed or was cancelled, FabricUnavailable when that is not known in time.
    Then it is cancelled, and the next list of operations shows whether that worked.
    """
    newest: list[protocol.NmxmOperation] = []

    async def has_ended() -> bool:
        with suppress(FabricUnavailable):
            newest[:] = [
                await session.get("GetOperation", f"operations/{operation_id}", protocol.NmxmOperation)
            ]
        return bool(newest) and newest[0].status not in _PENDING_STATES

    try:
        if not await poll.until(has_ended):
            with suppress(FabricRefused, FabricUnavailable):
                await session.begin("CancelOperation", "DELETE", f"operations/{operation_id}")
            raise FabricUnavailable(f"{call}: operation {operation_id} not done in {poll.seconds:g} s")
    except FabricRefused as refusal:
        # Accepted, and then not found any more: it may have been executed.
        raise FabricUnavailable(f"{call}: {refusal}") from refusal
    _require_completed(call, newest[0])


async def require_no_pending_change(session: NmxmSession, reading: DomainReading) -> None:
    """Raise FabricRefused while a change of this domain's partitions by any client is pending.

    A PUT replaces all members: one that is executed late would undo changes made since then.
    """
    operations = await session.get("GetOperations", "operations", tuple[protocol.NmxmOperation, ...])
    for operation in operations:
        if operation.status in _PENDING_STATES and _may_change_domain(operation.request, reading):
            raise FabricRefused(
                "BUSY", f"operation {operation.id} on {operation.request.uri} is still {operation.status}"
            )


def _may_change_domain(request: protocol.NmxmOperationRequest, reading: DomainReading) -> bool:
    """Whether a request may change this domain. True in doubt."""
    *_, collection, entity = ["", *urlsplit(request.uri).path.rstrip("/").split("/")]
    if entity == "partitions":
        named = request.body.get("Members") if isinstance(request.body, dict) else None
        if not named or not all(isinstance(member, str) for member in named):
            return True
        return not {gpu.id for gpu in reading.entities.values()}.isdisjoint(named)
    if collection == "partitions":
        return any(entity == partition.entity for partition in reading.partitions.values())
    return False


def _require_completed(call: str, operation: protocol.NmxmOperation) -> None:
    if operation.status == "completed":
        return
    result = operation.result or protocol.NmxmOperationResult()
    text = f"operation {operation.id} {operation.status}: {result.error} {result.details}".rstrip()
    if operation.status not in ("failed", "cancelled"):
        raise FabricUnavailable(f"{call}: {text}")
    code = result.error if _ERROR_CODE.fullmatch(result.error) else operation.status.upper()
    raise FabricRefused(code, f"{call}: {text}")


# The driver.


OPERATION_SECONDS = 10.0


class NmxmDriver:
    """One domain of one NMX-M. `base_url` ends in `/nmx/v1`. Close it in the event loop that uses it.

    The domain is `domain`, or if that is None, the domain of `chassis_serials`. `clock` gives seconds
    since the epoch. `operation_seconds` bound how long a change may take, and how long it may take to show.
    """

    def __init__(
        self,
        base_url: str,
        login: ReadLogin,
        *,
        clock: Callable[[], float],
        domain: str | None = None,
        chassis_serials: Collection[str] = (),
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        operation_seconds: float = OPERATION_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._session = NmxmSession(base_url, login, tls=tls, server_name=server_name, transport=transport)
        self._clock = clock
        self._poll = PollPolicy(operation_seconds, clock, sleep)
        self._asked_domain = domain
        self._serials = chassis_serials
        self._names = GpuGuids()
        self._domain: str | None = None
        self._expected: dict[int, tuple[str, frozenset[protocol.PartitionMember]]] = {}
        """Partition number -> entity and members, as observed last and changed by this driver since."""

    async def observe(self) -> DomainObservation:
        """Read the whole domain. Raises FabricUnavailable instead of returning a partial reading."""
        observed_at = self._clock()
        try:
            reading = await self._read()
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        self._domain = reading.domain
        self._expected = {number: partition.membership for number, partition in reading.partitions.items()}
        return DomainObservation(
            domain=reading.domain,
            gpus=reading.gpus,
            partitions=tuple(partition.partition for partition in reading.partitions.values()),
            # NMX-M reports no domain properties.
            limits=DomainLimits(),
            observed_at=observed_at,
            uncertain=reading.uncertain,
        )

    async def execute(self, operation: PartitionOperation) -> int:
        """Execute one operation and return the partition number it acted on.

        Raises FabricRefused when NMX-M refuses, and before anything is requested when the partition is not as
        it was observed or another change is pending. Raises FabricUnavailable when the outcome is unknown.
        """
        now = await self._read()
        _require_certain(now, _gpus_concerned(operation, now))
        if now.domain != self._domain:
            raise FabricUnavailable(f"{self._session.url} is now domain {now.domain}, it was {self._domain}")
        await require_no_pending_change(self._session, now)
        match operation:
            case CreatePartition():
                return await self._create(operation, now)
            case DeletePartition():
                await self._delete(operation, self._as_planned(operation, now))
            case AddGpus():
                current = self._as_planned(operation, now)
                joining = _joining_members(operation.guids, now, guid_based=current.partition.guid_based)
                await self._replace(operation, current, {**current.members, **joining})
            case RemoveGpus():
                current = self._as_planned(operation, now)
                staying = {
                    guid: member for guid, member in current.members.items() if guid not in operation.guids
                }
                await self._replace(operation, current, staying)
        return operation.partition_id

    async def notifications(self) -> AsyncGenerator[None, None]:
        """Yields nothing: NMX-M has no subscription, so the timer triggers the passes."""
        await asyncio.Event().wait()
        yield

    async def close(self) -> None:
        """Release the connections."""
        await self._session.close()

    async def _read(self) -> DomainReading:
        session = self._session
        lists = NmxmLists(
            chassis=await session.hello(),
            nodes=await session.get_all("GetComputeNodes", "compute-nodes", protocol.NmxmComputeNode),
            gpus=await session.get_all("GetGpus", "gpus", protocol.NmxmGpu),
            partitions=await session.get("GetPartitions", "partitions", tuple[protocol.NmxmPartition, ...]),
        )
        domain = self._asked_domain or reading.domain_of_chassis(lists, self._serials)
        return reading.read_domain(lists, domain, self._names)

    def _as_planned(
        self, operation: AddGpus | RemoveGpus | DeletePartition, now: DomainReading
    ) -> PartitionState:
        current = now.partitions.get(operation.partition_id)
        if current is None or current.partition.name != operation.name:
            raise FabricRefused(
                "NOT_FOUND", f"no partition {operation.partition_id} is named {operation.name!r}"
            )
        if current.membership != self._expected.get(operation.partition_id):
            raise FabricRefused("CHANGED", f"partition {operation.name!r} is not as the plan found it")
        return current

    async def _create(self, operation: CreatePartition, now: DomainReading) -> int:
        if now.named(operation.name) is not None:
            raise FabricRefused("NAME_IN_USE", f"a partition named {operation.name!r} stands already")
        members = _joining_members(operation.guids, now, guid_based=True)
        body = protocol.NewPartitionBody(name=operation.name, members=tuple(members.values()))
        await self._change("CreatePartition", "POST", "partitions", body)
        after = await self._confirm(
            "CreatePartition",
            frozenset(operation.guids),
            lambda after: (
                (made := after.named(operation.name)) is not None
                and made.partition.members == frozenset(operation.guids)
            ),
        )
        current = after.named(operation.name)
        assert current is not None  # noqa: S101 - confirmed above
        self._expected[current.partition.id] = current.membership
        return current.partition.id

    async def _delete(self, operation: DeletePartition, current: PartitionState) -> None:
        await self._change("DeletePartition", "DELETE", f"partitions/{current.entity}")
        await self._confirm(
            "DeletePartition",
            current.partition.members,
            lambda after: all(partition.entity != current.entity for partition in after.partitions.values()),
        )
        del self._expected[operation.partition_id]

    async def _replace(
        self,
        operation: AddGpus | RemoveGpus,
        current: PartitionState,
        members: dict[int, protocol.PartitionMember],
    ) -> None:
        full = protocol.MembershipBody(members=(*members.values(), *current.empty_locations))
        await self._change("UpdatePartition", "PUT", f"partitions/{current.entity}", full)
        wanted = (current.entity, frozenset(full.members))
        await self._confirm(
            "UpdatePartition",
            current.partition.members | members.keys(),
            lambda after: (
                operation.partition_id in after.partitions
                and after.partitions[operation.partition_id].membership == wanted
            ),
        )
        self._expected[operation.partition_id] = wanted

    async def _change(
        self,
        call: str,
        method: str,
        path: str,
        body: protocol.NewPartitionBody | protocol.MembershipBody | None = None,
    ) -> None:
        operation_id = await self._session.begin(call, method, path, body)
        await wait_for_operation(self._session, call, operation_id, self._poll)

    async def _confirm(
        self, call: str, guids: frozenset[int], shows: Callable[[DomainReading], bool]
    ) -> DomainReading:
        """The reading that lists the change, and agrees about `guids`: the lists lag behind the operations.

        Raises FabricUnavailable when the change is not listed in time.
        """
        newest: list[DomainReading] = []

        async def is_shown() -> bool:
            try:
                newest[:] = [await self._read()]
                _require_certain(newest[0], guids)
            except (FabricRefused, FabricUnavailable):
                return False
            return shows(newest[0])

        if not await self._poll.until(is_shown):
            raise FabricUnavailable(f"{call}: completed, but it does not show")
        return newest[0]


def _gpus_concerned(operation: PartitionOperation, now: DomainReading) -> frozenset[int]:
    """The GPUs that the lists must agree about before a change."""
    if isinstance(operation, CreatePartition):
        return frozenset(operation.guids)
    target = now.partitions.get(operation.partition_id)
    if target is None:
        # It may stand all the same, with any of the GPUs that are uncertain.
        return now.uncertain
    moved = () if isinstance(operation, DeletePartition) else operation.guids
    return target.partition.members.union(moved)


def _require_certain(now: DomainReading, guids: frozenset[int]) -> None:
    """Raise FabricUnavailable while the lists contradict each other about any of `guids`."""
    if doubtful := now.uncertain & guids:
        raise FabricUnavailable(
            f"GetPartitions: GPU {min(doubtful):#x} is in a partition that the list denies"
        )


def _joining_members(
    guids: Collection[int], now: DomainReading, *, guid_based: bool
) -> dict[int, protocol.PartitionMember]:
    """GPUs that shall join, as NMX-M names them. Raises FabricRefused unless they are listed and free."""
    if missing := [guid for guid in guids if guid not in now.entities]:
        raise FabricRefused("NOT_FOUND", f"GPU {missing[0]:#x} is not listed")
    if taken := sorted(now.held().intersection(guids)):
        raise FabricRefused("CHANGED", f"GPU {taken[0]:#x} is in a partition by now")
    chosen = {guid: now.entities[guid] for guid in guids}
    return {guid: gpu.id if guid_based else reading.member_location(gpu) for guid, gpu in chosen.items()}
