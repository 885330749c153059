"""Keeping the DHCP leases of a node's NICs: one loop, and four threads for requests.

The loop looks at each lease at least once a second and carries out what `core.nics.lease` decides: ask,
set the address until the lease ends, remove it, report. The answer of a request goes back into the state
machine. A request that is not needed any more when its thread is free (the lease was released or renewed
meanwhile) is dropped.

A lease is written to disk before its actions are taken. Where it cannot be written nothing is believed,
but an address that may be another's is still removed. Requests go out from the namespace where the
interface is: the pod's, or the host's.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import structlog
from prometheus_client import Counter

from rackloom.claim.node.nic import dhcp, links
from rackloom.claim.node.nic.attach import AttachmentManager, namespace_lives
from rackloom.claim.node.nic.dhcp import LeaseRecord
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, in_namespace
from rackloom.claim.node.nic.status import ReportLease
from rackloom.core.nics.attachment import Attachment
from rackloom.core.nics.lease import (
    REQUEST_ACTIONS,
    AddressState,
    DhcpAnswer,
    DhcpGrant,
    DhcpLease,
    LeaseAction,
    RequestFailure,
    advance_lease,
    next_due_at,
)

LEASE_CHECK_SECONDS = 1.0
"""At least so often, since leases come and go without a word."""
READDRESS_RETRY_SECONDS = 5.0
"""After the kernel did not take or give an address."""
REQUEST_THREADS = 4
"""Requests that may wait for an answer at the same time, each for `dhcp.SECONDS`."""
RENEWED = "renewed"
OUTCOMES = (RENEWED, *RequestFailure)
log = structlog.get_logger(__name__)

DhcpExchange = Callable[[LeaseRecord, Path, LeaseAction], DhcpGrant | RequestFailure]
"""Asks from a namespace and waits for the answer. Blocks; raises `OSError`."""


def exchange_dhcp(record: LeaseRecord, netns: Path, way: LeaseAction) -> DhcpGrant | RequestFailure:
    """One request on the wire."""
    identity = record.nic.identity
    if identity is None:
        raise FileNotFoundError(f"NIC {record.nic.device} has no interface")
    link = links.link_name_in(identity, netns)
    return in_namespace(netns, lambda: dhcp.renew_lease(link, record.lease, way))


def address_state(record: LeaseRecord, attachment: Attachment | None) -> AddressState:
    """Where the interface is, as far as it was written down."""
    if attachment is None or attachment.attached is None or attachment.returning:
        return AddressState.HOST
    if record.lease.grant.address not in attachment.attached.addresses:
        return AddressState.BARE
    return AddressState.SET if attachment.address_until == record.lease.until else AddressState.LOOSE


class LeaseKeeper:
    """Renews leases, removes addresses whose lease is lost, and puts back those that are given again."""

    def __init__(
        self, manager: AttachmentManager, ask: DhcpExchange, tell: ReportLease, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._ask = ask
        self._tell = tell
        self._clock = clock
        self._pool = ThreadPoolExecutor(REQUEST_THREADS, "dhcp")
        self._doing: set[asyncio.Task[None]] = set()
        self._moving: set[str] = set()
        self.requests = Counter(
            "rackloom_nic_dhcp_renewals", "Requests to prolong a DHCP lease", ("outcome",), registry=None
        )
        """Belongs into the plugin's registry."""
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    async def run(self) -> None:
        """For as long as the plugin runs."""
        try:
            while True:
                for record in self._manager.leases.all():
                    self._go_on(record)
                await asyncio.sleep(self._pause())
        finally:
            for task in self._doing:
                task.cancel()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _pause(self) -> float:
        """What is still due after all were looked at could not be written down: no sense in hurry."""
        soonest = min((next_due_at(one.lease) for one in self._manager.leases.all()), default=float("inf"))
        left = soonest - self._clock()
        return min(LEASE_CHECK_SECONDS, left) if left > 0 else LEASE_CHECK_SECONDS

    def _go_on(self, record: LeaseRecord, answer: DhcpAnswer | None = None) -> None:
        after = advance_lease(record.lease, self._clock(), address_state(record, self._loan(record)), answer)
        try:
            kept, todo = self._keep(record, after.lease), after.todo
        except OSError as error:
            # What cannot be written down is not believed; but an address that may be another's goes.
            log.error("nic.lease-not-written", device=record.nic.device, reason=str(error))
            kept, todo = record, tuple(do for do in after.todo if do is LeaseAction.REMOVE)
        for do in todo:
            self._do(kept, do)

    def _keep(self, record: LeaseRecord, lease: DhcpLease) -> LeaseRecord:
        if lease == record.lease:
            return record
        kept = msgspec.structs.replace(record, lease=lease)
        self._manager.leases.put(kept)
        return kept

    def _do(self, record: LeaseRecord, do: LeaseAction) -> None:
        if do is LeaseAction.REPORT:
            self._beside(self._tell(record, self._loan(record), is_new=True))
        elif do in REQUEST_ACTIONS:
            self._beside(self._renew(record, do))
        elif record.key not in self._moving:
            self._moving.add(record.key)
            self._beside(self._move(record, held=do is LeaseAction.SET))

    async def _renew(self, record: LeaseRecord, way: LeaseAction) -> None:
        said = await asyncio.get_running_loop().run_in_executor(self._pool, self._said, record, way)
        if said is None:
            return
        outcome = RENEWED if isinstance(said, DhcpGrant) else said
        self.requests.labels(outcome).inc()
        log.info("nic.dhcp", device=record.nic.device, way=way, outcome=outcome)
        known = self._manager.leases.get(record.ref.uid, record.nic.device)
        if known is not None:
            self._go_on(known, DhcpAnswer(asked_at=record.lease.asked_at, result=said))

    def _said(self, record: LeaseRecord, way: LeaseAction) -> DhcpGrant | RequestFailure | None:
        """None where there is nothing to ask any more: others may have been before it in the queue."""
        if not self._is_open(record):
            return None
        attachment = self._loan(record)
        netns = HOST_NAMESPACE
        if attachment is not None and address_state(record, attachment) is not AddressState.HOST:
            netns = Path(attachment.netns) if namespace_lives(attachment) else HOST_NAMESPACE
        try:
            return self._ask(record, netns, way)
        except Exception as error:
            # Whatever kept it from being asked: it was not answered.
            log.warning("nic.dhcp-not-asked", device=record.nic.device, way=way, reason=str(error))
            return RequestFailure.NOTHING

    async def _move(self, record: LeaseRecord, *, held: bool) -> None:
        before = self._loan(record)
        try:
            await self._manager.set_address(record, held=held)
            after = self._loan(record)
            if before is not None and after is not None and before.attached != after.attached:
                await self._tell(record, after, is_new=False)
        except OSError as error:
            log.warning("nic.set_address-later", device=record.nic.device, held=held, reason=str(error))
            await asyncio.sleep(READDRESS_RETRY_SECONDS)
        finally:
            self._moving.discard(record.key)

    def _is_open(self, record: LeaseRecord) -> bool:
        """Whether its request is for an address that was neither given back nor granted anew since."""
        known = self._manager.leases.get(record.ref.uid, record.nic.device)
        return known is not None and known.lease.since < record.lease.asked_at

    def _loan(self, record: LeaseRecord) -> Attachment | None:
        return self._manager.attachments.get(record.ref.uid, record.nic.device)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)
