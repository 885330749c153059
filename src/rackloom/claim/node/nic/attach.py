"""Attaching NICs to pod sandboxes and bringing them back, even after a crash or a failure.

The container runtime reports sandboxes over NRI (`NicSandboxHooks`). When a sandbox has its network
namespace and no container yet, the NICs of the pod's prepared claims move in. An error fails the pod, and
kubelet tries again. When the sandbox stops, they move back. After a restart of the runtime or the plugin,
`plan_attachments` compares prepared claims, attachments and living sandboxes: a NIC whose pod lives
belongs in its sandbox, every other one on the host.

`AttachmentManager` does the moves, one at a time, since the kernel has one lock for all links. For each
attachment:

1. Write the `Attachment` to disk. It names the namespace by path and inode: the path may later be another
   namespace.
2. Check that the NIC may leave the host (the default route may have come to it since it was prepared) and
   that its DHCP lease is not lost.
3. Move the interface, then the RDMA device in exclusive mode.
4. Record the outcome.

If the claim requests a child of the NIC (IPVLAN, MACVLAN), step 3 makes the child in the pod, and the NIC
stays as it is on the host.

`detach` marks the record as returning, moves RDMA device and interface (or deletes the child), restores the
host's settings, and deletes the record. A failure of step 3 is undone at once, or later by `detach_lost`. A
cancelled caller does not interrupt a move.

Invariant: while any part of a NIC may be away from the host, its record is on disk. A crash is therefore safe
between any two steps. After step 1 nothing was moved, and detaching finds the NIC on the host. After step 3
the record names the namespace from which to fetch it. While a record is returning, only detaching goes on.

`fix_of` turns the kernel's error number into a remedy for an operator or tenant.
"""

import asyncio
import errno
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from rackloom.claim.node.nic import links, rdma
from rackloom.claim.node.nic.leases import LeaseRecord, LeaseStore, boot_seconds
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, in_namespace, namespace_id
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.claim.node.storage import BootScopedFiles
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.nics.attachment import AttachedLink, Attachment, LinkIdentity, LinkSettings, PreparedNic
from rackloom.core.nics.lease import LOST_STATES
from rackloom.errors import Refused, Retry

# Remedies for the kernel's errors.


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
    """The nearest fix for an error of the kernel."""
    return _FIXES.get(error.errno or 0, DEFAULT_FIX)


# Attachments on disk.


class AttachmentStore(BootScopedFiles[Attachment]):
    """The attachments of this boot. A reboot ends all pods, and the kernel recreates all links."""

    shape = Attachment


AttachOutcome = AttachedLink | Refused | Retry
"""How a NIC is in the pod, or why it is not."""
ReportOutcome = Callable[[ClaimRef, PreparedNic, PodSandbox, AttachOutcome], None]
"""Reports the outcome of one attachment. Must not raise, and must not block."""


# The attachment manager.


T = TypeVar("T")
log = structlog.get_logger(__name__)

RETURN_RETRY_SECONDS = 1.0
MOST_ADDRESS_SECONDS = 2**32 - 2
"""The longest lifetime of an address that the kernel counts down: 2^32 - 1 means for ever."""


@dataclass(eq=False)
class AttachmentManager:
    """Moves NICs into pods and back, one at a time: the kernel has one lock for all links anyway."""

    attachments: AttachmentStore
    leases: LeaseStore
    check: Callable[[PreparedNic], None]
    """Raises `Refused` for a NIC that must stay on the host, and `OSError`."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def attach(self, claim: str, pod: str, nic: PreparedNic, netns: Path) -> AttachedLink:
        """Bring a NIC into the pod's namespace, or find it there.

        Raises `Refused` if the kernel refuses. The NIC is then back on the host, or on its way.
        """
        return await self._run_alone(lambda: self._attach(claim, pod, nic, netns))

    async def detach(self, attachment: Attachment) -> None:
        """Bring a NIC back to the host, with the settings that it had. Raises `Retry`."""
        await self._run_alone(lambda: self._detach(attachment))

    async def try_detach(self, attachment: Attachment) -> None:
        """Detach, or leave it to `detach_lost`."""
        await self._run_alone(lambda: self._undo(attachment))

    async def detach_lost(self) -> None:
        """Detach NICs that are in no living namespace any more, and those that failed to detach before."""
        for attachment in self.attachments.all():
            if attachment.returning or not namespace_lives(attachment):
                await self.try_detach(attachment)

    async def set_address(self, record: LeaseRecord, *, held: bool) -> None:
        """Give the interface in the pod its address until its lease ends, or remove the address.

        Raises `OSError`.
        """
        await self._run_alone(lambda: self._set_address(record, held=held))

    async def release_leases(self, claim: str) -> None:
        """Forget a claim's leases once its NICs are back, and release them at their servers if possible."""
        for record in self.leases.of_claim(claim):
            self.leases.drop(record)
            await self.release(record)

    async def release(self, record: LeaseRecord) -> None:
        """Release a lease that is not recorded (any more) at its server, if possible."""
        mac, address = record.lease.mac, record.lease.grant.address
        # The server may have given the same address to the same NIC for another claim since.
        is_reused = any(
            kept.lease.mac == mac and kept.lease.grant.address == address for kept in self.leases.all()
        )
        if record.lease.state not in LOST_STATES and not is_reused:
            await asyncio.to_thread(_release_record, record)

    async def _run_alone(self, work: Callable[[], T]) -> T:
        """Run a move to its end, even if its caller is cancelled during the move."""

        async def locked() -> T:
            async with self._lock:
                return await asyncio.to_thread(work)

        return await asyncio.shield(asyncio.create_task(locked()))

    def _attach(self, claim: str, pod: str, nic: PreparedNic, netns: Path) -> AttachedLink:
        netns_id = namespace_id(netns)
        if netns_id is None:
            raise Refused(f"pod {pod} has no network namespace at {netns}")
        known = self.attachments.get(claim, nic.device)
        if known is not None and (known.netns_id != netns_id or known.returning):
            # The sandbox was replaced, or an earlier detach was cut off: begin again from the host.
            self._detach(known)
        elif known is not None and known.attached is not None:
            return known.attached
        attachment = Attachment(
            claim=claim,
            pod=pod,
            nic=nic,
            netns=str(netns),
            netns_id=netns_id,
            boot_id=self.attachments.boot_id,
        )
        # Before the first call of the kernel: whatever happens next is undone from this record.
        self.attachments.put(attachment)
        self._check_free(attachment)
        self._check_lease(attachment)
        attached = AttachedLink(name="", mac=None, addresses=())
        try:
            if nic.identity is not None and nic.pod is not None:
                attached = (
                    links.attach_link(nic.identity, nic.pod, netns)
                    if nic.over is None
                    else links.attach_child(nic.over, nic.identity, nic.pod, netns)
                )
            if nic.rdma is not None and nic.moves_rdma:
                rdma.push_rdma_device(nic.rdma, netns)
        except OSError as error:
            self._undo(attachment)
            raise _not_attached(attachment, error) from error
        self.attachments.put(msgspec.structs.replace(attachment, attached=attached))
        return attached

    def _check_free(self, attachment: Attachment) -> None:
        """Check that the node has not come to need the NIC since it was prepared.

        The record is dropped without detaching: the settings of the NIC may be new ones, which must stay.
        """
        try:
            self.check(attachment.nic)
        except Refused:
            self.attachments.drop(attachment)
            raise
        except OSError as error:
            self.attachments.drop(attachment)
            raise _not_attached(attachment, error, "the node's interfaces cannot be read: ") from error

    def _check_lease(self, attachment: Attachment) -> None:
        """Check that the address is still leased: otherwise another machine may use it by now."""
        record = self.leases.get(attachment.claim, attachment.nic.device)
        if record is not None and record.lease.state in LOST_STATES:
            self._undo(attachment)
            raise Refused(
                f"NIC {attachment.nic.device} was not attached to pod {attachment.pod}: the DHCP lease of"
                f" {record.lease.grant.address} is {record.lease.state}",
                nearest_fix="delete the pod, so that another address is asked for",
            )

    def _set_address(self, record: LeaseRecord, *, held: bool) -> None:
        """Does nothing if the interface is in no pod (any more)."""
        attachment, nic = self.attachments.get(record.claim, record.nic.device), record.nic
        if attachment is None or attachment.attached is None or attachment.returning:
            return
        if not namespace_lives(attachment) or nic.identity is None or nic.pod is None:
            return
        address, until = record.lease.grant.address, record.lease.until if held else None
        seconds = 0 if until is None else seconds_left(until, boot_seconds())
        found = links.set_link_address(nic.identity, nic.pod, Path(attachment.netns), address, seconds)
        attached = msgspec.structs.replace(attachment.attached, addresses=found)
        self.attachments.put(msgspec.structs.replace(attachment, attached=attached, address_until=until))

    def _undo(self, attachment: Attachment) -> None:
        """Detach. If that fails, the attachment stays marked as returning, and `detach_lost` tries again."""
        try:
            self._detach(attachment)
        except Retry as retry:
            device = attachment.nic.device
            log.warning("nic.take-back-later", device=device, pod=attachment.pod, reason=retry.reason)

    def _detach(self, attachment: Attachment) -> None:
        nic = attachment.nic
        if self.attachments.get(attachment.claim, nic.device) is None:
            return
        self.attachments.put(msgspec.structs.replace(attachment, returning=True))
        netns = Path(attachment.netns) if namespace_lives(attachment) else None
        try:
            # RDMA first: the interface that comes up makes the plugin read the devices again.
            if nic.rdma is not None and nic.moves_rdma and netns is not None:
                rdma.pull_rdma_device(nic.rdma, netns)
            if nic.over is not None and nic.identity is not None and netns is not None:
                links.remove_child(nic.identity, netns)
            if nic.identity is not None and nic.host is not None:
                self._return_link(nic, nic.identity, nic.host, netns)
        except OSError as error:
            raise Retry(
                f"NIC {nic.device} is not back from pod {attachment.pod}: {_error_message(error)}",
                after=RETURN_RETRY_SECONDS,
            ) from error
        self.attachments.drop(attachment)

    def _return_link(
        self, nic: PreparedNic, identity: LinkIdentity, host: LinkSettings, netns: Path | None
    ) -> None:
        if links.detach_link(identity, host, netns):
            return
        # The kernel returns hardware to the host when a namespace ends, so it must be in another one.
        if identity.parent is not None or identity.permanent_mac is not None:
            raise FileNotFoundError(f"interface {identity.name} is in a namespace that is not known")
        log.info("nic.gone", device=nic.device, reason="a virtual interface ends with its namespace")


def seconds_left(until: float, now: float) -> int:
    """Whole seconds for the kernel, rounded up: zero would mean that the address never ends."""
    return max(0, min(math.ceil(until - now), MOST_ADDRESS_SECONDS))


def namespace_lives(attachment: Attachment) -> bool:
    """Whether the namespace that the NIC was moved to is still there."""
    return namespace_id(Path(attachment.netns)) == attachment.netns_id


def _not_attached(attachment: Attachment, error: OSError, what: str = "") -> Refused:
    return Refused(
        f"NIC {attachment.nic.device} was not attached to pod {attachment.pod}:"
        f" {what}{_error_message(error)}",
        nearest_fix=fix_of(error),
    )


def _release_record(record: LeaseRecord) -> None:
    """Release a lease at its server, which would otherwise keep the address until the lease ends."""
    from rackloom.claim.node.nic import dhcp

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
    """The moves that bring every NIC to its place."""

    detach: tuple[Attachment, ...]
    attach: tuple[tuple[ReadyClaim, PreparedNic, PodSandbox], ...]


def plan_attachments(
    prepared: Collection[ReadyClaim], attachments: Collection[Attachment], living: Collection[PodSandbox]
) -> AttachmentPlan:
    """Plan to move the NICs of living pods' claims into the pods' sandboxes, and all others to the host."""
    namespaces = {(sandbox.pod, sandbox.netns) for sandbox in living}
    by_pod = {sandbox.pod: sandbox for sandbox in living if sandbox.netns}
    detach = tuple(
        attachment
        for attachment in attachments
        if (attachment.pod, attachment.netns) not in namespaces or attachment.returning
    )
    done = {kept.key for kept in attachments if kept not in detach and kept.attached is not None}
    attach = tuple(
        (claim, nic, by_pod[claim.pod])
        for claim in prepared
        if claim.pod in by_pod
        for nic in claim.nics
        if f"{claim.ref.uid}-{nic.device}" not in done
    )
    return AttachmentPlan(detach=detach, attach=attach)


@dataclass(eq=False)
class NicSandboxHooks:
    """The hooks that a container runtime calls.

    The runtime calls `run` after it has made the namespace and before it creates a container, so a container
    never sees its pod without its NICs. It calls `stop` while the namespace still exists, so the NICs can be
    fetched from it. Calls come one after the other, and `synchronize` comes first on every connection.
    """

    manager: AttachmentManager
    prepared: Mapping[str, ReadyClaim]
    report: ReportOutcome

    async def synchronize(self, living: tuple[PodSandbox, ...]) -> None:
        """Make up for calls that were missed while the runtime or the plugin was away."""
        present = [
            sandbox for sandbox in living if sandbox.netns and namespace_id(Path(sandbox.netns)) is not None
        ]
        plan = plan_attachments(self.prepared.values(), self.manager.attachments.all(), present)
        for attachment in plan.detach:
            await self.manager.try_detach(attachment)
        for claim, nic, sandbox in plan.attach:
            try:
                await self._attach(claim, nic, sandbox)
            except (Refused, Retry) as trouble:
                log.warning("nic.not-attached", device=nic.device, pod=claim.pod, reason=trouble.reason)

    async def run(self, sandbox: PodSandbox) -> None:
        """Attach the NICs of a new sandbox. Raises `Refused` or `Retry`: the pod fails."""
        for claim in tuple(self.prepared.values()):
            if claim.pod == sandbox.pod:
                for nic in claim.nics:
                    await self._attach(claim, nic, sandbox)

    async def stop(self, sandbox: PodSandbox) -> None:
        """Detach the NICs of a sandbox that is about to end. Never fails."""
        for attachment in self.manager.attachments.all():
            if attachment.pod == sandbox.pod and attachment.netns == sandbox.netns:
                await self.manager.try_detach(attachment)

    async def _attach(self, claim: ReadyClaim, nic: PreparedNic, sandbox: PodSandbox) -> None:
        try:
            if not sandbox.netns:
                raise Refused(
                    f"pod {sandbox.namespace}/{sandbox.name} is in the host's network,"
                    f" as NIC {nic.device} is",
                    nearest_fix="remove hostNetwork from the pod, or the claim",
                )
            attached = await self.manager.attach(claim.ref.uid, claim.pod, nic, Path(sandbox.netns))
        except (Refused, Retry) as trouble:
            self.report(claim.ref, nic, sandbox, trouble)
            raise
        self.report(claim.ref, nic, sandbox, attached)
