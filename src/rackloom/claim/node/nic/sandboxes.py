"""What happens to pods' sandboxes, and what it means for the NICs of their claims."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec
import structlog

from rackloom.claim.node.nic.lender import Lender
from rackloom.claim.node.nic.loans import Held, Loan
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.nic.namespaces import identity
from rackloom.claim.node.nic.telling import Telling
from rackloom.claim.node.nri.hooks import Sandbox
from rackloom.claim.node.values import ClaimRef
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that is ready for the pod `pod` (UID)."""

    ref: ClaimRef
    pod: str
    nics: tuple[Held, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do so that every NIC is where it belongs."""

    back: tuple[Loan, ...]
    lend: tuple[tuple[Prepared, Held, Sandbox], ...]


def plan(prepared: Collection[Prepared], loans: Collection[Loan], living: Collection[Sandbox]) -> Plan:
    """NICs of claims whose pods live belong into the pods' sandboxes, all others to the host."""
    netns = {(one.pod, one.netns) for one in living}
    by_pod = {one.pod: one for one in living if one.netns}
    back = tuple(loan for loan in loans if (loan.pod, loan.netns) not in netns or loan.returning)
    settled = {loan.key for loan in loans if loan not in back and loan.attached is not None}
    lend = (
        (claim, nic, by_pod[claim.pod])
        for claim in prepared
        if claim.pod in by_pod
        for nic in claim.nics
        if f"{claim.ref.uid}-{nic.device}" not in settled
    )
    return Plan(back=back, lend=tuple(lend))


class Sandboxes:
    """The hooks that a container runtime calls."""

    def __init__(self, lender: Lender, prepared: Mapping[str, Prepared], told: Telling) -> None:
        self._lender = lender
        self._prepared = prepared
        self._told = told

    async def synchronize(self, living: tuple[Sandbox, ...]) -> None:
        """After a restart of the runtime or of the plugin: make up for what was missed."""
        present = [one for one in living if one.netns and identity(Path(one.netns)) is not None]
        todo = plan(self._prepared.values(), self._lender.loans.all(), present)
        for loan in todo.back:
            await self._lender.try_take_back(loan)
        for claim, nic, sandbox in todo.lend:
            try:
                await self._attach(claim, nic, sandbox)
            except (Refused, Retry) as trouble:
                log.warning("nic.not-attached", device=nic.device, pod=claim.pod, reason=trouble.reason)

    async def run(self, sandbox: Sandbox) -> None:
        """A sandbox has its namespace, and no container yet. Raises `Refused` or `Retry`: the pod fails."""
        for claim in self._of(sandbox):
            for nic in claim.nics:
                await self._attach(claim, nic, sandbox)

    async def stop(self, sandbox: Sandbox) -> None:
        """A sandbox is about to end; never fails."""
        for loan in self._lender.loans.all():
            if loan.pod == sandbox.pod and loan.netns == sandbox.netns:
                await self._lender.try_take_back(loan)

    def _of(self, sandbox: Sandbox) -> Iterator[Prepared]:
        return (one for one in tuple(self._prepared.values()) if one.pod == sandbox.pod)

    async def _attach(self, claim: Prepared, nic: Held, sandbox: Sandbox) -> None:
        try:
            attached = await self._lend(claim, nic, sandbox)
        except (Refused, Retry) as trouble:
            self._told(claim.ref, nic, sandbox, trouble)
            raise
        self._told(claim.ref, nic, sandbox, attached)

    async def _lend(self, claim: Prepared, nic: Held, sandbox: Sandbox) -> Attached:
        if not sandbox.netns:
            raise Refused(
                f"pod {sandbox.namespace}/{sandbox.name} is in the host's network, as NIC {nic.device} is",
                nearest_fix="remove hostNetwork from the pod, or the claim",
            )
        return await self._lender.lend(claim.ref.uid, claim.pod, nic, Path(sandbox.netns))
