"""Keeping the leases of all NICs of the node: one loop for all of them, and a few threads for what waits.

What is to be done is the lease's own business (`lease.step`); here it is done, and what came of it goes back.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import structlog
from prometheus_client import Counter

from rackloom.claim.node.nic import dhcp, moving
from rackloom.claim.node.nic.lease import ASKS, Answer, Do, Grant, Lease, Said, Seat, due_at, step
from rackloom.claim.node.nic.leases import LeaseRecord
from rackloom.claim.node.nic.lender import Lender, lives
from rackloom.claim.node.nic.loans import Loan
from rackloom.claim.node.nic.namespaces import OWN, inside
from rackloom.claim.node.nic.telling_leases import TellLease

LOOK_SECONDS = 1.0
"""At least so often, since leases come and go without a word."""
AGAIN_SECONDS = 5.0
"""After the kernel did not take or give an address."""
AT_ONCE = 4
"""Requests that may wait for an answer at the same time, each for `dhcp.SECONDS`."""
RENEWED = "renewed"
OUTCOMES = (RENEWED, *Said)
log = structlog.get_logger(__name__)

Exchange = Callable[[LeaseRecord, Path, Do], Grant | Said]
"""Asks from a namespace and waits for the answer. Blocks; raises `OSError`."""


def exchange(record: LeaseRecord, netns: Path, way: Do) -> Grant | Said:
    """One request on the wire."""
    identity = record.nic.identity
    if identity is None:
        raise FileNotFoundError(f"NIC {record.nic.device} has no interface")
    link = moving.name_in(identity, netns)
    return inside(netns, lambda: dhcp.ask_again(link, record.lease, way))


def seat(record: LeaseRecord, loan: Loan | None) -> Seat:
    """Where the interface is, as far as it was written down."""
    if loan is None or loan.attached is None or loan.returning:
        return Seat.HOST
    if record.lease.grant.address not in loan.attached.addresses:
        return Seat.BARE
    return Seat.SET if loan.address_until == record.lease.until else Seat.LOOSE


class Keeper:
    """Renews leases, removes addresses whose lease is lost, and puts back those that are given again."""

    def __init__(self, lender: Lender, ask: Exchange, tell: TellLease, clock: Callable[[], float]) -> None:
        self._lender = lender
        self._ask = ask
        self._tell = tell
        self._clock = clock
        self._pool = ThreadPoolExecutor(AT_ONCE, "dhcp")
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
                for record in self._lender.leases.all():
                    self._go_on(record)
                await asyncio.sleep(self._pause())
        finally:
            for task in self._doing:
                task.cancel()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _pause(self) -> float:
        """What is still due after all were looked at could not be written down: no sense in hurry."""
        soonest = min((due_at(one.lease) for one in self._lender.leases.all()), default=float("inf"))
        left = soonest - self._clock()
        return min(LOOK_SECONDS, left) if left > 0 else LOOK_SECONDS

    def _go_on(self, record: LeaseRecord, answer: Answer | None = None) -> None:
        after = step(record.lease, self._clock(), seat(record, self._loan(record)), answer)
        try:
            kept, todo = self._keep(record, after.lease), after.todo
        except OSError as error:
            # What cannot be written down is not believed; but an address that may be another's goes.
            log.error("nic.lease-not-written", device=record.nic.device, reason=str(error))
            kept, todo = record, tuple(do for do in after.todo if do is Do.REMOVE)
        for do in todo:
            self._do(kept, do)

    def _keep(self, record: LeaseRecord, lease: Lease) -> LeaseRecord:
        if lease == record.lease:
            return record
        kept = msgspec.structs.replace(record, lease=lease)
        self._lender.leases.put(kept)
        return kept

    def _do(self, record: LeaseRecord, do: Do) -> None:
        if do is Do.TELL:
            self._beside(self._tell(record, self._loan(record), is_new=True))
        elif do in ASKS:
            self._beside(self._renew(record, do))
        elif record.key not in self._moving:
            self._moving.add(record.key)
            self._beside(self._move(record, held=do is Do.SET))

    async def _renew(self, record: LeaseRecord, way: Do) -> None:
        said = await asyncio.get_running_loop().run_in_executor(self._pool, self._said, record, way)
        if said is None:
            return
        outcome = RENEWED if isinstance(said, Grant) else said
        self.requests.labels(outcome).inc()
        log.info("nic.dhcp", device=record.nic.device, way=way, outcome=outcome)
        known = self._lender.leases.get(record.ref.uid, record.nic.device)
        if known is not None:
            self._go_on(known, Answer(asked_at=record.lease.asked_at, said=said))

    def _said(self, record: LeaseRecord, way: Do) -> Grant | Said | None:
        """None where there is nothing to ask any more: others may have been before it in the queue."""
        if not self._is_open(record):
            return None
        loan = self._loan(record)
        in_pod = loan is not None and seat(record, loan) is not Seat.HOST and lives(loan)
        try:
            return self._ask(record, Path(loan.netns) if loan is not None and in_pod else OWN, way)
        except Exception as error:
            # Whatever kept it from being asked: it was not answered.
            log.warning("nic.dhcp-not-asked", device=record.nic.device, way=way, reason=str(error))
            return Said.NOTHING

    async def _move(self, record: LeaseRecord, *, held: bool) -> None:
        before = self._loan(record)
        try:
            await self._lender.readdress(record, held=held)
            after = self._loan(record)
            if before is not None and after is not None and before.attached != after.attached:
                await self._tell(record, after, is_new=False)
        except OSError as error:
            log.warning("nic.readdress-later", device=record.nic.device, held=held, reason=str(error))
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._moving.discard(record.key)

    def _is_open(self, record: LeaseRecord) -> bool:
        """Whether its request is for an address that was neither given back nor granted anew since."""
        known = self._lender.leases.get(record.ref.uid, record.nic.device)
        return known is not None and known.lease.since < record.lease.asked_at

    def _loan(self, record: LeaseRecord) -> Loan | None:
        return self._lender.loans.get(record.ref.uid, record.nic.device)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)
