"""Keeping the DHCP leases of a node's NICs: one loop, and four threads for requests.

The loop checks each lease at least once a second and carries out the decisions of `core.nics.lease`: send a
request, set the address until the lease ends, remove it, report. The answer of a request goes back into the
state machine. If a request is no longer needed when its thread is free (the lease was released or renewed
in the meantime), it is dropped.

A lease is written to disk before its actions are taken, so a restarted plugin continues from the last
decision. If it cannot be written, the old state counts, but an address that may belong to another host is
removed. Requests go out from the namespace where the interface is: the pod's, or the host's.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog
from prometheus_client import Counter

from rackloom.claim.node.nic import links
from rackloom.claim.node.nic.attach import AttachmentManager, namespace_lives
from rackloom.claim.node.nic.leases import LeaseRecord
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, in_namespace
from rackloom.claim.node.nic.status import ReportLease
from rackloom.claim.node.tasks import TaskSet
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
"""The longest pause between checks, since leases come and go without notice."""
READDRESS_RETRY_SECONDS = 5.0
"""After the kernel did not take or give an address."""
REQUEST_THREADS = 4
"""Requests that may wait for an answer at the same time, each for `dhcp.DHCP_SECONDS`."""
RENEWED = "renewed"
OUTCOMES = (RENEWED, *RequestFailure)
log = structlog.get_logger(__name__)

DhcpExchange = Callable[[LeaseRecord, Path, LeaseAction], DhcpGrant | RequestFailure]
"""Sends a request from a namespace and waits for the answer. Blocks. Raises `OSError`."""


def exchange_dhcp(record: LeaseRecord, netns: Path, way: LeaseAction) -> DhcpGrant | RequestFailure:
    """One request on the wire."""
    from rackloom.claim.node.nic import dhcp

    identity = record.nic.identity
    if identity is None:
        raise FileNotFoundError(f"NIC {record.nic.device} has no interface")
    link = links.link_name_in(identity, netns)
    return in_namespace(netns, lambda: dhcp.renew_lease(link, record.lease, way))


def address_state(record: LeaseRecord, attachment: Attachment | None) -> AddressState:
    """The place of the interface, according to the attachment on disk."""
    if attachment is None or attachment.attached is None or attachment.returning:
        return AddressState.HOST
    if record.lease.grant.address not in attachment.attached.addresses:
        return AddressState.BARE
    return AddressState.SET if attachment.address_until == record.lease.until else AddressState.LOOSE


class LeaseKeeper:
    """Renews leases, removes addresses of lost leases, and restores those that are leased again."""

    def __init__(
        self, manager: AttachmentManager, ask: DhcpExchange, report: ReportLease, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._ask = ask
        self._report = report
        self._clock = clock
        self._pool = ThreadPoolExecutor(REQUEST_THREADS, "dhcp")
        self._tasks = TaskSet()
        self._readdressing: set[str] = set()
        """Keys of leases whose address is being set or removed."""
        self.requests = Counter(
            "rackloom_nic_dhcp_renewals", "Requests to prolong a DHCP lease", ("outcome",), registry=None
        )
        """To be registered with the plugin's registry."""
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    async def run(self) -> None:
        """Keep the leases for as long as the plugin runs."""
        try:
            while True:
                for record in self._manager.leases.all():
                    self._advance(record)
                await asyncio.sleep(self._pause())
        finally:
            self._tasks.cancel()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _pause(self) -> float:
        soonest = min(
            (next_due_at(record.lease) for record in self._manager.leases.all()), default=float("inf")
        )
        left = soonest - self._clock()
        # The rest of a round could not be written to disk: an immediate retry would not help.
        return min(LEASE_CHECK_SECONDS, left) if left > 0 else LEASE_CHECK_SECONDS

    def _advance(self, record: LeaseRecord, answer: DhcpAnswer | None = None) -> None:
        where = address_state(record, self._attachment(record))
        after = advance_lease(record.lease, self._clock(), where, answer)
        try:
            kept, todo = self._keep(record, after.lease), after.todo
        except OSError as error:
            # A state that is not on disk does not count, but an address that may be another's is removed.
            log.error("nic.lease-not-written", device=record.nic.device, reason=str(error))
            kept, todo = record, tuple(action for action in after.todo if action is LeaseAction.REMOVE)
        for action in todo:
            self._do(kept, action)

    def _keep(self, record: LeaseRecord, lease: DhcpLease) -> LeaseRecord:
        if lease == record.lease:
            return record
        kept = msgspec.structs.replace(record, lease=lease)
        self._manager.leases.put(kept)
        return kept

    def _do(self, record: LeaseRecord, action: LeaseAction) -> None:
        if action is LeaseAction.REPORT:
            self._tasks.start(self._report(record, self._attachment(record), is_new=True))
        elif action in REQUEST_ACTIONS:
            self._tasks.start(self._renew(record, action))
        elif record.key not in self._readdressing:
            self._readdressing.add(record.key)
            self._tasks.start(self._set_address(record, held=action is LeaseAction.SET))

    async def _renew(self, record: LeaseRecord, way: LeaseAction) -> None:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._request, record, way)
        if result is None:
            return
        outcome = RENEWED if isinstance(result, DhcpGrant) else result
        self.requests.labels(outcome).inc()
        log.info("nic.dhcp", device=record.nic.device, way=way, outcome=outcome)
        newest = self._manager.leases.get(record.claim, record.nic.device)
        if newest is not None:
            self._advance(newest, DhcpAnswer(asked_at=record.lease.asked_at, result=result))

    def _request(self, record: LeaseRecord, way: LeaseAction) -> DhcpGrant | RequestFailure | None:
        """Send the request. None if it waited for a thread and is not needed any more."""
        newest = self._manager.leases.get(record.claim, record.nic.device)
        if newest is None or newest.lease.since >= record.lease.asked_at:
            return None  # released, or granted again in the meantime
        attachment = self._attachment(record)
        netns = HOST_NAMESPACE
        if attachment is not None and address_state(record, attachment) is not AddressState.HOST:
            netns = Path(attachment.netns) if namespace_lives(attachment) else HOST_NAMESPACE
        try:
            return self._ask(record, netns, way)
        except Exception as error:
            # If an error kept the request from being sent, it was not answered.
            log.warning("nic.dhcp-not-asked", device=record.nic.device, way=way, reason=str(error))
            return RequestFailure.NOTHING

    async def _set_address(self, record: LeaseRecord, *, held: bool) -> None:
        before = self._attachment(record)
        try:
            await self._manager.set_address(record, held=held)
            after = self._attachment(record)
            if before is not None and after is not None and before.attached != after.attached:
                await self._report(record, after, is_new=False)
        except OSError as error:
            log.warning("nic.readdress-later", device=record.nic.device, held=held, reason=str(error))
            await asyncio.sleep(READDRESS_RETRY_SECONDS)
        finally:
            self._readdressing.discard(record.key)

    def _attachment(self, record: LeaseRecord) -> Attachment | None:
        return self._manager.attachments.get(record.claim, record.nic.device)
