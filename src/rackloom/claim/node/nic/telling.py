"""Telling how attachments went: in the claim's status, in an Event on the pod, and in a counter."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from prometheus_client import Counter

from rackloom.claim.kube.api import Object
from rackloom.claim.kube.events import Recorder
from rackloom.claim.node.nic.loans import Held
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.nri.hooks import Sandbox
from rackloom.claim.node.values import ClaimRef
from rackloom.errors import Refused, Retry

NETWORK_FAILED, RDMA_FAILED = "NetworkDeviceAttachFailed", "RDMADeviceAttachFailed"
"""Reasons of the events, as DRANET has them."""
KINDS = ("network", "rdma")

Outcome = Attached | Refused | Retry
"""How a NIC is in the pod, or why it is not."""
WriteStatus = Callable[[ClaimRef, Held, Attached | str], None]
"""Writes the claim's status, beside all other work."""


class Telling(Protocol):
    """Is told what came of an attachment. Must not raise, and must not take time."""

    def __call__(self, ref: ClaimRef, nic: Held, sandbox: Sandbox, outcome: Outcome) -> None:
        """One NIC of a claim is in the sandbox, or is not."""
        ...


class Teller:
    """Tells everybody who wants to know."""

    def __init__(self, write_status: WriteStatus, events: Recorder) -> None:
        self._write_status = write_status
        self._events = events
        self._telling: set[asyncio.Task[None]] = set()
        by_kind = ("kind", "outcome")
        self.attachments = Counter(
            "rackloom_nic_attachments", "NICs that were to come into pods", by_kind, registry=None
        )
        """Belongs into the plugin's registry."""
        for kind in KINDS:
            for outcome in ("attached", "failed"):
                self.attachments.labels(kind, outcome)

    def told(self, ref: ClaimRef, nic: Held, sandbox: Sandbox, outcome: Outcome) -> None:
        """An attachment went well, or did not."""
        if isinstance(outcome, Attached):
            self._count(nic, "attached")
            self._write_status(ref, nic, outcome)
            return
        self._count(nic, "failed")
        self._write_status(ref, nic, str(outcome))
        reason = RDMA_FAILED if nic.identity is None else NETWORK_FAILED
        self._beside(self._events.record(pod_of(sandbox), "Warning", reason, str(outcome)))

    def _count(self, nic: Held, outcome: str) -> None:
        self.attachments.labels(kind_of(nic), outcome).inc()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def kind_of(nic: Held) -> str:
    """Whether there is an interface to move, or an RDMA device only."""
    return "rdma" if nic.identity is None else "network"


def pod_of(sandbox: Sandbox) -> Object:
    """As much of the pod as an Event has to know."""
    return pod_object(sandbox.namespace, sandbox.name, sandbox.pod)


def pod_object(namespace: str, name: str, uid: str) -> Object:
    """The same, of a pod whose sandbox is not at hand."""
    metadata = {"namespace": namespace, "name": name, "uid": uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
