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
from rackloom.claim.node.nic.standing import Standing
from rackloom.claim.node.values import ClaimRef

log = structlog.get_logger(__name__)

MANAGER = "dra.net"
WRITE_SECONDS = 10.0
READY, NETWORK_READY, RDMA_READY, SLAAC_READY = "Ready", "NetworkReady", "RDMALinkReady", "SLAACReady"
DHCP_READY = "DHCPLeaseReady"
"""Ours alone: DRANET does not renew leases, and tells nothing of them."""

Outcome = Attached | str
"""What became of an attachment: how the NIC is in the pod, or why it is not."""


def claim_status(
    ref: ClaimRef,
    pool: str,
    outcomes: Mapping[str, tuple[Held, Outcome]],
    standings: Mapping[str, Standing],
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
                _device(held, outcome, standings.get(held.device), pool, now)
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
        loans: Loans,
        standings: Callable[[str], Mapping[str, Standing]],
        wall: Callable[[], float],
    ) -> None:
        self._api = api
        self._pool = pool
        self._loans = loans
        self._standings = standings
        """How the leases of a claim (UID) stand, by device."""
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
            outcomes |= {nic.device: (nic, outcome)}
            status = claim_status(ref, self._pool, outcomes, self._standings(ref.uid), self._wall())
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._api.apply(
                        RESOURCE_CLAIM, status, manager=MANAGER, force=True, subresource="status"
                    )
            except (KubeError, TimeoutError) as error:
                log.warning(
                    "nic.status-not-written", claim=ref.name, reason=str(error) or "no answer in time"
                )


def _device(held: Held, outcome: Outcome, lease: Standing | None, pool: str, now: float) -> Object:
    told: Object = {"driver": MANAGER, "pool": pool, "device": held.device}
    told["conditions"] = _conditions(held, outcome, lease, whole_time(now))
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


def _conditions(held: Held, outcome: Outcome, lease: Standing | None, at: str) -> list[Any]:
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


def _kinds(held: Held) -> list[str]:
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
