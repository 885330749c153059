"""What an IMEX daemon writes to the cluster: its clique entry, and reports on its own pod.

Up to a rack of daemons join one ComputeDomainClique object at the same moment. Every change is made to
the newest object or not at all (optimistic concurrency by resourceVersion) and repeated after a conflict,
with exponential backoff and jitter, and shorter pauses after a conflict than after an error. READY alone
is written by a JSON patch with `test` operations on the own entry, so daemons that write meanwhile are
not in the way.

`peers_of` reads the other entries with distrust, since each daemon writes its own: an address that is no
IP address would write lines into the hosts file; this node's index or address in another entry (of a
daemon that died, whose address this pod has got) would make nvidia-imex take itself for that node. Such
members are reported as unusable.

`OwnPod` labels the pod with its clique and annotates it with the peers that are reached and the last
error.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import structlog

from rackloom.claim.imex.supervisor import Peers
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.domains import clique, names
from rackloom.core.domains.clique import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    is_ip_address,
    read_clique,
)
from rackloom.core.kubernetes.objects import COMPUTE_DOMAIN_CLIQUE, POD, Object

# The entry in the clique object.


FIRST_WAIT, LONGEST_WAIT = 0.04, 6.0
"""Seconds between attempts. Up to a rack of daemons joins one object at the same moment: a shorter first wait
costs more writes that come too late, a longer one the pods that wait for it."""
CONTENDED_WAIT = 0.12
"""The longest after a conflict: about the time in which a rack of daemons can write one after the other.
Longer pauses let the object rest while the last daemons sleep."""


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """Where this daemon runs, and for which ComputeDomain. `namespace` is the driver's."""

    compute_domain: str
    clique_id: str
    namespace: str
    node: str
    address: str
    pod: ObjectRef
    max_nodes: int
    boot_id: str = ""
    """Of the node; empty where the device plugin does not name it."""


class CliqueMember:
    """Writes the entry of one daemon; every change is made to the newest object or not at all."""

    def __init__(self, api: KubeApi, place: DaemonIdentity, random: Random) -> None:
        self._api = api
        self._place = place
        self._random = random
        self._seen = self._new()

    def saw(self, value: ComputeDomainClique) -> None:
        """Take note of the object as a watch has it."""
        self._seen = value

    async def join(self) -> ComputeDomainClique:
        """Enter, or refresh the address of, this node. Raises `Refused` when the clique is full."""
        place = self._place
        return await self._change(
            lambda current: clique.join_clique(
                current, node=place.node, ip_address=place.address, pod=place.pod, max_nodes=place.max_nodes
            )
        )

    async def set_ready(self, ready: bool) -> None:
        """Say whether the daemon was seen ready."""
        status = Readiness.READY if ready else Readiness.NOT_READY
        if not await self._set_alone(status):
            await self._change(lambda current: self._with_status(current, status))

    async def _set_alone(self, status: Readiness) -> bool:
        """Write the own entry's status and nothing else: no daemon that writes meanwhile is in the way.

        False where the entry is not known to be there and different, or it moved since.
        """
        place, entries = self._place, enumerate(self._seen.daemons)
        found = next(((number, one) for number, one in entries if one.node_name == place.node), None)
        if found is None or found[1].status is status:
            return False
        path = f"/daemons/{found[0]}"
        operations = (
            {"op": "test", "path": f"{path}/nodeName", "value": place.node},
            {"op": "test", "path": f"{path}/ipAddress", "value": place.address},
            {"op": "add", "path": f"{path}/status", "value": status.value},
        )
        try:
            await self._api.patch(COMPUTE_DOMAIN_CLIQUE, self._seen.name, place.namespace, operations)
        except KubeError:
            return False
        self._seen = self._with_status(self._seen, status)
        return True

    def _with_status(self, current: ComputeDomainClique, status: Readiness) -> ComputeDomainClique:
        place = self._place
        return clique.with_daemon_status(current, node=place.node, ip_address=place.address, status=status)

    async def leave(self) -> None:
        """Take the entry out, so that the peers do not wait for a daemon that has ended."""
        place = self._place
        await self._change(lambda current: clique.leave_clique(current, node=place.node, pod=place.pod))

    async def _change(
        self, change: Callable[[ComputeDomainClique], ComputeDomainClique]
    ) -> ComputeDomainClique:
        wait = FIRST_WAIT
        while True:
            try:
                self._seen = await self._try(change)
                return self._seen
            except Rejected:
                raise
            except Conflict:
                wait = min(wait, CONTENDED_WAIT)  # somebody else was first: the same, on what is there now
            except KubeError as error:
                wait = max(wait, error.retry_after or 0.0)
            await asyncio.sleep(wait * self._random.uniform(0.5, 1.0))
            wait = min(wait * 2, LONGEST_WAIT)

    async def _try(self, change: Callable[[ComputeDomainClique], ComputeDomainClique]) -> ComputeDomainClique:
        read = await self._read()
        current = self._new() if read is None else read_clique(read)
        wanted = change(current)
        if wanted == current:
            return current
        body = clique_json(wanted, self._place.namespace, read)
        if read is None:
            return read_clique(await self._api.create(COMPUTE_DOMAIN_CLIQUE, body))
        return read_clique(await self._api.replace(COMPUTE_DOMAIN_CLIQUE, body))

    async def _read(self) -> Object | None:
        try:
            return await self._api.get(COMPUTE_DOMAIN_CLIQUE, self._new().name, self._place.namespace)
        except NotFound:
            return None

    def _new(self) -> ComputeDomainClique:
        return ComputeDomainClique(compute_domain=self._place.compute_domain, clique_id=self._place.clique_id)


def peers_of(value: ComputeDomainClique, node: str) -> Peers:
    """The daemons of a clique as the supervisor of this node's daemon needs them.

    Each daemon writes its own entry, so an entry is no more to be trusted than its writer. What is no IP
    address would write lines into the hosts file; this node's index or address in the entry of another (a
    daemon that died, whose address this pod has got) would have nvidia-imex take itself for that node.
    """
    own = value.on(node)
    if own is None:
        return Peers(None, {})
    addresses, unusable = {own.index: own.ip_address}, []
    for daemon in value.daemons:
        if daemon.node_name == node:
            continue
        if not is_ip_address(daemon.ip_address):
            unusable.append(f"{daemon.node_name}: its address is no IP address")
        elif daemon.ip_address == own.ip_address:
            unusable.append(f"{daemon.node_name}: it has the address of {node}")
        elif daemon.index in addresses:
            unusable.append(f"{daemon.node_name}: its index {daemon.index} is taken")
        else:
            addresses[daemon.index] = daemon.ip_address
    return Peers(own.index, addresses, tuple(unusable))


# The pod.


LABEL_SECONDS = 5.0
"""For so long the clique is left to the first report of the mesh, which says it in the same write."""
LABEL_RETRY_SECONDS = 5.0

_log = structlog.get_logger(__name__)


class OwnPod:
    """Writes to one pod."""

    def __init__(self, api: KubeApi, place: DaemonIdentity) -> None:
        self._api = api
        self._place = place
        self._has_label = False

    async def is_going(self) -> bool:
        """Whether it is being deleted, or gone. Raises `KubeError`."""
        pod = self._place.pod
        try:
            meta = (await self._api.get(POD, pod.name, self._place.namespace))["metadata"]
        except NotFound:
            return True
        return meta["uid"] != pod.uid or "deletionTimestamp" in meta

    async def report(self, mesh: str | None, error: str | None) -> None:
        """Which peers are reached, as JSON, and how nvidia-imex ended; None: nothing. Raises `KubeError`."""
        annotations = {names.MESH_ANNOTATION: mesh, names.IMEX_ERROR_ANNOTATION: error}
        await self._write({**_clique_label(self._place), "annotations": annotations})

    async def tell_clique(self) -> None:
        """The clique alone, where nothing was reported for a while; then return."""
        await asyncio.sleep(LABEL_SECONDS)
        while not self._has_label:
            try:
                await self._write(_clique_label(self._place))
            except NotFound:
                return  # deleted by force: the daemon is about to end
            except KubeError as error:
                _log.warning("imex.clique_untold", reason=error.message)
                await asyncio.sleep(error.retry_after or LABEL_RETRY_SECONDS)

    async def _write(self, metadata: dict[str, Any]) -> None:
        pod = self._place.pod
        await self._api.patch(POD, pod.name, self._place.namespace, {"metadata": metadata})
        self._has_label = True


async def label_pod(api: KubeApi, place: DaemonIdentity) -> None:
    """Say at once which clique a pod is in; an empty value means a node without a fabric."""
    await api.patch(POD, place.pod.name, place.namespace, {"metadata": _clique_label(place)})


def _clique_label(place: DaemonIdentity) -> dict[str, Any]:
    return {"labels": {names.CLIQUE_ID_LABEL: place.clique_id}}
