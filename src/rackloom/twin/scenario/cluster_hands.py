"""What users do to the cluster of a scenario, and what breaks in it. Methods raise `KubeError`."""

from collections.abc import Awaitable, Callable

from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL, GPU_CLIQUE_LABEL
from rackloom.claim.kube.kinds import NODE, POD
from rackloom.twin.kube import DirectApi, Fault
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_objects import kind_named, objects_of
from rackloom.twin.scenario.stage import NotSeen

ANOTHER = "another-labeller"
"""Who writes labels that are not theirs."""
_CONTROLLERS = "rackloom-controller"
Kill = Callable[[float], Awaitable[None]]
"""Ends something, and starts another after so many seconds."""


class ClusterHands:
    """Users and mishaps; `heal` ends the mishaps."""

    def __init__(self, ground: ClusterGround, kill_controllers: Kill) -> None:
        self._ground = ground
        self._kill_controllers = kill_controllers
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

    async def kill_daemon(self, step: values.ImexDaemonKilled) -> str:
        """Every IMEX daemon's pod of the node goes at once."""
        node = self._node(step)
        daemons = (await self._ground.api.list(POD, labels=COMPUTE_DOMAIN_LABEL)).items
        found = [one for one in daemons if one["spec"].get("nodeName") == node]
        if not found:
            raise NotSeen(f"no IMEX daemon runs on {node}")
        for one in found:
            meta = one["metadata"]
            await self._ground.api.delete(POD, meta["name"], meta["namespace"], grace_seconds=0)
        return f"killed {', '.join(one['metadata']['name'] for one in found)} on {node}"

    async def server_down(self, _: values.ApiServerDown) -> str:
        """Nobody reaches it."""
        self._ground.kube.faults.add(Fault())
        self._ground.kube.store.hang_up()
        return "the API server cannot be reached"

    async def server_bad(self, step: values.ApiServerBad) -> str:
        """Writes of our controllers go wrong."""
        if step.how == "conflict":
            for verb in ("replace", "apply", "patch"):
                fault = Fault(rate=step.rate, verb=verb, user=_CONTROLLERS, code=409, reason="Conflict")
                self._ground.kube.faults.add(fault)
        else:
            for verb in ("create", "replace", "apply", "patch", "delete"):
                self._ground.kube.faults.add(
                    Fault(rate=step.rate, verb=verb, user=_CONTROLLERS, lost="reply")
                )
        return f"{step.rate:.0%} of the controllers' writes: {step.how}"

    async def server_good(self, _: values.ApiServerGood) -> str:
        """All is answered."""
        self._ground.kube.faults.clear()
        return "the API server answers"

    async def expire_watches(self, _: values.WatchesExpire) -> str:
        """410 for whoever wants to go on from where it was."""
        self._ground.kube.store.compact()
        self._ground.kube.store.hang_up()
        return "all watches ended, and what was before is forgotten"

    async def kill_controllers(self, step: values.ControllersKilled) -> str:
        """And others in their place."""
        await self._kill_controllers(step.down)
        return f"Rackloom's controllers ended, and others began after {step.down:g} s"

    async def heal(self) -> str:
        """The server answers, nodes run, GPUs and links are back."""
        await self.server_good(values.ApiServerGood())
        for node in sorted(self._off):
            await self._ground.nodes.heal(node)
        self._off.clear()
        for node, gpu in self._lost_gpus:
            self._ground.nodes[node].gpus.find(gpu)
        self._lost_gpus.clear()
        for one in self._ground.nodes:
            one.nics.down = frozenset()
            await self._ground.nodes.look(one.name)
        return "the cluster is repaired"

    def _node(self, step: values.TrayAction) -> str:
        return self._ground.node(step.rack, step.tray)
