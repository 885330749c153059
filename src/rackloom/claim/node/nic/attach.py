"""Attaching NICs to pod sandboxes and bringing them back, whatever happens in between.

The container runtime reports sandboxes over NRI (`NicSandboxHooks`). When a sandbox has its network
namespace and no container yet, the NICs of the pod's prepared claims move in; an error fails the pod, and
kubelet tries again. When the sandbox stops, they move back. After a restart of the runtime or the plugin,
`plan_attachments` compares prepared claims, attachments and living sandboxes: a NIC whose pod lives
belongs into its sandbox, every other one on the host.

`AttachmentManager` does the moves, one at a time, since the kernel has one lock for all links. For each
attachment:

1. Write the `Attachment` to disk. It names the namespace by path and inode: the path may later be another
   namespace.
2. Check that the NIC may leave the host (the default route may have come to it since it was prepared) and
   that its DHCP lease is not lost.
3. Move the interface, then the RDMA device in exclusive mode.
4. Record the outcome.

Taking back marks the record as returning, moves RDMA device and interface, restores the host's settings,
and deletes the record. A failure of step 3 is undone at once, or by a later look. A cancelled caller does
not interrupt a move.

Invariant: while anything of a NIC may be away from the host, its record is on disk.

`fix_of` turns the kernel's error number into what an operator or tenant can do.
"""

import asyncio
import errno
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import structlog

from rackloom.claim.node.checkpoint import BootScopedFiles
from rackloom.claim.node.nic import dhcp, links, rdma
from rackloom.claim.node.nic.dhcp import LeaseRecord, LeaseStore
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, in_namespace, namespace_id
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.claim.node.plugin import ClaimRef
from rackloom.core.nics.attachment import AttachedLink, Attachment, PreparedNic
from rackloom.core.nics.lease import LOST_STATES
from rackloom.errors import Refused, Retry

# What to do about the kernel's errors.


_GATEWAY = "name a gateway within interface.addresses, or add a route of scope 253 (link) to it before"
_MISSING = "look on the node whether its driver still shows the interface (ip link, rdma link)"
_UNSUPPORTED = "take that setting out of the NetworkConfig: this kernel or this device does not have it"
_VALUE = "ask for a value that the device takes: `ip -details link` on the node shows its limits"
_FIXES: Mapping[int, str] = {
    errno.EEXIST: "choose another interface.name: the pod has an interface of that name",
    errno.ENETUNREACH: _GATEWAY,
    errno.EHOSTUNREACH: _GATEWAY,
    errno.ENOENT: _MISSING,
    errno.ENODEV: _MISSING,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.EINVAL: _VALUE,
    errno.ERANGE: _VALUE,
    errno.EPERM: "run the plugin with the capabilities of deploy/kubernetes/base/node-nic.yaml",
    errno.EACCES: "run the plugin with the capabilities of deploy/kubernetes/base/node-nic.yaml",
    errno.EBUSY: "stop what uses the device on the node: a bond, a bridge, or a program",
    errno.ETIMEDOUT: "see whether the network's router answers on this NIC, or give interface.addresses",
}
DEFAULT_FIX = "see the plugin's log on the node; kubelet tries again by itself"


def fix_of(error: OSError) -> str:
    """The nearest fix for what the kernel said."""
    return _FIXES.get(error.errno or 0, DEFAULT_FIX)


# Attachments on disk.


class AttachmentStore(BootScopedFiles[Attachment]):
    """The loans of this boot. After another one there are no pods, and the kernel has made all links anew."""

    def __init__(self, root: Path, boot_id: str) -> None:
        super().__init__(root, boot_id, Attachment)

    def get(self, claim: str, device: str) -> Attachment | None:
        """The loan of one device to one claim."""
        return self._known.get(f"{claim}-{device}")

    def of_claim(self, claim: str) -> tuple[Attachment, ...]:
        """All loans of a claim."""
        return tuple(one for one in self._known.values() if one.claim == claim)


# Whom to report outcomes to.


AttachOutcome = AttachedLink | Refused | Retry
"""How a NIC is in the pod, or why it is not."""


class ReportOutcome(Protocol):
    """Is told what came of an attachment. Must not raise, and must not take time."""

    def __call__(self, ref: ClaimRef, nic: PreparedNic, sandbox: PodSandbox, outcome: AttachOutcome) -> None:
        """One NIC of a claim is in the sandbox, or is not."""
        ...


# The attachment manager.


T = TypeVar("T")
log = structlog.get_logger(__name__)

RETURN_RETRY_SECONDS = 1.0
MOST_ADDRESS_SECONDS = 2**32 - 2
"""That the kernel counts for an address: one more is for ever."""


class AttachmentManager:
    """Carries out loans, one at a time: the kernel has one lock for all links anyway."""

    def __init__(
        self, loans: AttachmentStore, leases: LeaseStore, check: Callable[[PreparedNic], None]
    ) -> None:
        """`check` raises `Refused` for a NIC that must stay on the host, and `OSError`."""
        self.loans = loans
        self.leases = leases
        self._check = check
        self._turn = asyncio.Lock()

    async def lend(self, claim: str, pod: str, nic: PreparedNic, netns: Path) -> AttachedLink:
        """Bring a NIC into the pod's namespace, or find it there.

        Raises `Refused` when the kernel will not; the NIC is then back on the host, or on its way.
        """
        return await self._alone(lambda: self._lend(claim, pod, nic, netns))

    async def take_back(self, loan: Attachment) -> None:
        """Bring a NIC back to the host, with the settings that it had. Raises `Retry`."""
        await self._alone(lambda: self._take_back(loan))

    async def take_back_lost(self) -> None:
        """Take back what is in no living namespace any more, and what could not be taken back before."""
        for loan in self.loans.all():
            if loan.returning or not namespace_lives(loan):
                await self.try_take_back(loan)

    async def try_take_back(self, loan: Attachment) -> None:
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
            if record.lease.outlook not in LOST_STATES and not self._has_another(record):
                await asyncio.to_thread(_release_record, record)

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

    def _lend(self, claim: str, pod: str, nic: PreparedNic, netns: Path) -> AttachedLink:
        here = namespace_id(netns)
        if here is None:
            raise Refused(f"pod {pod} has no network namespace at {netns}")
        known = self.loans.get(claim, nic.device)
        if known is not None and (known.netns_id != here or known.returning):
            self._take_back(known)
        elif known is not None and known.attached is not None:
            return known.attached
        loan = Attachment(
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

    def _attach(self, loan: Attachment, netns: Path) -> AttachedLink:
        nic = loan.nic
        attached = AttachedLink(name="", mac=None, addresses=())
        try:
            if nic.identity is not None and nic.pod is not None:
                attached = links.attach_link(nic.identity, nic.pod, netns)
            if nic.rdma is not None and nic.moves_rdma:
                rdma.push_rdma_device(nic.rdma, netns)
        except OSError as error:
            self._undo(loan)
            raise Refused(
                f"NIC {nic.device} was not attached to pod {loan.pod}: {_error_message(error)}",
                nearest_fix=fix_of(error),
            ) from error
        self.loans.put(msgspec.structs.replace(loan, attached=attached))
        return attached

    def _check_free(self, loan: Attachment) -> None:
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
                f" read: {_error_message(error)}",
                nearest_fix=fix_of(error),
            ) from error

    def _check_lease(self, loan: Attachment) -> None:
        """An address whose lease is lost may be another's by now."""
        record = self.leases.get(loan.claim, loan.nic.device)
        if record is not None and record.lease.outlook in LOST_STATES:
            self._undo(loan)
            raise Refused(
                f"NIC {loan.nic.device} was not attached to pod {loan.pod}: the DHCP lease of"
                f" {record.lease.grant.address} is {record.lease.outlook}",
                nearest_fix="delete the pod, so that another address is asked for",
            )

    def _readdress(self, record: LeaseRecord, *, held: bool) -> None:
        """Where the interface is in no pod (any more), there is nothing to do."""
        loan, nic = self.loans.get(record.ref.uid, record.nic.device), record.nic
        if loan is None or loan.attached is None or loan.returning or not namespace_lives(loan):
            return
        if nic.identity is None or nic.pod is None:
            return
        address, until = record.lease.grant.address, record.lease.until if held else None
        seconds = 0 if until is None else seconds_left(until, dhcp.boot_seconds())
        found = links.readdress_link(nic.identity, nic.pod, Path(loan.netns), address, seconds)
        attached = msgspec.structs.replace(loan.attached, addresses=found)
        self.loans.put(msgspec.structs.replace(loan, attached=attached, address_until=until))

    def _undo(self, loan: Attachment) -> None:
        try:
            self._take_back(loan)
        except Retry as trouble:
            log.warning("nic.take-back-later", device=loan.nic.device, pod=loan.pod, reason=trouble.reason)

    def _take_back(self, loan: Attachment) -> None:
        """RDMA first: the interface that comes up has the devices looked at again."""
        if self.loans.get(loan.claim, loan.nic.device) is None:
            return
        self.loans.put(msgspec.structs.replace(loan, returning=True))
        netns = Path(loan.netns) if namespace_lives(loan) else None
        try:
            self._return(loan.nic, netns)
        except OSError as error:
            raise Retry(
                f"NIC {loan.nic.device} is not back from pod {loan.pod}: {_error_message(error)}",
                after=RETURN_RETRY_SECONDS,
            ) from error
        self.loans.drop(loan)

    def _return(self, nic: PreparedNic, netns: Path | None) -> None:
        if nic.rdma is not None and nic.moves_rdma and netns is not None:
            rdma.pull_rdma_device(nic.rdma, netns)
        if nic.identity is None or nic.host is None:
            return
        if links.detach_link(nic.identity, nic.host, netns):
            return
        if nic.identity.parent is not None or nic.identity.permanent_mac is not None:
            raise FileNotFoundError(f"interface {nic.identity.name} is in a namespace that is not known")
        log.info("nic.gone", device=nic.device, reason="a virtual interface ends with its namespace")


def seconds_left(until: float, now: float) -> int:
    """For the kernel, which counts whole seconds and none as never: whatever is left is one at least."""
    return max(0, min(math.ceil(until - now), MOST_ADDRESS_SECONDS))


def namespace_lives(loan: Attachment) -> bool:
    """Whether the namespace that the loan is for is still there."""
    return namespace_id(Path(loan.netns)) == loan.netns_id


def _release_record(record: LeaseRecord) -> None:
    """Without it the server keeps the address until the lease ends."""
    try:
        if record.nic.identity is not None:
            link = links.link_name_in(record.nic.identity, HOST_NAMESPACE)
            in_namespace(HOST_NAMESPACE, lambda: dhcp.release_lease(link, record.lease))
    except OSError as error:
        log.warning("nic.lease-not-released", device=record.nic.device, reason=_error_message(error))


def _error_message(error: OSError) -> str:
    return error.strerror or str(error)


# Reactions to pod sandboxes.


class ReadyClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that is ready for the pod `pod` (UID)."""

    ref: ClaimRef
    pod: str
    nics: tuple[PreparedNic, ...]


class AttachmentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do so that every NIC is where it belongs."""

    back: tuple[Attachment, ...]
    lend: tuple[tuple[ReadyClaim, PreparedNic, PodSandbox], ...]


def plan_attachments(
    prepared: Collection[ReadyClaim], loans: Collection[Attachment], living: Collection[PodSandbox]
) -> AttachmentPlan:
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
    return AttachmentPlan(back=back, lend=tuple(lend))


class NicSandboxHooks:
    """The hooks that a container runtime calls."""

    def __init__(
        self, lender: AttachmentManager, prepared: Mapping[str, ReadyClaim], told: ReportOutcome
    ) -> None:
        self._lender = lender
        self._prepared = prepared
        self._told = told

    async def synchronize(self, living: tuple[PodSandbox, ...]) -> None:
        """After a restart of the runtime or of the plugin: make up for what was missed."""
        present = [one for one in living if one.netns and namespace_id(Path(one.netns)) is not None]
        todo = plan_attachments(self._prepared.values(), self._lender.loans.all(), present)
        for loan in todo.back:
            await self._lender.try_take_back(loan)
        for claim, nic, sandbox in todo.lend:
            try:
                await self._attach(claim, nic, sandbox)
            except (Refused, Retry) as trouble:
                log.warning("nic.not-attached", device=nic.device, pod=claim.pod, reason=trouble.reason)

    async def run(self, sandbox: PodSandbox) -> None:
        """A sandbox has its namespace, and no container yet. Raises `Refused` or `Retry`: the pod fails."""
        for claim in self._of(sandbox):
            for nic in claim.nics:
                await self._attach(claim, nic, sandbox)

    async def stop(self, sandbox: PodSandbox) -> None:
        """A sandbox is about to end; never fails."""
        for loan in self._lender.loans.all():
            if loan.pod == sandbox.pod and loan.netns == sandbox.netns:
                await self._lender.try_take_back(loan)

    def _of(self, sandbox: PodSandbox) -> Iterator[ReadyClaim]:
        return (one for one in tuple(self._prepared.values()) if one.pod == sandbox.pod)

    async def _attach(self, claim: ReadyClaim, nic: PreparedNic, sandbox: PodSandbox) -> None:
        try:
            attached = await self._lend(claim, nic, sandbox)
        except (Refused, Retry) as trouble:
            self._told(claim.ref, nic, sandbox, trouble)
            raise
        self._told(claim.ref, nic, sandbox, attached)

    async def _lend(self, claim: ReadyClaim, nic: PreparedNic, sandbox: PodSandbox) -> AttachedLink:
        if not sandbox.netns:
            raise Refused(
                f"pod {sandbox.namespace}/{sandbox.name} is in the host's network, as NIC {nic.device} is",
                nearest_fix="remove hostNetwork from the pod, or the claim",
            )
        return await self._lender.lend(claim.ref.uid, claim.pod, nic, Path(sandbox.netns))
