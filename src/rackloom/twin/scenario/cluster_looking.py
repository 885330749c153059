"""What must be seen of a scenario's cluster: one look at its objects. Methods raise `KubeError`."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rackloom.claim.kube.api import NotFound, Object
from rackloom.claim.kube.kinds import NODE, RESOURCE_SLICE
from rackloom.claim.node.gpu.settings import GPU_DRIVER
from rackloom.twin.imex.memory import MemoryImex
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_objects import kind_named
from rackloom.twin.scenario.stage import NotSeen


class ClusterLooking:
    """Eyes on a cluster."""

    def __init__(self, ground: ClusterGround) -> None:
        self._ground = ground
        self._known_gpus: dict[str, set[str | None]] = {}
        """What nodes published when a `gpus` step last looked."""
        self._gpus_before: dict[int, set[str | None] | None] = {}
        """By step, what its node published when the one before it last looked."""
        self._known_imex: list[MemoryImex] = []
        """Those that ran when an `imex-mesh` step last saw what it must."""
        self._imex_before: dict[int, list[MemoryImex]] = {}
        """By step, those of the one before it."""

    async def object(self, step: values.ExpectObject) -> str:
        """A field of an object."""
        found: Any = await self._found(step)
        _require(found is not None, f"there is no {step.kind} {step.name}")
        for key in step.path:
            found = found.get(key) if isinstance(found, dict) else None
        seen = None if found is None else str(found)
        told = f"{'.'.join(step.path)} of {step.kind} {step.name} is {seen}"
        _require(seen == step.equals, told)
        return told

    async def condition(self, step: values.ExpectCondition) -> str:
        """One of those that its status says."""
        found = await self._found(step) or {}
        said = (found.get("status") or {}).get("conditions") or ()
        one: Object = next((one for one in said if one["type"] == step.type), {})
        told = f"{step.type} of {step.kind} {step.name} is {one.get('status')}, {one.get('reason')}"
        told = f"{told}: {one['message']}" if one.get("message") else told
        _require(one.get("status") == step.status, told)
        _require(step.reason in (None, one.get("reason")), told)
        return told

    async def gone(self, step: values.ExpectGone) -> str:
        """No such object."""
        _require(await self._found(step) is None, f"{step.kind} {step.name} is still there")
        return f"{step.kind} {step.name} is gone"

    async def pods(self, step: values.ExpectPods) -> str:
        """How many are in which phase."""
        pods = await self._ground.pods(step.namespace, step.labels)
        phases = Counter(one["status"].get("phase", "Pending") for one in pods if not self._is_lost(one))
        told = ", ".join(f"{number} {phase}" for phase, number in sorted(phases.items())) or "none"
        _require(phases[step.phase] == step.count, f"pods {step.labels}: {told}")
        return f"pods {step.labels}: {told}"

    async def one_clique(self, step: values.ExpectOneClique) -> str:
        """True cliques of the nodes of pods."""
        pods = await self._ground.pods(step.namespace, step.labels)
        placed = [one["spec"]["nodeName"] for one in pods if one["spec"].get("nodeName")]
        cliques = {self._ground.clique(node) for node in placed}
        _require(bool(placed), f"no pod {step.labels} is on a node")
        told = f"{len(placed)} pods {step.labels} are in {', '.join(sorted(map(str, cliques)))}"
        _require(len(cliques) == 1 and None not in cliques, told)
        return told

    async def clique_label(self, step: values.ExpectCliqueLabel) -> str:
        """The label of a node against the true fabric."""
        node = self._ground.node(step.rack, step.tray)
        label, true = await self._ground.label(node), self._ground.clique(node)
        if step.stale:
            told = f"{node} says {label or 'no clique'}, its fabric {true or 'none'}"
            _require(label is not None and label != true, told)
            return told
        _require(label == true, f"{node} says {label}, its fabric {true}")
        _require((label is not None) == step.present, f"{node} says {label}")
        return f"{node} says {label or 'no clique'}, as its fabric does"

    async def node(self, step: values.ExpectNode) -> str:
        """Its Ready condition."""
        node = self._ground.node(step.rack, step.tray)
        conditions = (await self._ground.api.get(NODE, node))["status"].get("conditions", ())
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "absent")
        _require((ready == "True") == step.ready, f"Ready of {node} is {ready}")
        return f"Ready of {node} is {ready}"

    async def devices(self, step: values.ExpectDevices) -> str:
        """What its slices offer."""
        node = self._ground.node(step.rack, step.tray)
        devices = await self._devices(node, step.driver)
        counted = [device for device in devices if device.get("taints") or not step.tainted]
        told = f"{node} publishes {len(counted)}{' tainted' if step.tainted else ''} devices of {step.driver}"
        _require(len(counted) == step.count, told)
        return told

    async def gpus(self, step: values.ExpectGpus) -> str:
        """UUIDs of the slices against those of the tray."""
        node = self._ground.node(step.rack, step.tray)
        published = {_text(one, "uuid") for one in await self._devices(node, GPU_DRIVER)} - {None}
        true, seats = self._ground.uuids(node), len(self._ground.seats(node)[1])
        told = f"{node} publishes {_told(map(str, published))}"
        in_tray = f"in its tray are {_told(true)}, on {seats} seats"
        _require(published == true and len(true) == seats, f"{told}; {in_tray}")
        before = self._gpus_before.setdefault(id(step), self._known_gpus.get(node))
        if step.swapped:
            old = published if before is None else published & before
            _require(not old, f"{told}; of these, {len(old)} were there before")
        self._known_gpus[node] = published
        return told

    async def imex_mesh(self, step: values.ExpectImexMesh) -> str:
        """Who runs, and whom each knows."""
        network = self._ground.stage.imex
        running = list(network.running.values())
        _require(len(running) == step.count, f"{len(running)} nvidia-imex run")
        for one in running:
            domain = {other.address for other in running if other.authority == one.authority}
            strange, unknown = one.peers - domain, domain - one.peers
            _require(not strange, f"{one.address} is told of {_told(strange)}, not of its domain")
            _require(not unknown, f"{one.address} does not know {_told(unknown)}")
            cut = {peer for peer in domain - {one.address} if not network.links(one, peer)}
            _require(not cut, f"{one.address} does not reach {_told(cut)}")
        before = self._imex_before.setdefault(id(step), self._known_imex)
        begun = sum(all(one is not other for other in before) for one in running)
        _require(step.begun in (None, begun), f"{len(running)} nvidia-imex run, {begun} of them since before")
        self._known_imex = running
        told = f"{len(running)} nvidia-imex run, each connected with all of its domain and no other"
        return f"{told}; {begun} of them began since"

    async def _devices(self, node: str, driver: str) -> list[Object]:
        slices = [one["spec"] for one in (await self._ground.api.list(RESOURCE_SLICE)).items]
        own = [one for one in slices if one.get("nodeName") == node and one["driver"] == driver]
        return [device for one in own for device in one.get("devices", ())]

    async def _found(
        self, step: values.ExpectObject | values.ExpectCondition | values.ExpectGone
    ) -> Object | None:
        kind = kind_named(step.kind)
        try:
            return await self._ground.api.get(kind, step.name, step.namespace if kind.namespaced else None)
        except NotFound:
            return None

    def _is_lost(self, pod: Any) -> bool:
        """What the kubelet of a node without power once said of a pod holds no longer."""
        return pod["spec"].get("nodeName") in self._ground.nodes.off


def _told(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _text(device: Object, attribute: str) -> str | None:
    found: str | None = device.get("attributes", {}).get(attribute, {}).get("string")
    return found


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotSeen(otherwise)
