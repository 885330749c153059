"""Telling how leases stand: in the claim's status, and in Events on the pod."""

from typing import Protocol

from rackloom.claim.kube.events import Recorder, Severity
from rackloom.claim.node.nic.leases import LeaseRecord
from rackloom.claim.node.nic.loans import Loan
from rackloom.claim.node.nic.standing import WallOf, standing
from rackloom.claim.node.nic.telling import WriteStatus, pod_object


class TellLease(Protocol):
    """Is told how a lease stands. Must not raise."""

    async def __call__(self, record: LeaseRecord, loan: Loan | None, *, is_new: bool) -> None:
        """It stands in another way (`is_new`), or its address came or went."""
        ...


class LeaseTeller:
    """Tells who looks at the claim and who looks at the pod."""

    def __init__(self, write_status: WriteStatus, events: Recorder, wall_of: WallOf) -> None:
        self._write_status = write_status
        self._events = events
        self._wall_of = wall_of

    async def told(self, record: LeaseRecord, loan: Loan | None, *, is_new: bool) -> None:
        """A NIC that is in no pod has no status of its own."""
        if loan is not None and loan.attached is not None:
            self._write_status(record.ref, record.nic, loan.attached)
        if is_new:
            now = standing(record.lease, self._wall_of)
            severity: Severity = "Normal" if now.holds == "True" else "Warning"
            pod = pod_object(record.ref.namespace, record.pod_name, record.pod)
            await self._events.record(pod, severity, now.reason, now.message)
