"""Reporting NICs: the claim's status, events on the pod, and a counter of attachments.

`claim_status` builds `status.devices` of a ResourceClaim for all NICs of a claim at once, since
server-side apply removes the fields that are left out. Conditions and network data are those of DRANET,
except `DHCPLeaseReady`, which is Rackloom's. A NIC without its leased address is attached but not ready. If
the last request of a lease was not answered, the lease is Unknown, not False.

Status writes and events run in the background, one status at a time, with a time limit: a container
runtime does not wait for an API server. `AttachmentReporter` reports attachments, `LeaseReporter` the
state of leases.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog
from prometheus_client import Counter

from rackloom.claim.kube.api import EventRecorder, KubeApi, KubeError
from rackloom.claim.node.nic.attach import AttachmentStore, AttachOutcome
from rackloom.claim.node.nic.leases import LeaseRecord
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.claim.node.tasks import TaskSet
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import RESOURCE_CLAIM, EventNotice, Object, metav1_time
from rackloom.core.nics.attachment import AttachedLink, Attachment, PreparedNic
from rackloom.core.nics.lease import LOST_STATES, DhcpLease, LeaseState

# A lease's state in words.


WallTimeOf = Callable[[float], float]
"""Seconds since the epoch for a time of the boot clock."""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lease's condition and Event."""

    holds: str
    """`True`, `False` or `Unknown`."""
    reason: str
    message: str
    lost: bool


def lease_status(lease: DhcpLease, wall_of: WallTimeOf) -> LeaseStatus:
    """The state of a lease, and since when."""
    address, end = lease.grant.address, metav1_time(wall_of(lease.until))
    match lease.state:
        case LeaseState.HELD:
            holds, reason = "True", "DHCPLeaseHeld"
            message = f"{address} is held: server {lease.grant.server} gave it"
        case LeaseState.SILENT:
            # Unknown and not False: the address is usable, but it is open whether it will be prolonged.
            holds, reason = "Unknown", "DHCPRenewalFailed"
            since = metav1_time(wall_of(lease.silent_since or lease.asked_at))
            message = f"{address} is held until {end}; no DHCP server has answered since {since}"
        case LeaseState.EXPIRED:
            holds, reason = "False", "DHCPLeaseExpired"
            message = (
                f"the lease of {address} ended at {end}, and no DHCP server has prolonged it; delete the pod"
            )
        case LeaseState.REFUSED:
            holds, reason = "False", "DHCPLeaseRefused"
            message = f"a DHCP server refused to prolong {address}; delete the pod, so that it gets another"
    return LeaseStatus(holds=holds, reason=reason, message=message, lost=lease.state in LOST_STATES)


# The claim's status.


log = structlog.get_logger(__name__)

STATUS_MANAGER = "dra.net"
STATUS_SECONDS = 10.0
READY, NETWORK_READY, RDMA_READY, SLAAC_READY = "Ready", "NetworkReady", "RDMALinkReady", "SLAACReady"
DHCP_READY = "DHCPLeaseReady"
"""Rackloom's: DRANET does not renew leases and reports nothing about them."""

StatusOutcome = AttachedLink | str
"""The outcome of an attachment: how the NIC is in the pod, or why it is not."""


def claim_status(
    ref: ClaimRef,
    pool: str,
    outcomes: Mapping[str, tuple[PreparedNic, StatusOutcome]],
    leases: Mapping[str, LeaseStatus],
    now: float,
) -> Object:
    """Our fields for all NICs of a claim at once: server-side apply removes the fields that are left out.

    `leases` are by device.
    """
    devices = [
        _device_status(nic, outcome, leases.get(nic.device), pool, now) for nic, outcome in outcomes.values()
    ]
    return {
        "apiVersion": RESOURCE_CLAIM.api_version,
        "kind": RESOURCE_CLAIM.kind,
        "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid},
        "status": {"devices": devices},
    }


@dataclass(eq=False)
class StatusWriter:
    """Writes statuses in the background: a container runtime does not wait for an API server."""

    api: KubeApi
    pool: str
    attachments: AttachmentStore
    leases: Callable[[str], Mapping[str, LeaseStatus]]
    """The leases of a claim (UID), by device."""
    wall: Callable[[], float]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _tasks: TaskSet = field(default_factory=TaskSet, init=False)

    def write(self, ref: ClaimRef, nic: PreparedNic, outcome: StatusOutcome) -> None:
        """Begin to write the outcome of an attachment."""
        self._tasks.start(self._write(ref, nic, outcome))

    async def _write(self, ref: ClaimRef, nic: PreparedNic, outcome: StatusOutcome) -> None:
        """One at a time, so that the last write contains all outcomes."""
        async with self._lock:
            outcomes: dict[str, tuple[PreparedNic, StatusOutcome]] = {
                attachment.nic.device: (attachment.nic, attachment.attached)
                for attachment in self.attachments.of_claim(ref.uid)
                if attachment.attached is not None
            }
            outcomes |= {nic.device: (nic, outcome)}
            status = claim_status(ref, self.pool, outcomes, self.leases(ref.uid), self.wall())
            try:
                async with asyncio.timeout(STATUS_SECONDS):
                    await self.api.apply(
                        RESOURCE_CLAIM, status, manager=STATUS_MANAGER, force=True, subresource="status"
                    )
            except (KubeError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
                log.warning("nic.status-not-written", claim=ref.name, reason=reason)


def _device_status(
    nic: PreparedNic, outcome: StatusOutcome, lease: LeaseStatus | None, pool: str, now: float
) -> Object:
    status: Object = {
        "driver": STATUS_MANAGER,
        "pool": pool,
        "device": nic.device,
        "conditions": _conditions(nic, outcome, lease, metav1_time(now)),
    }
    if isinstance(outcome, AttachedLink) and outcome.name:
        status["networkData"] = {"interfaceName": outcome.name, "ips": list(outcome.addresses)}
        if outcome.mac is not None:
            status["networkData"]["hardwareAddress"] = outcome.mac
    if nic.rdma is not None:
        status["data"] = {"rdmaDevice": nic.rdma}
    return status


def _conditions(nic: PreparedNic, outcome: StatusOutcome, lease: LeaseStatus | None, at: str) -> list[Any]:
    """A NIC without its leased address is attached, but not ready."""
    reason = "RDMAOnlyDeviceReady" if nic.identity is None else "NetworkDeviceReady"
    value = ("True", reason, "")
    if lease is not None and lease.lost:
        value = ("False", lease.reason, lease.message)
    if isinstance(outcome, str):
        value = ("False", "AttachFailed", outcome)
    applies = {
        READY: True,
        NETWORK_READY: nic.identity is not None,
        SLAAC_READY: nic.pod is not None and nic.pod.autoconfigures,
        RDMA_READY: nic.moves_rdma,
    }
    found = [(kind, *value) for kind, is_so in applies.items() if is_so]
    if lease is not None:
        found.append((DHCP_READY, lease.holds, lease.reason, lease.message))
    fields = ("type", "status", "reason", "message", "lastTransitionTime")
    return [dict(zip(fields, (*condition, at), strict=True)) for condition in found]


# Outcomes of attachments.


NETWORK_FAILED, RDMA_FAILED = "NetworkDeviceAttachFailed", "RDMADeviceAttachFailed"
"""Reasons of the events, as DRANET has them."""
ATTACHMENT_KINDS = ("network", "rdma")


WriteStatus = Callable[[ClaimRef, PreparedNic, StatusOutcome], None]
"""Begins to write the claim's status in the background."""


class AttachmentReporter:
    """Reports attachments to the claim's status, the pod's events and the metrics."""

    def __init__(self, write_status: WriteStatus, events: EventRecorder) -> None:
        self._write_status = write_status
        self._events = events
        self._tasks = TaskSet()
        by_kind = ("kind", "outcome")
        self.attachments = Counter(
            "rackloom_nic_attachments", "NICs that were to come into pods", by_kind, registry=None
        )
        """To be registered with the plugin's registry."""
        for kind in ATTACHMENT_KINDS:
            for outcome in ("attached", "failed"):
                self.attachments.labels(kind, outcome)

    def report(self, ref: ClaimRef, nic: PreparedNic, sandbox: PodSandbox, outcome: AttachOutcome) -> None:
        """Report the outcome of one attachment."""
        is_rdma_only = nic.identity is None
        attached = isinstance(outcome, AttachedLink)
        kind = "rdma" if is_rdma_only else "network"
        self.attachments.labels(kind, "attached" if attached else "failed").inc()
        self._write_status(ref, nic, outcome if isinstance(outcome, AttachedLink) else str(outcome))
        if not attached:
            reason = RDMA_FAILED if is_rdma_only else NETWORK_FAILED
            pod = _pod_reference(sandbox.namespace, sandbox.name, sandbox.pod)
            self._tasks.start(self._events.record(pod, EventNotice(True, reason, str(outcome))))


def _pod_reference(namespace: str, name: str, uid: str) -> Object:
    """As much of a pod as an Event needs."""
    metadata = {"namespace": namespace, "name": name, "uid": uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


# States of leases.


class ReportLease(Protocol):
    """Reports the state of a lease. Must not raise."""

    async def __call__(self, record: LeaseRecord, attachment: Attachment | None, *, is_new: bool) -> None:
        """Its state changed (`is_new`), or its address came or went."""


@dataclass(eq=False)
class LeaseReporter:
    """Reports leases to the claim's status and the pod's events."""

    write_status: WriteStatus
    events: EventRecorder
    wall_of: WallTimeOf

    async def report(self, record: LeaseRecord, attachment: Attachment | None, *, is_new: bool) -> None:
        """Report a lease. A NIC that is in no pod has no status."""
        if attachment is not None and attachment.attached is not None:
            self.write_status(record.ref, record.nic, attachment.attached)
        if is_new:
            now = lease_status(record.lease, self.wall_of)
            pod = _pod_reference(record.ref.namespace, record.pod_name, record.pod)
            await self.events.record(pod, EventNotice(now.holds != "True", now.reason, now.message))
