"""The stage of a scenario: the interfaces through which steps act, and the ground truth behind them.

`SiteControl` and `SwitchControl` are what steps can do to the site service, its network and its
switches; `ClusterControl` is the same for the API server, the nodes, the IMEX daemons and Rackloom's
controllers. The virtual site, the real-time site and the simulated cluster implement them.

`FabricTruth` watches every fabric from the start and never asks the service what it believes. At each
change it checks that a GPU is in one partition (S1), that a changed partition holds no GPUs of two
tenants (S2), and that the service left alone what somebody made by hand (S4). Changes made by a
scenario's own faults are excluded (`hand`).

`ClusterTruth` finds the node of a tray and what its label, cliques and GPU UUIDs must be, read off the
fabric.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from rackloom.claim.kube.api import KubeApi
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.domains.names import GPU_CLIQUE_LABEL
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import Object
from rackloom.lab.imex.in_process import ImexNetwork
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.trays import TrayNodes
from rackloom.lab.scenario.model import ONLY_VIRTUAL, NmxcAction, NotObserved, Speed
from rackloom.lab.switches.fabric import (
    FabricGpu,
    FabricPartition,
    FabricSnapshot,
    SimulatedFabric,
    machine_id_of,
)
from rackloom.lab.switches.faults import NmxcFaults


class NetworkBad(NmxcAction, frozen=True, kw_only=True, tag="network-bad"):
    """What the network does to the next change that is asked of a rack, or from now on to all calls."""

    how: Literal["applied-late", "applied-twice", "accepted-only", "dark", "slow", "notices-lost"]
    rack: int = 1
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL


Json = dict[str, Any]


class RestAnswer(msgspec.Struct, frozen=True):
    """What REST answered; `body` is None where there was none."""

    status: int
    body: Any


class SwitchControl(Protocol):
    """The controller of one NVLink domain, and the fabric behind it as it truly is."""

    @property
    def fabric(self) -> SimulatedFabric:
        """GPUs and partitions; whoever changes it is a hand behind the site's back."""

    @property
    def faults(self) -> NmxcFaults:
        """How coming calls are mistreated."""

    @property
    def url(self) -> str:
        """Where it answers, or did before it went away."""

    async def stand_by(self) -> str:
        """Have another controller of the domain ready to lead; returns where it answers. It lists no GPU."""

    async def move(self) -> None:
        """That one leads: nobody answers at the address of before any more, and subscriptions end."""

    async def old_leader_returns(self) -> str:
        """Where the leader moved from one answers again, as leader, with what it knew; returns its URL."""

    async def old_leader_yields(self) -> None:
        """That one has learned who leads, and lists no GPU; nothing happens where it is away."""

    async def go_away(self) -> None:
        """Nobody answers there any more, and subscriptions end."""

    async def come_back(self) -> None:
        """It answers again; nothing happens where it does."""


class SiteControl(Protocol):
    """The carve part: switches, and the service in front of them. Times are in seconds."""

    @property
    def switches(self) -> Sequence[SwitchControl]:
        """One for each domain, in the order of racks."""

    async def rest(self, tenant: str, method: str, path: str, body: Json | None = None) -> RestAnswer | None:
        """One request below `/v2/org/{tenant}/nico/`; None: the connection was lost before the answer."""

    async def operate(self, method: str, path: str, body: Json | None = None) -> RestAnswer | None:
        """The same as the site's operator, below the operator's org."""

    async def kill(self, down: float) -> None:
        """End the service, and start it again after so long."""

    def kill_at(self, point: int) -> None:
        """Let the service end at one of its next writes or calls, and start again."""

    def set_clock(self, by: float) -> None:
        """Set the clock of its machine."""

    def spoil(self, switch: int, how: NetworkBad) -> None:
        """Make the network in front of a switch bad."""

    def untaken(self) -> Sequence[str]:
        """What was asked of the network and of the service's lives, and has not happened yet."""

    def mend(self) -> None:
        """Networks and clock are good again."""

    async def findings(self) -> Sequence[Finding]:
        """What the doctor finds now. Raises Refused where there is none."""


# What steps can do to the processes of a cluster.


class ControllerControl(Protocol):
    """Rackloom's controllers, of which one life follows the other."""

    @property
    def ended(self) -> int:
        """Lives that were ended."""

    async def kill(self, down: float) -> None:
        """End this life, and let another begin after so many seconds."""

    def die(self, point: int, lives: int) -> None:
        """Let so many lives end at their `point`-th step: before a write, or after it."""

    def double(self) -> None:
        """Let others work beside these."""

    async def single(self) -> None:
        """End the others."""


class ElectionControl(Protocol):
    """Replicas of Rackloom's controllers, of which one leads. Leaders are called as in their Lease."""

    @property
    def leader(self) -> str | None:
        """Who leads now; None: nobody does."""

    @property
    def overlaps(self) -> Sequence[str]:
        """When two led at once, in words."""

    async def kill_leader(self, down: float) -> str | None:
        """End the leader without a word, and let it stand again so many seconds later; returns who it was."""

    def cut_off_leader(self) -> str | None:
        """Let it reach the API server no more; returns who it was."""

    def connect(self) -> None:
        """Let all reach it."""


class ControllerClock(Protocol):
    """What the controllers' machine believes; `skew` is seconds more than the time."""

    skew: float


class FeatureDiscovery(Protocol):
    """GPU Feature Discovery; `lag` is how many seconds later it writes what it found."""

    lag: float


class ClusterControl(Protocol):
    """A running cluster."""

    @property
    def kube(self) -> FakeKube:
        """The API server."""

    @property
    def nodes(self) -> TrayNodes:
        """The trays."""

    @property
    def imex(self) -> ImexNetwork:
        """Where the IMEX daemons truly are."""

    @property
    def controllers(self) -> ControllerControl:
        """Rackloom's; where several are elected, the first of them."""

    @property
    def candidates(self) -> ElectionControl | None:
        """Those who are elected; None: there is one, without an election."""

    @property
    def clock(self) -> ControllerClock:
        """Theirs."""

    @property
    def discovery(self) -> FeatureDiscovery:
        """The writer of nvidia.com/gpu.clique."""

    @property
    def addresses(self) -> dict[str, str]:
        """By node, the address that the next IMEX daemon's pod there gets."""


# The true fabrics, and the promises checked on them.


class FabricTruth:
    """Every fabric, watched from now on. `holder` tells which tenant was last given a machine."""

    def __init__(self, switches: Sequence[SwitchControl], holder: Mapping[str, str]) -> None:
        self.switches = switches
        self.judged = 0
        """Changes of fabrics that were judged."""
        self.broken: list[str] = []
        """Promises that were not kept, in words."""
        self.by_hand: dict[str, tuple[SimulatedFabric, FabricPartition]] = {}
        """Partitions that somebody made on a switch, as they made them."""
        self._holder = holder
        self._hand = False
        self._machines = [_machines_by_tray(one.fabric) for one in switches]
        self._before = {id(one.fabric): one.fabric.snapshot() for one in switches}
        for switch in switches:
            switch.fabric.on_change(partial(self._judge, switch.fabric))

    def rack(self, number: int) -> SwitchControl:
        """The switch of a rack, the first being 1."""
        return self.switches[number - 1]

    def machine(self, rack: int, tray: int) -> str:
        """The machine that was in a tray of a rack at the start, both counted from 1."""
        return self._machines[rack - 1][tray - 1]

    def seat(self, machine: str) -> tuple[SwitchControl, tuple[FabricGpu, ...]]:
        """The switch of a machine and the GPUs that are in it now, by module id."""
        for switch in self.switches:
            found = [
                gpu
                for gpu in switch.fabric.gpus.values()
                if machine_id_of(gpu.chassis_serial, gpu.slot) == machine
            ]
            if found:
                return switch, tuple(sorted(found, key=lambda gpu: gpu.module_id))
        raise NotObserved(f"no fabric shows a GPU of machine {machine}")

    @contextmanager
    def hand(self) -> Iterator[None]:
        """What is changed meanwhile is not the service's doing."""
        self._hand = True
        try:
            yield
        finally:
            self._hand = False

    def _judge(self, fabric: SimulatedFabric, after: FabricSnapshot) -> None:
        """Compare a change with what may never happen."""
        before, self._before[id(fabric)] = self._before[id(fabric)], after
        self.judged += 1
        self._one_partition_each(after)
        if not self._hand:
            self._tenants_apart(before, after)
            self._hands_off(before, after)

    def _one_partition_each(self, after: FabricSnapshot) -> None:
        seen: set[int] = set()
        for partition in after.partitions:
            if twice := seen & set(partition.guids):
                self.broken.append(
                    f"S1: {len(twice)} GPUs of {partition.name!r} are in another partition too"
                )
            seen |= set(partition.guids)

    def _tenants_apart(self, before: FabricSnapshot, after: FabricSnapshot) -> None:
        machines = {gpu.guid: machine_id_of(gpu.chassis_serial, gpu.slot) for gpu in after.gpus}
        for partition in set(after.partitions) - set(before.partitions):
            seats = {machines[guid] for guid in partition.guids if guid in machines}
            tenants = {self._holder[seat] for seat in seats if seat in self._holder}
            if len(tenants) > 1:
                self.broken.append(f"S2: {partition.name!r} holds GPUs of {', '.join(sorted(tenants))}")

    def _hands_off(self, before: FabricSnapshot, after: FabricSnapshot) -> None:
        names = self.by_hand.keys()
        for partition in set(before.partitions) - set(after.partitions):
            if partition.name in names:
                self.broken.append(f"S4: the service changed {partition.name!r}, which somebody made by hand")


def _machines_by_tray(fabric: SimulatedFabric) -> list[str]:
    """The machines of a rack, by tray."""
    seats = {(gpu.tray_index, gpu.chassis_serial, gpu.slot) for gpu in fabric.gpus.values()}
    return [machine_id_of(serial, slot) for _, serial, slot in sorted(seats)]


# The true cluster.


class ClusterTruth:
    """API server and nodes; `api` asks the server as a user does."""

    def __init__(self, stage: ClusterControl, api: KubeApi, switches: Sequence[SwitchControl]) -> None:
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
        found = await self.api.get(objects.NODE, node)
        label: str | None = found["metadata"].get("labels", {}).get(GPU_CLIQUE_LABEL)
        return label

    async def pods(self, namespace: str, labels: str) -> list[Object]:
        """Pods with these labels that nobody deletes."""
        listed = await self.api.list(objects.POD, namespace, labels=labels)
        return [item for item in listed.items if "deletionTimestamp" not in item["metadata"]]
