"""Lending NICs to pods and taking them back, whatever happened in between."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from rackloom.claim.node.nic import moving, rdma
from rackloom.claim.node.nic.fixes import fix_of
from rackloom.claim.node.nic.loans import Held, Loan, Loans
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.nic.namespaces import identity
from rackloom.errors import Refused, Retry

T = TypeVar("T")
log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0


class Lender:
    """Carries out loans, one at a time: the kernel has one lock for all links anyway."""

    def __init__(self, loans: Loans) -> None:
        self.loans = loans
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
            if loan.returning or not _lives(loan):
                await self.try_take_back(loan)

    async def try_take_back(self, loan: Loan) -> None:
        """Take back, or leave it to the next look."""
        try:
            await self.take_back(loan)
        except Retry as trouble:
            log.warning("nic.take-back-later", device=loan.nic.device, pod=loan.pod, reason=trouble.reason)

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
        netns = Path(loan.netns) if _lives(loan) else None
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


def _lives(loan: Loan) -> bool:
    return identity(Path(loan.netns)) == loan.netns_id


def _told(error: OSError) -> str:
    return error.strerror or str(error)
