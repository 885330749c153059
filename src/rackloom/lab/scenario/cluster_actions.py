"""What users do to the cluster of a scenario, and what breaks on its nodes.

Users create the objects of a manifest and delete objects. Trays lose power, start again or reboot; GPUs
fall off the bus or report Xid errors; NIC links go down; another writer or a late GPU Feature Discovery
makes the clique label wrong; a GPU reports that it is still joining its fabric; IMEX daemons are
killed, also so that two of them swap addresses.

`NodeFaults` does these steps and has the affected node looked at. `heal` starts nodes, brings GPUs and
links back, and lets labels come at once. `kind_named` and `manifest_objects` read the kinds and
manifests that files name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import yaml

from rackloom.claim.node.fabric import FabricState
from rackloom.core.domains.names import COMPUTE_DOMAIN_LABEL, GPU_CLIQUE_LABEL
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import NODE, POD, Object, ResourceKind
from rackloom.errors import Refused
from rackloom.lab.kube.controllers.mpi_jobs import MPI_JOB
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.nodes.gpus import TrayGpu
from rackloom.lab.scenario import model
from rackloom.lab.scenario.model import ClusterAction, NotObserved, TrayAction, UserAction
from rackloom.lab.scenario.stage import ClusterTruth


class Submit(UserAction, frozen=True, kw_only=True, tag="submit"):
    """A user creates the objects of a manifest (YAML)."""

    manifest: str
    namespace: str = "default"


class DeleteObject(UserAction, frozen=True, kw_only=True, tag="delete-object"):
    """A user deletes an object."""

    kind: str
    name: str
    namespace: str = "default"


class NodeLost(TrayAction, frozen=True, kw_only=True, tag="node-lost"):
    """The power of a tray fails."""


class NodeBack(TrayAction, frozen=True, kw_only=True, tag="node-back"):
    """It starts again."""


class NodeReboots(TrayAction, frozen=True, kw_only=True, tag="node-reboots"):
    """A node goes and comes back at once."""


class GpuLost(TrayAction, frozen=True, kw_only=True, tag="gpu-lost"):
    """A GPU falls off the bus of its tray."""

    gpu: int


class GpuXid(TrayAction, frozen=True, kw_only=True, tag="gpu-xid"):
    """The driver reports an error of a GPU."""

    gpu: int
    xid: int


class NicLinkDown(TrayAction, frozen=True, kw_only=True, tag="nic-link-down"):
    """The link of a NIC (by its RDMA device, such as mlx5_0) goes down."""

    device: str


class CliqueLabelByHand(TrayAction, frozen=True, kw_only=True, tag="clique-label-by-hand"):
    """Somebody else writes nvidia.com/gpu.clique on the node of a tray."""

    value: str


class CliqueLabelLags(ClusterAction, frozen=True, kw_only=True, tag="clique-label-lags"):
    """GPU Feature Discovery writes what it finds only so many `seconds` later, from now on."""

    seconds: float


class GpuFabricState(TrayAction, frozen=True, kw_only=True, tag="fabric-state"):
    """A GPU says (NVML) that it is joining its fabric, or that it has; the switches say nothing of it."""

    gpu: int
    state: Literal["in-progress", "completed"]


class ImexDaemonKilled(TrayAction, frozen=True, kw_only=True, tag="imex-daemon-killed"):
    """The pod of a ComputeDomain's IMEX daemon on a tray is killed."""


class ImexAddressesSwapped(ClusterAction, frozen=True, kw_only=True, tag="imex-addresses-swapped"):
    """The pods of the IMEX daemons on two trays are killed, and each new one has the address of the other."""

    trays: tuple[int, int]
    rack: int = 1


# Kinds and manifests that files name.


KINDS_BY_NAME: Mapping[tuple[str, str], ResourceKind] = {
    (kind.api_version, kind.kind): kind
    for kind in (*vars(objects).values(), MPI_JOB)
    if isinstance(kind, ResourceKind)
}


def kind_named(name: str) -> ResourceKind:
    """The kind that files call so. Refused for one that Rackloom does not know."""
    found = next((kind for (_, called), kind in KINDS_BY_NAME.items() if called == name), None)
    if found is None:
        known = ", ".join(sorted(called for _, called in KINDS_BY_NAME))
        raise Refused(f"kind {name} is not known", nearest_fix=f"one of {known}")
    return found


def manifest_objects(manifest: str, namespace: str) -> Iterator[tuple[ResourceKind, Object]]:
    """The objects of a manifest. Refused for what is not YAML, or of a kind that is not known."""
    try:
        documents: list[Any] = [one for one in yaml.safe_load_all(manifest) if one is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"the manifest is not YAML: {error}", nearest_fix="correct that line") from error
    for document in documents:
        kind = (
            KINDS_BY_NAME.get((document.get("apiVersion", ""), document.get("kind", "")))
            if isinstance(document, dict)
            else None
        )
        if kind is None:
            known = ", ".join(f"{version} {name}" for version, name in sorted(KINDS_BY_NAME))
            raise Refused("the manifest has an object of no known kind", nearest_fix=f"one of {known}")
        if kind.namespaced:
            document.setdefault("metadata", {}).setdefault("namespace", namespace)
        yield kind, document


# What carries the steps out.


OTHER_LABEL_WRITER = "another-labeller"
"""Who writes labels that are not theirs."""
_STATE_BY_NAME = {"in-progress": FabricState.IN_PROGRESS, "completed": FabricState.COMPLETED}


class NodeFaults:
    """Users and mishaps of nodes; `heal` ends the mishaps."""

    def __init__(self, ground: ClusterTruth) -> None:
        self._ground = ground
        self._off: set[str] = set()
        self._lost_gpus: set[tuple[str, int]] = set()

    async def submit(self, step: Submit) -> str:
        """Create each object."""
        made = []
        for kind, one in manifest_objects(step.manifest, step.namespace):
            created = await self._ground.api.create(kind, one)
            made.append(f"{kind.kind} {created['metadata']['name']}")
        return f"created {', '.join(made)}"

    async def delete(self, step: DeleteObject) -> str:
        """Ask for its deletion."""
        kind = kind_named(step.kind)
        namespace = step.namespace if kind.namespaced else None
        await self._ground.api.delete(kind, step.name, namespace)
        return f"{step.kind} {step.name} is to go"

    async def lose_node(self, step: NodeLost) -> str:
        """No word any more."""
        node = self._node(step)
        await self._ground.nodes.lose(node)
        self._off.add(node)
        return f"{node} has no power"

    async def start_node(self, step: NodeBack) -> str:
        """It boots."""
        node = self._node(step)
        await self._ground.nodes.heal(node)
        self._off.discard(node)
        return f"{node} has started"

    async def reboot_node(self, step: NodeReboots) -> str:
        """Off and on."""
        node = self._node(step)
        await self._ground.nodes.reboot(node)
        return f"{node} was rebooted"

    async def lose_gpu(self, step: GpuLost) -> str:
        """Off the bus."""
        node = self._node(step)
        self._ground.nodes[node].gpus.lose(step.gpu)
        self._lost_gpus.add((node, step.gpu))
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} does not answer"

    async def strike_gpu(self, step: GpuXid) -> str:
        """An error that the driver reports."""
        node = self._node(step)
        self._ground.nodes[node].gpus.strike(step.gpu, step.xid)
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} reported Xid {step.xid}"

    async def cut_nic(self, step: NicLinkDown) -> str:
        """No carrier."""
        node = self._node(step)
        nics = self._ground.nodes[node].nics
        nics.down = frozenset({*nics.down, step.device})
        await self._ground.nodes.look(node)
        return f"{step.device} of {node} has no link"

    async def write_label(self, step: CliqueLabelByHand) -> str:
        """By another hand than the one whose label it is."""
        node = self._node(step)
        other = DirectApi(self._ground.kube, OTHER_LABEL_WRITER)
        patch = {"metadata": {"labels": {GPU_CLIQUE_LABEL: step.value}}}
        await other.patch(NODE, node, None, patch)
        return f"{OTHER_LABEL_WRITER} wrote {step.value} on {node}"

    async def lag_label(self, step: CliqueLabelLags) -> str:
        """As it looks once a minute, and not at every change."""
        self._ground.stage.discovery.lag = step.seconds
        return f"labels come {step.seconds:g} s late"

    async def set_state(self, step: GpuFabricState) -> str:
        """What NVML says of one GPU's fabric."""
        node = self._node(step)
        gpus = self._ground.nodes[node].gpus
        before = gpus.answering
        seat = next((one for one in before if one.module_id == step.gpu), None)
        if seat is None or not seat.fabric.clique_id:
            raise NotObserved(f"GPU {step.gpu} of {node} is in no partition that it could join")
        after = _gpu_in_state(seat, _STATE_BY_NAME[step.state])
        gpus.set_gpus(tuple(after if one is seat else one for one in before))
        self._ground.joining.discard(node)
        if step.state == "in-progress":
            self._ground.joining.add(node)
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} says: {step.state}"

    async def kill_daemon(self, step: ImexDaemonKilled) -> str:
        """Every IMEX daemon's pod of the node goes at once."""
        node = self._node(step)
        found = await self._daemons(node)
        await self._kill(found)
        return f"killed {', '.join(one['metadata']['name'] for one in found)} on {node}"

    async def swap_addresses(self, step: ImexAddressesSwapped) -> str:
        """Both go; each new one is where a stranger was."""
        first, second = (self._ground.node(step.rack, tray) for tray in step.trays)
        (one, *_), (other, *_) = await self._daemons(first), await self._daemons(second)
        plan = {first: other["status"]["podIP"], second: one["status"]["podIP"]}
        self._ground.stage.addresses.update(plan)
        await self._kill([one, other])
        return f"killed, and next on {first} {plan[first]}, on {second} {plan[second]}"

    async def _daemons(self, node: str) -> list[Object]:
        daemons = (await self._ground.api.list(POD, labels=COMPUTE_DOMAIN_LABEL)).items
        found = [daemon for daemon in daemons if daemon["spec"].get("nodeName") == node]
        if not found:
            raise NotObserved(f"no IMEX daemon runs on {node}")
        return found

    async def _kill(self, pods: Sequence[Object]) -> None:
        for pod in pods:
            meta = pod["metadata"]
            await self._ground.api.delete(POD, meta["name"], meta["namespace"], grace_seconds=0)

    async def heal(self) -> str:
        """Nodes run, GPUs and links are back, labels come at once."""
        self._ground.stage.discovery.lag = 0.0
        for node in sorted(self._off):
            await self._ground.nodes.heal(node)
        self._off.clear()
        for node, gpu in self._lost_gpus:
            self._ground.nodes[node].gpus.find(gpu)
        self._lost_gpus.clear()
        for one in self._ground.nodes:
            one.nics.down = frozenset()
            await self._ground.nodes.look(one.name)
        return "the nodes are repaired"

    def _node(self, step: model.TrayAction) -> str:
        return self._ground.node(step.rack, step.tray)


def _gpu_in_state(seat: TrayGpu, state: FabricState) -> TrayGpu:
    return msgspec.structs.replace(seat, fabric=msgspec.structs.replace(seat.fabric, state=state))
