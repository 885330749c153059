"""Reporting NICs: the claim's status, events on the pod, and a counter of attachments.

`claim_status` builds `status.devices` of a ResourceClaim for all NICs of a claim at once, since
server-side apply takes back what is left out. Conditions and network data are those of DRANET;
`DHCPLeaseReady` is Rackloom's. A NIC without its leased address is attached but not ready. A lease whose
last request was not answered is Unknown, not False.

Status writes and events run beside all other work, one status at a time, with a time limit: a container
runtime does not wait for an API server. `AttachmentReporter` reports attachments, `LeaseReporter` the
state of leases.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec
import structlog
from prometheus_client import Counter

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.events import EventRecorder, EventSeverity
from rackloom.claim.node.nic.attach import AttachmentStore, AttachOutcome
from rackloom.claim.node.nic.dhcp import LeaseRecord
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.claim.node.plugin import ClaimRef
from rackloom.core.kubernetes.objects import RESOURCE_CLAIM, Object, metav1_time
from rackloom.core.nics.attachment import AttachedLink, Attachment, PreparedNic
from rackloom.core.nics.lease import LOST_STATES, DhcpLease, LeaseState

# A lease's state in words.


WallTimeOf = Callable[[float], float]

_REASONS: Mapping[LeaseState, str] = {
    LeaseState.HELD: "DHCPLeaseHeld",
    LeaseState.SILENT: "DHCPRenewalFailed",
    LeaseState.EXPIRED: "DHCPLeaseExpired",
    LeaseState.REFUSED: "DHCPLeaseRefused",
}
_HOLDS: Mapping[LeaseState, str] = {LeaseState.HELD: "True", LeaseState.SILENT: "Unknown"}


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a condition and an Event say of a lease."""

    holds: str
    """`True`, `False` or `Unknown`."""
    reason: str
    message: str
    lost: bool


def lease_status(lease: DhcpLease, wall_of: WallTimeOf) -> LeaseStatus:
    """In which of the four ways it stands, and since when."""
    return LeaseStatus(
        holds=_HOLDS.get(lease.state, "False"),
        reason=_REASONS[lease.state],
        message=_lease_message(lease, wall_of),
        lost=lease.state in LOST_STATES,
    )


def _lease_message(lease: DhcpLease, wall_of: WallTimeOf) -> str:
    address, server, end = lease.grant.address, lease.grant.server, metav1_time(wall_of(lease.until))
    match lease.state:
        case LeaseState.HELD:
            return f"{address} is held: server {server} gave it"
        case LeaseState.SILENT:
            since = metav1_time(wall_of(lease.silent_since or lease.asked_at))
            return f"{address} is held until {end}; no DHCP server has answered since {since}"
        case LeaseState.EXPIRED:
            return (
                f"the lease of {address} ended at {end}, and no DHCP server has prolonged it; delete the pod"
            )
        case LeaseState.REFUSED:
            return f"a DHCP server refused to prolong {address}; delete the pod, so that it gets another"


# The claim's status.


log = structlog.get_logger(__name__)

STATUS_MANAGER = "dra.net"
STATUS_SECONDS = 10.0
READY, NETWORK_READY, RDMA_READY, SLAAC_READY = "Ready", "NetworkReady", "RDMALinkReady", "SLAACReady"
DHCP_READY = "DHCPLeaseReady"
"""Ours alone: DRANET does not renew leases, and tells nothing of them."""

StatusOutcome = AttachedLink | str
"""What became of an attachment: how the NIC is in the pod, or why it is not."""


def claim_status(
    ref: ClaimRef,
    pool: str,
    outcomes: Mapping[str, tuple[PreparedNic, StatusOutcome]],
    standings: Mapping[str, LeaseStatus],
    now: float,
) -> Object:
    """The fields that are ours, of all NICs of a claim at once: what is left out would be taken back.

    `standings` are those of leases, by device.
    """
    return {
        "apiVersion": RESOURCE_CLAIM.api_version,
        "kind": RESOURCE_CLAIM.kind,
        "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid},
        "status": {
            "devices": [
                _device_status(held, outcome, standings.get(held.device), pool, now)
                for held, outcome in outcomes.values()
            ],
        },
    }


class StatusWriter:
    """Writes statuses beside all other work: a runtime does not wait for an API server."""

    def __init__(
        self,
        api: KubeApi,
        pool: str,
        attachments: AttachmentStore,
        standings: Callable[[str], Mapping[str, LeaseStatus]],
        wall: Callable[[], float],
    ) -> None:
        self._api = api
        self._pool = pool
        self._loans = attachments
        self._standings = standings
        """How the leases of a claim (UID) stand, by device."""
        self._wall = wall
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()

    def told(self, ref: ClaimRef, nic: PreparedNic, outcome: StatusOutcome) -> None:
        """An attachment went well, or did not."""
        task = asyncio.create_task(self._write(ref, nic, outcome))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, ref: ClaimRef, nic: PreparedNic, outcome: StatusOutcome) -> None:
        """One at a time, so that the last one holds what all of them tell."""
        async with self._turn:
            outcomes: dict[str, tuple[PreparedNic, StatusOutcome]] = {
                attachment.nic.device: (attachment.nic, attachment.attached)
                for attachment in self._loans.of_claim(ref.uid)
                if attachment.attached is not None
            }
            outcomes |= {nic.device: (nic, outcome)}
            status = claim_status(ref, self._pool, outcomes, self._standings(ref.uid), self._wall())
            try:
                async with asyncio.timeout(STATUS_SECONDS):
                    await self._api.apply(
                        RESOURCE_CLAIM, status, manager=STATUS_MANAGER, force=True, subresource="status"
                    )
            except (KubeError, TimeoutError) as error:
                log.warning(
                    "nic.status-not-written", claim=ref.name, reason=str(error) or "no answer in time"
                )


def _device_status(
    held: PreparedNic, outcome: StatusOutcome, lease: LeaseStatus | None, pool: str, now: float
) -> Object:
    told: Object = {"driver": STATUS_MANAGER, "pool": pool, "device": held.device}
    told["conditions"] = _conditions(held, outcome, lease, metav1_time(now))
    if isinstance(outcome, AttachedLink) and outcome.name:
        told["networkData"] = _network(outcome)
    if held.rdma is not None:
        told["data"] = {"rdmaDevice": held.rdma}
    return told


def _network(attached: AttachedLink) -> Object:
    data: Object = {"interfaceName": attached.name, "ips": list(attached.addresses)}
    if attached.mac is not None:
        data["hardwareAddress"] = attached.mac
    return data


def _conditions(held: PreparedNic, outcome: StatusOutcome, lease: LeaseStatus | None, at: str) -> list[Any]:
    """A NIC without its leased address is there, and is not ready."""
    status, reason, message = "True", "NetworkDeviceReady", ""
    if held.identity is None:
        reason = "RDMAOnlyDeviceReady"
    if lease is not None and lease.lost:
        status, reason, message = "False", lease.reason, lease.message
    if isinstance(outcome, str):
        status, reason, message = "False", "AttachFailed", outcome
    told = [_condition(kind, status, reason, message, at) for kind in _kinds(held)]
    if lease is not None:
        told.append(_condition(DHCP_READY, lease.holds, lease.reason, lease.message, at))
    return told


def _kinds(held: PreparedNic) -> list[str]:
    kinds = [READY]
    if held.identity is not None:
        kinds.append(NETWORK_READY)
    if held.pod is not None and held.pod.autoconfigures:
        kinds.append(SLAAC_READY)
    if held.moves_rdma:
        kinds.append(RDMA_READY)
    return kinds


def _condition(kind: str, status: str, reason: str, message: str, at: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at,
    }


# Outcomes of attachments.


NETWORK_FAILED, RDMA_FAILED = "NetworkDeviceAttachFailed", "RDMADeviceAttachFailed"
"""Reasons of the events, as DRANET has them."""
ATTACHMENT_KINDS = ("network", "rdma")


WriteStatus = Callable[[ClaimRef, PreparedNic, AttachedLink | str], None]
"""Writes the claim's status, beside all other work."""


class AttachmentReporter:
    """Tells everybody who wants to know."""

    def __init__(self, write_status: WriteStatus, events: EventRecorder) -> None:
        self._write_status = write_status
        self._events = events
        self._telling: set[asyncio.Task[None]] = set()
        by_kind = ("kind", "outcome")
        self.attachments = Counter(
            "rackloom_nic_attachments", "NICs that were to come into pods", by_kind, registry=None
        )
        """Belongs into the plugin's registry."""
        for kind in ATTACHMENT_KINDS:
            for outcome in ("attached", "failed"):
                self.attachments.labels(kind, outcome)

    def told(self, ref: ClaimRef, nic: PreparedNic, sandbox: PodSandbox, outcome: AttachOutcome) -> None:
        """An attachment went well, or did not."""
        if isinstance(outcome, AttachedLink):
            self._count(nic, "attached")
            self._write_status(ref, nic, outcome)
            return
        self._count(nic, "failed")
        self._write_status(ref, nic, str(outcome))
        reason = RDMA_FAILED if nic.identity is None else NETWORK_FAILED
        self._beside(self._events.record(pod_of_sandbox(sandbox), "Warning", reason, str(outcome)))

    def _count(self, nic: PreparedNic, outcome: str) -> None:
        self.attachments.labels(attachment_kind(nic), outcome).inc()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def attachment_kind(nic: PreparedNic) -> str:
    """Whether there is an interface to move, or an RDMA device only."""
    return "rdma" if nic.identity is None else "network"


def pod_of_sandbox(sandbox: PodSandbox) -> Object:
    """As much of the pod as an Event has to know."""
    return pod_object(sandbox.namespace, sandbox.name, sandbox.pod)


def pod_object(namespace: str, name: str, uid: str) -> Object:
    """The same, of a pod whose sandbox is not at hand."""
    metadata = {"namespace": namespace, "name": name, "uid": uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


# States of leases.


class ReportLease(Protocol):
    """Is told how a lease stands. Must not raise."""

    async def __call__(self, record: LeaseRecord, attachment: Attachment | None, *, is_new: bool) -> None:
        """It stands in another way (`is_new`), or its address came or went."""
        ...


class LeaseReporter:
    """Tells who looks at the claim and who looks at the pod."""

    def __init__(self, write_status: WriteStatus, events: EventRecorder, wall_of: WallTimeOf) -> None:
        self._write_status = write_status
        self._events = events
        self._wall_of = wall_of

    async def told(self, record: LeaseRecord, attachment: Attachment | None, *, is_new: bool) -> None:
        """A NIC that is in no pod has no status of its own."""
        if attachment is not None and attachment.attached is not None:
            self._write_status(record.ref, record.nic, attachment.attached)
        if is_new:
            now = lease_status(record.lease, self._wall_of)
            severity: EventSeverity = "Normal" if now.holds == "True" else "Warning"
            pod = pod_object(record.ref.namespace, record.pod_name, record.pod)
            await self._events.record(pod, severity, now.reason, now.message)
