"""`FabricDriver` over NMX-M.

NMX-M knows no "add" and no "remove": a change sends the full list of members, and what the list leaves out
leaves the partition. So the list is read afresh before every change, must be the one that the plan was made
from, and nothing else may be changing partitions; afterwards the change must show.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection

import httpx2

from rackloom.carve.fabric.nmxm import reading, wire
from rackloom.carve.fabric.nmxm.operations import Patience, require_quiet, wait_for
from rackloom.carve.fabric.nmxm.reading import Lists, Names, Reading, Standing
from rackloom.carve.fabric.nmxm.session import ReadLogin, Session
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable
from rackloom.carve.plan.values import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    Limits,
    Observation,
    Operation,
    RemoveGpus,
)

OPERATION_SECONDS = 10.0


class NmxmDriver:
    """One domain of one NMX-M. `base_url` ends in `/nmx/v1`; close it in the event loop that uses it.

    The domain is `domain`, or where that is None the one that `chassis_serials` are in. `clock` gives seconds
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
        self._session = Session(base_url, login, tls=tls, server_name=server_name, transport=transport)
        self._clock = clock
        self._patience = Patience(operation_seconds, clock, sleep)
        self._asked_domain = domain
        self._serials = chassis_serials
        self._names = Names()
        self._domain: str | None = None
        self._expected: dict[int, tuple[str, frozenset[wire.Member]]] = {}
        """By number, the partitions that plans are made from, and what we have made of them since."""

    async def observe(self) -> Observation:
        """Read the whole domain. Raises FabricUnavailable; never returns a partial reading."""
        observed_at = self._clock()
        try:
            seen = await self._read()
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        self._domain = seen.domain
        self._expected = {number: one.membership for number, one in seen.partitions.items()}
        return Observation(
            domain=seen.domain,
            gpus=seen.gpus,
            partitions=tuple(one.seen for one in seen.partitions.values()),
            # NMX-M has no domain properties: what the domain can hold is not reported.
            limits=Limits(),
            observed_at=observed_at,
        )

    async def execute(self, operation: Operation) -> int:
        """Carry out one operation and return the partition number it acted on.

        Raises FabricRefused when NMX-M says no, and before anything is asked for when the partition is not as
        it was observed or another change is under way; FabricUnavailable when the outcome is unknown.
        """
        now = await self._read()
        if now.domain != self._domain:
            raise FabricUnavailable(f"{self._session.url} is now domain {now.domain}, it was {self._domain}")
        await require_quiet(self._session, now)
        match operation:
            case CreatePartition():
                return await self._create(operation, now)
            case DeletePartition():
                await self._delete(operation, self._as_planned(operation, now))
            case AddGpus():
                standing = self._as_planned(operation, now)
                joining = _members_of(operation.guids, now, guid_based=standing.seen.guid_based)
                await self._replace(operation, standing, {**standing.members, **joining})
            case RemoveGpus():
                standing = self._as_planned(operation, now)
                staying = {guid: one for guid, one in standing.members.items() if guid not in operation.guids}
                await self._replace(operation, standing, staying)
        return operation.partition_id

    async def notifications(self) -> AsyncGenerator[None, None]:
        """None ever: NMX-M has no subscription, the timer must do."""
        await asyncio.Event().wait()
        yield

    async def close(self) -> None:
        """Release the connections."""
        await self._session.close()

    async def _read(self) -> Reading:
        session = self._session
        lists = Lists(
            chassis=await session.hello(),
            nodes=await session.get_all("GetComputeNodes", "compute-nodes", wire.ComputeNode),
            gpus=await session.get_all("GetGpus", "gpus", wire.Gpu),
            partitions=await session.get("GetPartitions", "partitions", tuple[wire.Partition, ...]),
        )
        domain = self._asked_domain or reading.domain_of_chassis(lists, self._serials)
        return reading.read_domain(lists, domain, self._names)

    def _as_planned(self, operation: AddGpus | RemoveGpus | DeletePartition, now: Reading) -> Standing:
        standing = now.partitions.get(operation.partition_id)
        if standing is None or standing.seen.name != operation.name:
            raise FabricRefused(
                "NOT_FOUND", f"no partition {operation.partition_id} is named {operation.name!r}"
            )
        if standing.membership != self._expected.get(operation.partition_id):
            raise FabricRefused("CHANGED", f"partition {operation.name!r} is not as the plan found it")
        return standing

    async def _create(self, operation: CreatePartition, now: Reading) -> int:
        if now.named(operation.name) is not None:
            raise FabricRefused("NAME_IN_USE", f"a partition named {operation.name!r} stands already")
        members = _members_of(operation.guids, now, guid_based=True)
        body = wire.NewPartition(name=operation.name, members=tuple(members.values()))
        await self._change("CreatePartition", "POST", "partitions", body)
        made = await self._confirm(
            "CreatePartition",
            lambda after: (
                (one := after.named(operation.name)) is not None
                and one.seen.members == frozenset(operation.guids)
            ),
        )
        standing = made.named(operation.name)
        assert standing is not None  # noqa: S101 - confirmed above
        self._expected[standing.seen.id] = standing.membership
        return standing.seen.id

    async def _delete(self, operation: DeletePartition, standing: Standing) -> None:
        await self._change("DeletePartition", "DELETE", f"partitions/{standing.entity}")
        await self._confirm(
            "DeletePartition",
            lambda after: all(one.entity != standing.entity for one in after.partitions.values()),
        )
        del self._expected[operation.partition_id]

    async def _replace(
        self, operation: AddGpus | RemoveGpus, standing: Standing, members: dict[int, wire.Member]
    ) -> None:
        full = wire.Membership(members=(*members.values(), *standing.empty_seats))
        await self._change("UpdatePartition", "PUT", f"partitions/{standing.entity}", full)
        wanted = (standing.entity, frozenset(full.members))
        await self._confirm(
            "UpdatePartition",
            lambda after: (
                operation.partition_id in after.partitions
                and after.partitions[operation.partition_id].membership == wanted
            ),
        )
        self._expected[operation.partition_id] = wanted

    async def _change(
        self, call: str, method: str, path: str, body: wire.NewPartition | wire.Membership | None = None
    ) -> None:
        operation_id = await self._session.begin(call, method, path, body)
        await wait_for(self._session, call, operation_id, self._patience)

    async def _confirm(self, call: str, shows: Callable[[Reading], bool]) -> Reading:
        """The reading in which the change shows: the lists lag behind the operations.

        Raises FabricUnavailable when it does not show in time.
        """
        newest: list[Reading] = []

        async def is_shown() -> bool:
            try:
                newest[:] = [await self._read()]
            except (FabricRefused, FabricUnavailable):
                return False
            return shows(newest[0])

        if not await self._patience.until(is_shown):
            raise FabricUnavailable(f"{call}: completed, but it does not show")
        return newest[0]


def _members_of(guids: Collection[int], now: Reading, *, guid_based: bool) -> dict[int, wire.Member]:
    """GPUs that shall join, as NMX-M names them. Raises FabricRefused unless they are listed and free."""
    if missing := [guid for guid in guids if guid not in now.entities]:
        raise FabricRefused("NOT_FOUND", f"GPU {missing[0]:#x} is not listed")
    if taken := sorted(now.held().intersection(guids)):
        raise FabricRefused("CHANGED", f"GPU {taken[0]:#x} is in a partition by now")
    chosen = {guid: now.entities[guid] for guid in guids}
    return {guid: one.id if guid_based else reading.place_of(one) for guid, one in chosen.items()}
