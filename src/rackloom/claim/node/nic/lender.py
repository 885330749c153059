"""Lending NICs to pods and taking them back, whatever happened in between."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from rackloom.claim.node.nic import dhcp, moving, rdma
from rackloom.claim.node.nic.fixes import fix_of
from rackloom.claim.node.nic.lease import LOST
from rackloom.claim.node.nic.leases import LeaseRecord, Leases
from rackloom.claim.node.nic.loans import Held, Loan, Loans
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.nic.namespaces import OWN, identity, inside
from rackloom.errors import Refused, Retry

T = TypeVar("T")
log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
MOST_SECONDS = 2**32 - 2
"""That the kernel counts for an address: one more is for ever."""


class Lender:
    """Carries out loans, one at a time: the kernel has one lock for all links anyway."""

    def __init__(self, loans: Loans, leases: Leases, check: Callable[[Held], None]) -> None:
        """`check` raises `Refused` for a NIC that must stay on the host, and `OSError`."""
        self.loans = loans
        self.leases = leases
        self._check = check
        self._turn = asyncio.Lock()

    async def lend(self, claim: str, pod: str, nic: Held, netns: Path) -> Attached:
        """Bring a NIC into the pod's namespace, or find it there.

        Raises `Refused` when the kernel will not; the NIC is then back on the host, or on its way.
        """
        return await self._alone(lambda: self._lend(claim, pod, nic, netns))

    async def take_back(self, loan: Loan) -> None:
        """Bring a NIC back to the host, with the settings that it had. Raises `Retry`."""
        await self._alone(lambda: self._take_back(loan))

    async def take_back_lost(self) -> None:
        """Take back what is in no living namespace any more, and what could not be taken back before."""
        for loan in self.loans.all():
            if loan.returning or not lives(loan):
                await self.try_take_back(loan)

    async def try_take_back(self, loan: Loan) -> None:
        """Take back, or leave it to the next look."""
        try:
            await self.take_back(loan)
        except Retry as trouble:
            log.warning("nic.take-back-later", device=loan.nic.device, pod=loan.pod, reason=trouble.reason)

    async def readdress(self, record: LeaseRecord, *, held: bool) -> None:
        """Let the interface in the pod have its address until its lease ends, or take it off.

        Raises `OSError`.
        """
        await self._alone(lambda: self._readdress(record, held=held))

    async def end_leases(self, claim: str) -> None:
        """Forget the leases of a claim whose NICs are back. Its servers are told, as far as that goes."""
        for record in self.leases.of_claim(claim):
            self.leases.drop(record)
            if record.lease.outlook not in LOST and not self._has_another(record):
                await asyncio.to_thread(_release, record)

    def _has_another(self, record: LeaseRecord) -> bool:
        """Whether the server has given the same address to the same NIC for another claim meanwhile."""
        mac, address = record.lease.mac, record.lease.grant.address
        return any(one.lease.mac == mac and one.lease.grant.address == address for one in self.leases.all())

    async def _alone(self, work: Callable[[], T]) -> T:
        """A move that was begun is ended, also when nobody waits for it any more."""

        async def turn() -> T:
            async with self._turn:
                return await asyncio.to_thread(work)

        return await asyncio.shield(asyncio.create_task(turn()))

    def _lend(self, claim: str, pod: str, nic: Held, netns: Path) -> Attached:
        here = identity(netns)
        if here is None:
            raise Refused(f"pod {pod} has no network namespace at {netns}")
        known = self.loans.get(claim, nic.device)
        if known is not None and (known.netns_id != here or known.returning):
            self._take_back(known)
        elif known is not None and known.attached is not None:
            return known.attached
        loan = Loan(
            claim=claim,
            pod=pod,
            nic=nic,
            netns=str(netns),
            netns_id=here,
            boot_id=self.loans.boot_id,
        )
        self.loans.put(loan)
        self._check_free(loan)
        self._check_lease(loan)
        return self._attach(loan, netns)

    def _attach(self, loan: Loan, netns: Path) -> Attached:
        nic = loan.nic
        attached = Attached(name="", mac=None, addresses=())
        try:
            if nic.identity is not None and nic.pod is not None:
                attached = moving.attach(nic.identity, nic.pod, netns)
            if nic.rdma is not None and nic.moves_rdma:
                rdma.push(nic.rdma, netns)
        except OSError as error:
            self._undo(loan)
            raise Refused(
                f"NIC {nic.device} was not attached to pod {loan.pod}: {_told(error)}",
                nearest_fix=fix_of(error),
            ) from error
        self.loans.put(msgspec.structs.replace(loan, attached=attached))
        return attached

    def _check_free(self, loan: Loan) -> None:
        """What the node has come to need since it was prepared stays as it is: nothing of it is restored."""
        try:
            self._check(loan.nic)
        except Refused:
            self.loans.drop(loan)
            raise
        except OSError as error:
            self.loans.drop(loan)
            raise Refused(
                f"NIC {loan.nic.device} was not attached to pod {loan.pod}: the node's interfaces cannot be"
                f" read: {_told(error)}",
                nearest_fix=fix_of(error),
            ) from error

    def _check_lease(self, loan: Loan) -> None:
        """An address whose lease is lost may be another's by now."""
        record = self.leases.get(loan.claim, loan.nic.device)
        if record is not None and record.lease.outlook in LOST:
            self._undo(loan)
            raise Refused(
                f"NIC {loan.nic.device} was not attached to pod {loan.pod}: the DHCP lease of"
                f" {record.lease.grant.address} is {record.lease.outlook}",
                nearest_fix="delete the pod, so that another address is asked for",
            )

    def _readdress(self, record: LeaseRecord, *, held: bool) -> None:
        """Where the interface is in no pod (any more), there is nothing to do."""
        loan, nic = self.loans.get(record.ref.uid, record.nic.device), record.nic
        if loan is None or loan.attached is None or loan.returning or not lives(loan):
            return
        if nic.identity is None or nic.pod is None:
            return
        address, until = record.lease.grant.address, record.lease.until if held else None
        seconds = 0 if until is None else seconds_left(until, dhcp.boot_seconds())
        found = moving.readdress(nic.identity, nic.pod, Path(loan.netns), address, seconds)
        attached = msgspec.structs.replace(loan.attached, addresses=found)
        self.loans.put(msgspec.structs.replace(loan, attached=attached, address_until=until))

    def _undo(self, loan: Loan) -> None:
        try:
            self._take_back(loan)
        except Retry as trouble:
            log.warning("nic.take-back-later", device=loan.nic.device, pod=loan.pod, reason=trouble.reason)

    def _take_back(self, loan: Loan) -> None:
        """RDMA first: the interface that comes up has the devices looked at again."""
        if self.loans.get(loan.claim, loan.nic.device) is None:
            return
        self.loans.put(msgspec.structs.replace(loan, returning=True))
        netns = Path(loan.netns) if lives(loan) else None
        try:
            self._return(loan.nic, netns)
        except OSError as error:
            raise Retry(
                f"NIC {loan.nic.device} is not back from pod {loan.pod}: {_told(error)}", after=AGAIN_SECONDS
            ) from error
        self.loans.drop(loan)

    def _return(self, nic: Held, netns: Path | None) -> None:
        if nic.rdma is not None and nic.moves_rdma and netns is not None:
            rdma.pull(nic.rdma, netns)
        if nic.identity is None or nic.host is None:
            return
        if moving.detach(nic.identity, nic.host, netns):
            return
        if nic.identity.parent is not None or nic.identity.permanent_mac is not None:
            raise FileNotFoundError(f"interface {nic.identity.name} is in a namespace that is not known")
        log.info("nic.gone", device=nic.device, reason="a virtual interface ends with its namespace")


def seconds_left(until: float, now: float) -> int:
    """For the kernel, which counts whole seconds and none as never: whatever is left is one at least."""
    return max(0, min(math.ceil(until - now), MOST_SECONDS))


def lives(loan: Loan) -> bool:
    """Whether the namespace that the loan is for is still there."""
    return identity(Path(loan.netns)) == loan.netns_id


def _release(record: LeaseRecord) -> None:
    """Without it the server keeps the address until the lease ends."""
    try:
        if record.nic.identity is not None:
            link = moving.name_in(record.nic.identity, OWN)
            inside(OWN, lambda: dhcp.release(link, record.lease))
    except OSError as error:
        log.warning("nic.lease-not-released", device=record.nic.device, reason=_told(error))


def _told(error: OSError) -> str:
    return error.strerror or str(error)
