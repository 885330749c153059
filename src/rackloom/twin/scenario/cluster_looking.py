"""What must be seen of a scenario's cluster: one look at its objects. Methods raise `KubeError`."""

from collections import Counter
from typing import Any

from rackloom.claim.kube.api import NotFound, Object
from rackloom.claim.kube.kinds import NODE, RESOURCE_SLICE
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_objects import kind_named
from rackloom.twin.scenario.stage import NotSeen


class ClusterLooking:
    """Eyes on a cluster."""

    def __init__(self, ground: ClusterGround) -> None:
        self._ground = ground

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
        slices = [one["spec"] for one in (await self._ground.api.list(RESOURCE_SLICE)).items]
        own = [one for one in slices if one.get("nodeName") == node and one["driver"] == step.driver]
        devices = [device for one in own for device in one.get("devices", ())]
        counted = [device for device in devices if device.get("taints") or not step.tainted]
        told = f"{node} publishes {len(counted)}{' tainted' if step.tainted else ''} devices of {step.driver}"
        _require(len(counted) == step.count, told)
        return told

    async def _found(self, step: values.ExpectObject | values.ExpectGone) -> Object | None:
        kind = kind_named(step.kind)
        try:
            return await self._ground.api.get(kind, step.name, step.namespace if kind.namespaced else None)
        except NotFound:
            return None

    def _is_lost(self, pod: Any) -> bool:
        """What the kubelet of a node without power once said of a pod holds no longer."""
        return pod["spec"].get("nodeName") in self._ground.nodes.off


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotSeen(otherwise)
