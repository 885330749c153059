"""The cluster of a scenario, as its hands and eyes reach it."""

from collections.abc import Sequence

from rackloom.claim.domain.names import GPU_CLIQUE_LABEL
from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import KubeApi, Object
from rackloom.twin.scenario.cluster_stage import ClusterStage
from rackloom.twin.scenario.stage import Switch
from rackloom.twin.switches.fabric import SimulatedFabric


class ClusterGround:
    """API server and nodes; `api` asks the server as a user does."""

    def __init__(self, stage: ClusterStage, api: KubeApi, switches: Sequence[Switch]) -> None:
        self.stage = stage
        self.kube = stage.kube
        self.api = api
        self.nodes = nodes = stage.nodes
        self.joining: set[str] = set()
        """Nodes with a GPU that says that it is joining its fabric."""
        self._switches = dict(enumerate(switches, 1))
        domains = [switch.fabric.domain for switch in switches]
        self._trays = {
            number: [node.name for node in nodes if node.domain == domain]
            for number, domain in enumerate(domains, 1)
        }

    def node(self, rack: int, tray: int) -> str:
        """The node that a tray is."""
        return self._trays[rack][tray - 1]

    def clique(self, node: str) -> str | None:
        """What the label of a node must be, read off the true fabric; None: there must be none."""
        fabric, guids = self.seats(node)
        held = {fabric.partition_of(guid) for guid in guids}
        if len(held) != 1 or 0 in held or node in self.joining:
            return None
        return f"{fabric.domain}.{held.pop()}"

    def seats(self, node: str) -> tuple[SimulatedFabric, tuple[int, ...]]:
        """The fabric of a node, and the GUIDs of the GPUs that are in its tray now."""
        tray = self.nodes[node].tray
        fabric = next(self._switches[rack].fabric for rack, names in self._trays.items() if node in names)
        here = (tray.chassis_serial, tray.slot)
        guids = (gpu.guid for gpu in fabric.gpus.values() if (gpu.chassis_serial, gpu.slot) == here)
        return fabric, tuple(guids)

    def uuids(self, node: str) -> set[str]:
        """The UUIDs of the GPUs that answer in its tray now."""
        return set(self.nodes[node].gpus.uuids.values())

    async def label(self, node: str) -> str | None:
        """The clique that the node object says."""
        found = await self.api.get(kinds.NODE, node)
        label: str | None = found["metadata"].get("labels", {}).get(GPU_CLIQUE_LABEL)
        return label

    async def pods(self, namespace: str, labels: str) -> list[Object]:
        """Pods with these labels that nobody deletes."""
        listed = await self.api.list(kinds.POD, namespace, labels=labels)
        return [one for one in listed.items if "deletionTimestamp" not in one["metadata"]]
