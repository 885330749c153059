"""What users do to the cluster of a scenario, and what breaks in it. Methods raise `KubeError`."""

from collections.abc import Sequence

import msgspec

from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL, GPU_CLIQUE_LABEL
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import NODE, POD
from rackloom.claim.node.imex.fabric import FabricState
from rackloom.twin.kube import DirectApi
from rackloom.twin.nodes.tray_fabric import SeatedGpu
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_objects import kind_named, objects_of
from rackloom.twin.scenario.stage import NotSeen

ANOTHER = "another-labeller"
"""Who writes labels that are not theirs."""
_STATES = {"in-progress": FabricState.IN_PROGRESS, "completed": FabricState.COMPLETED}


class ClusterHands:
    """Users and mishaps of nodes; `heal` ends the mishaps."""

    def __init__(self, ground: ClusterGround) -> None:
        self._ground = ground
        self._off: set[str] = set()
        self._lost_gpus: set[tuple[str, int]] = set()

    async def submit(self, step: values.Submit) -> str:
        """Create each object."""
        made = []
        for kind, one in objects_of(step.manifest, step.namespace):
            created = await self._ground.api.create(kind, one)
            made.append(f"{kind.kind} {created['metadata']['name']}")
        return f"created {', '.join(made)}"

    async def delete(self, step: values.DeleteObject) -> str:
        """Ask for its deletion."""
        kind = kind_named(step.kind)
        namespace = step.namespace if kind.namespaced else None
        await self._ground.api.delete(kind, step.name, namespace)
        return f"{step.kind} {step.name} is to go"

    async def lose_node(self, step: values.NodeLost) -> str:
        """No word any more."""
        node = self._node(step)
        await self._ground.nodes.lose(node)
        self._off.add(node)
        return f"{node} has no power"

    async def start_node(self, step: values.NodeBack) -> str:
        """It boots."""
        node = self._node(step)
        await self._ground.nodes.heal(node)
        self._off.discard(node)
        return f"{node} has started"

    async def reboot_node(self, step: values.NodeReboots) -> str:
        """Off and on."""
        node = self._node(step)
        await self._ground.nodes.reboot(node)
        return f"{node} was rebooted"

    async def lose_gpu(self, step: values.GpuLost) -> str:
        """Off the bus."""
        node = self._node(step)
        self._ground.nodes[node].gpus.lose(step.gpu)
        self._lost_gpus.add((node, step.gpu))
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} does not answer"

    async def strike_gpu(self, step: values.GpuXid) -> str:
        """An error that the driver reports."""
        node = self._node(step)
        self._ground.nodes[node].gpus.strike(step.gpu, step.xid)
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} reported Xid {step.xid}"

    async def cut_nic(self, step: values.NicLinkDown) -> str:
        """No carrier."""
        node = self._node(step)
        nics = self._ground.nodes[node].nics
        nics.down = frozenset({*nics.down, step.device})
        await self._ground.nodes.look(node)
        return f"{step.device} of {node} has no link"

    async def write_label(self, step: values.CliqueLabelByHand) -> str:
        """By another hand than the one whose label it is."""
        node = self._node(step)
        other = DirectApi(self._ground.kube, ANOTHER)
        patch = {"metadata": {"labels": {GPU_CLIQUE_LABEL: step.value}}}
        await other.patch(NODE, node, None, patch)
        return f"{ANOTHER} wrote {step.value} on {node}"

    async def lag_label(self, step: values.CliqueLabelLags) -> str:
        """As it looks once a minute, and not at every change."""
        self._ground.stage.discovery.lag = step.seconds
        return f"labels come {step.seconds:g} s late"

    async def set_state(self, step: values.FabricState) -> str:
        """What NVML says of one GPU's fabric."""
        node = self._node(step)
        gpus = self._ground.nodes[node].gpus
        before = gpus.answering
        seat = next((one for one in before if one.module_id == step.gpu), None)
        if seat is None or not seat.fabric.clique_id:
            raise NotSeen(f"GPU {step.gpu} of {node} is in no partition that it could join")
        after = _in_state(seat, _STATES[step.state])
        gpus.follow(tuple(after if one is seat else one for one in before))
        self._ground.joining.discard(node)
        if step.state == "in-progress":
            self._ground.joining.add(node)
        await self._ground.nodes.look(node)
        return f"GPU {step.gpu} of {node} says: {step.state}"

    async def kill_daemon(self, step: values.ImexDaemonKilled) -> str:
        """Every IMEX daemon's pod of the node goes at once."""
        node = self._node(step)
        found = await self._daemons(node)
        await self._kill(found)
        return f"killed {', '.join(one['metadata']['name'] for one in found)} on {node}"

    async def swap_addresses(self, step: values.ImexAddressesSwapped) -> str:
        """Both go; each new one is where a stranger was."""
        first, second = (self._ground.node(step.rack, tray) for tray in step.trays)
        (one, *_), (other, *_) = await self._daemons(first), await self._daemons(second)
        plan = {first: other["status"]["podIP"], second: one["status"]["podIP"]}
        self._ground.stage.addresses.update(plan)
        await self._kill([one, other])
        return f"killed, and next on {first} {plan[first]}, on {second} {plan[second]}"

    async def _daemons(self, node: str) -> list[Object]:
        daemons = (await self._ground.api.list(POD, labels=COMPUTE_DOMAIN_LABEL)).items
        found = [one for one in daemons if one["spec"].get("nodeName") == node]
        if not found:
            raise NotSeen(f"no IMEX daemon runs on {node}")
        return found

    async def _kill(self, pods: Sequence[Object]) -> None:
        for one in pods:
            meta = one["metadata"]
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

    def _node(self, step: values.TrayAction) -> str:
        return self._ground.node(step.rack, step.tray)


def _in_state(seat: SeatedGpu, state: FabricState) -> SeatedGpu:
    return msgspec.structs.replace(seat, fabric=msgspec.structs.replace(seat.fabric, state=state))
