"""The writes of an IMEX daemon to the cluster: its clique entry, and reports on its own pod.

Up to a rack of daemons join one ComputeDomainClique object at the same moment. Every change is made to
the newest object or not at all (optimistic concurrency by resourceVersion) and repeated after a conflict,
with exponential backoff and jitter, and shorter pauses after a conflict than after an error. READY alone
is written by a JSON patch with `test` operations on the own entry, so other daemons' writes are
not in the way.

`peers_of` reads the other entries with distrust, since each daemon writes its own. An address that is no
IP address would write lines into the hosts file. This node's index or address in another entry (of
a daemon that died and had this pod's address) would make nvidia-imex take itself for that node. Such
members are reported as unusable.

`OwnPod` labels the pod with its clique and annotates it with the peers that are reached and the last
error.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import structlog

from rackloom.claim.imex.supervisor import Peers
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_clique,
)
from rackloom.core.cluster.objects import COMPUTE_DOMAIN_CLIQUE, POD, Object, is_being_deleted, uid_of
from rackloom.core.domains import clique
from rackloom.core.domains.clique import is_ip_address

# The entry in the clique object.


FIRST_WAIT, LONGEST_WAIT = 0.04, 6.0
"""Seconds between attempts. Up to a rack of daemons joins one object at the same moment: a shorter first wait
costs more writes that come too late, a longer one the pods that wait for it."""
CONTENDED_WAIT = 0.12
"""The longest after a conflict: about the time in which a rack of daemons can write one after the other.
Longer pauses let the object rest while the last daemons sleep."""


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """The place of this daemon, and its ComputeDomain. `namespace` is the driver's."""

    compute_domain: str
    clique_id: str
    namespace: str
    node: str
    address: str
    pod: ObjectRef
    max_nodes: int
    boot_id: str = ""
    """Of the node. Empty if the device plugin does not name it."""


class CliqueMember:
    """Writes the entry of one daemon.

    The index of an entry is assigned by the write itself: `core.domains.clique.join_clique` chooses a free
    one from the object as read, and the write carries that object's resourceVersion. Two daemons that choose
    the same index therefore cannot both succeed. The later one gets a conflict, reads again, and chooses
    another.
    """

    def __init__(self, api: KubeApi, identity: DaemonIdentity, random: Random) -> None:
        self._api = api
        self._identity = identity
        self._random = random
        self._latest = self._new()

    def observed(self, value: ComputeDomainClique) -> None:
        """Keep the newest object that a watch has delivered."""
        self._latest = value

    async def join(self) -> ComputeDomainClique:
        """Enter, or refresh the address of, this node. Raises `Refused` when the clique is full."""
        identity = self._identity
        return await self._change(
            lambda current: clique.join_clique(
                current,
                node=identity.node,
                ip_address=identity.address,
                pod=identity.pod,
                max_nodes=identity.max_nodes,
            )
        )

    async def set_ready(self, ready: bool) -> None:
        """Write whether the daemon is ready."""
        status = Readiness.READY if ready else Readiness.NOT_READY
        if not await self._set_alone(status):
            await self._change(lambda current: self._with_status(current, status))

    async def _set_alone(self, status: Readiness) -> bool:
        """Write the own entry's status and nothing else: this cannot conflict with other daemons' writes.

        False if the entry is not known, has this status already, or has moved since.
        """
        identity, daemons = self._identity, self._latest.daemons
        number = next((n for n, daemon in enumerate(daemons) if daemon.node_name == identity.node), None)
        if number is None or daemons[number].status is status:
            return False
        path = f"/daemons/{number}"
        # Entries may have moved: with the tests the server refuses to write to another daemon's entry.
        operations = (
            {"op": "test", "path": f"{path}/nodeName", "value": identity.node},
            {"op": "test", "path": f"{path}/ipAddress", "value": identity.address},
            {"op": "add", "path": f"{path}/status", "value": status.value},
        )
        try:
            await self._api.patch(COMPUTE_DOMAIN_CLIQUE, self._latest.name, identity.namespace, operations)
        except KubeError:
            return False
        self._latest = self._with_status(self._latest, status)
        return True

    def _with_status(self, current: ComputeDomainClique, status: Readiness) -> ComputeDomainClique:
        identity = self._identity
        return clique.with_daemon_status(
            current, node=identity.node, ip_address=identity.address, status=status
        )

    async def leave(self) -> None:
        """Remove the entry, so that the peers do not wait for a daemon that has ended."""
        identity = self._identity
        await self._change(lambda current: clique.leave_clique(current, node=identity.node, pod=identity.pod))

    async def _change(
        self, change: Callable[[ComputeDomainClique], ComputeDomainClique]
    ) -> ComputeDomainClique:
        wait = FIRST_WAIT
        while True:
            try:
                self._latest = await self._try(change)
                return self._latest
            except Rejected:
                raise
            except Conflict:
                wait = min(wait, CONTENDED_WAIT)  # another daemon was first: repeat on the newest object
            except KubeError as error:
                wait = max(wait, error.retry_after or 0.0)
            await asyncio.sleep(wait * self._random.uniform(0.5, 1.0))
            wait = min(wait * 2, LONGEST_WAIT)

    async def _try(self, change: Callable[[ComputeDomainClique], ComputeDomainClique]) -> ComputeDomainClique:
        read: Object | None = None
        with suppress(NotFound):
            read = await self._api.get(COMPUTE_DOMAIN_CLIQUE, self._new().name, self._identity.namespace)
        current = self._new() if read is None else read_clique(read)
        wanted = change(current)
        if wanted == current:
            return current
        body = clique_json(wanted, self._identity.namespace, read)
        write = self._api.create if read is None else self._api.replace
        return read_clique(await write(COMPUTE_DOMAIN_CLIQUE, body))

    def _new(self) -> ComputeDomainClique:
        return ComputeDomainClique(
            compute_domain=self._identity.compute_domain, clique_id=self._identity.clique_id
        )


def peers_of(value: ComputeDomainClique, node: str) -> Peers:
    """The daemons of a clique as the supervisor of this node's daemon needs them.

    Each daemon writes its own entry, so an entry is no more to be trusted than its writer. Text that is no IP
    address would write lines into the hosts file. This node's index or address in the entry of another (a
    daemon that died and had this pod's address) would make nvidia-imex take itself for that node.
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
"""The time for which the clique is left to the first report of the mesh, which includes it."""
LABEL_RETRY_SECONDS = 5.0

_log = structlog.get_logger(__name__)


class OwnPod:
    """Writes to one pod."""

    def __init__(self, api: KubeApi, identity: DaemonIdentity) -> None:
        self._api = api
        self._identity = identity
        self._has_label = False

    async def is_deleted(self) -> bool:
        """Whether it is being deleted, or gone. Raises `KubeError`."""
        own = self._identity.pod
        try:
            found = await self._api.get(POD, own.name, self._identity.namespace)
        except NotFound:
            return True
        return uid_of(found) != own.uid or is_being_deleted(found)

    async def report(self, mesh: str | None, error: str | None) -> None:
        """Write the mesh as JSON, and how nvidia-imex ended. None removes either. Raises `KubeError`."""
        annotations = {names.MESH_ANNOTATION: mesh, names.IMEX_ERROR_ANNOTATION: error}
        await self._write({**_clique_label(self._identity), "annotations": annotations})

    async def report_clique(self) -> None:
        """Report the clique alone if nothing was reported for a while. Then return."""
        await asyncio.sleep(LABEL_SECONDS)
        while not self._has_label:
            try:
                await self._write(_clique_label(self._identity))
            except NotFound:
                return  # deleted by force: the daemon is about to end
            except KubeError as error:
                _log.warning("imex.clique_untold", reason=error.message)
                await asyncio.sleep(error.retry_after or LABEL_RETRY_SECONDS)

    async def _write(self, metadata: dict[str, Any]) -> None:
        pod = self._identity.pod
        await self._api.patch(POD, pod.name, self._identity.namespace, {"metadata": metadata})
        self._has_label = True


async def label_pod(api: KubeApi, identity: DaemonIdentity) -> None:
    """Label a pod with its clique at once. An empty value means a node without a fabric."""
    await api.patch(POD, identity.pod.name, identity.namespace, {"metadata": _clique_label(identity)})


def _clique_label(identity: DaemonIdentity) -> dict[str, Any]:
    return {"labels": {names.CLIQUE_ID_LABEL: identity.clique_id}}
