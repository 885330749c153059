"""What a claim's status says of its NICs: conditions and network data, by server-side apply."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, Object
from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.kube.timestamps import whole_time
from rackloom.claim.node.nic.loans import Held, Loans
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.values import ClaimRef

log = structlog.get_logger(__name__)

MANAGER = "dra.net"
WRITE_SECONDS = 10.0
READY, NETWORK_READY, RDMA_READY, SLAAC_READY = "Ready", "NetworkReady", "RDMALinkReady", "SLAACReady"

Outcome = Attached | str
"""What became of an attachment: how the NIC is in the pod, or why it is not."""


def claim_status(
    ref: ClaimRef, pool: str, outcomes: Mapping[str, tuple[Held, Outcome]], now: float
) -> Object:
    """The fields that are ours, of all NICs of a claim at once: what is left out would be taken back."""
    return {
        "apiVersion": RESOURCE_CLAIM.api_version,
        "kind": RESOURCE_CLAIM.kind,
        "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid},
        "status": {
            "devices": [_device(held, outcome, pool, now) for held, outcome in outcomes.values()],
        },
    }


class StatusWriter:
    """Writes statuses beside all other work: a runtime does not wait for an API server."""

    def __init__(self, api: KubeApi, pool: str, loans: Loans, wall: Callable[[], float]) -> None:
        self._api = api
        self._pool = pool
        self._loans = loans
        self._wall = wall
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()

    def told(self, ref: ClaimRef, nic: Held, outcome: Outcome) -> None:
        """An attachment went well, or did not."""
        task = asyncio.create_task(self._write(ref, nic, outcome))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, ref: ClaimRef, nic: Held, outcome: Outcome) -> None:
        """One at a time, so that the last one holds what all of them tell."""
        async with self._turn:
            outcomes: dict[str, tuple[Held, Outcome]] = {
                loan.nic.device: (loan.nic, loan.attached)
                for loan in self._loans.of_claim(ref.uid)
                if loan.attached is not None
            }
            status = claim_status(ref, self._pool, outcomes | {nic.device: (nic, outcome)}, self._wall())
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._api.apply(
                        RESOURCE_CLAIM, status, manager=MANAGER, force=True, subresource="status"
                    )
            except (KubeError, TimeoutError) as error:
                log.warning(
                    "nic.status-not-written", claim=ref.name, reason=str(error) or "no answer in time"
                )


def _device(held: Held, outcome: Outcome, pool: str, now: float) -> Object:
    told: Object = {"driver": MANAGER, "pool": pool, "device": held.device}
    told["conditions"] = _conditions(held, outcome, whole_time(now))
    if isinstance(outcome, Attached) and outcome.name:
        told["networkData"] = _network(outcome)
    if held.rdma is not None:
        told["data"] = {"rdmaDevice": held.rdma}
    return told


def _network(attached: Attached) -> Object:
    data: Object = {"interfaceName": attached.name, "ips": list(attached.addresses)}
    if attached.mac is not None:
        data["hardwareAddress"] = attached.mac
    return data


def _conditions(held: Held, outcome: Outcome, at: str) -> list[Any]:
    reason = "NetworkDeviceReady" if held.identity is not None else "RDMAOnlyDeviceReady"
    kinds = [READY]
    if held.identity is not None:
        kinds.append(NETWORK_READY)
    if held.pod is not None and held.pod.autoconfigures:
        kinds.append(SLAAC_READY)
    if held.moves_rdma:
        kinds.append(RDMA_READY)
    if isinstance(outcome, str):
        return [_condition(kind, "False", "AttachFailed", outcome, at) for kind in kinds]
    return [_condition(kind, "True", reason, "", at) for kind in kinds]


def _condition(kind: str, status: str, reason: str, message: str, at: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at,
    }
