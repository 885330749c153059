"""The stage of a scenario: the site, its cluster, the ground truth behind them, and the damage that lasts.

Every step gets the `Stage`. Through `SiteControl` steps act on the site service and its network. The virtual
site and the real-time site implement it. A `SwitchControl` is a simulated rack in virtual time, or a
controller on a socket. `ClusterControl` is the simulated cluster.

`Truth` reads the fabrics, never the beliefs of the service: where a machine is, which node a tray is, and
which clique its label must name. Its `invariants` watch every fabric from the start.

A step often compares with the observation of an earlier step of its kind. `previous` gives that, fixed when
the step began, and `record` is for later steps only. So a step that checks many times compares with the
same value each time.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.gang_objects import GangKey
from rackloom.core.cluster.objects import GANG_PLAN, POD, Object, ResourceKind
from rackloom.core.cluster.trays import GangPlan
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.gangs.snapshot import read_record
from rackloom.lab.faults import NetworkFault, SwitchControl
from rackloom.lab.imex.in_process import ImexNetwork
from rackloom.lab.invariants.fabric import FabricInvariants
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.trays import TrayNodes
from rackloom.lab.scenario.controllers import ControllerProcess, ControllerReplicas, ControllersClock
from rackloom.lab.scenario.feature_discovery import FeatureDiscovery
from rackloom.lab.scenario.model import NotObserved
from rackloom.lab.scenario.rest_client import Json, RestAnswer, ScenarioRestClient
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition, SimulatedFabric, machine_id_of
from rackloom.topology.part_names import PartName, read_part_name
from rackloom.topology.rack import ComputeTray, RackProfile, RackSite

ONLY_VIRTUAL = "a real network, clock or write cannot be spoiled: steps that do are refused before the start"


class SiteControl(ABC):
    """The switches, and the service in front of them. Times are in seconds.

    Faults of the network, the clock and single writes are possible in virtual time only.
    """

    site: RackSite
    """Its domains and trays."""
    switches: Sequence[SwitchControl]
    """One for each domain, in their order."""
    api: KubeApi | None = None
    """The API server as a user reaches it, or None if there is no cluster."""
    ended = 0
    """Lives of the service that have ended."""

    @abstractmethod
    async def rest(
        self, tenant: str | None, method: str, path: str, body: Json | None = None
    ) -> RestAnswer | None:
        """Send one request below `/v2/org/{tenant}/nico/`. None if the connection was lost before the answer.

        Without a tenant it is the operator's, below the operator's org.
        """

    @abstractmethod
    async def kill(self, down: float) -> None:
        """End the service, and start it again after so long."""

    @abstractmethod
    async def findings(self) -> Sequence[Finding]:
        """The doctor's findings now. Raises Refused if there is no doctor."""

    def kill_at(self, point: int) -> None:
        """Let the service end at one of its next writes or calls, and start again."""
        raise RuntimeError(ONLY_VIRTUAL)

    def set_clock(self, by: float) -> None:
        """Set the clock of its machine."""
        raise RuntimeError(ONLY_VIRTUAL)

    def spoil(self, switch: int, how: NetworkFault) -> None:
        """Make the network in front of a switch bad."""
        raise RuntimeError(ONLY_VIRTUAL)

    def mend(self) -> None:  # noqa: B027 (nothing is bad where nothing can be spoiled)
        """Networks and clock are good again."""

    def untaken(self) -> Sequence[str]:
        """Requested faults of the network and of the service's lives that have not happened yet."""
        return ()


class SimulatedRacks(msgspec.Struct, frozen=True, kw_only=True):
    """The racks of a site, in the form that a cluster with their trays as nodes needs."""

    site: RackSite
    """Its domains and trays."""
    profile: RackProfile
    """The profile of each rack."""
    seed: str
    """All names of nodes and GPUs are drawn from it."""
    fabrics: tuple[SimulatedFabric, ...]
    """One for each domain, in their order."""


class ClusterControl(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster with the site's trays as nodes."""

    kube: FakeKube
    api: KubeApi
    """The API server as a user reaches it."""
    nodes: TrayNodes
    imex: ImexNetwork
    """The network in which the IMEX daemons truly run."""
    controllers: ControllerProcess
    """Rackloom's controllers. If several are elected, the first of them."""
    candidates: ControllerReplicas | None
    """The replicas that are elected, or None if there is one, without an election."""
    clock: ControllersClock
    """The controllers'."""
    discovery: FeatureDiscovery
    """The writer of nvidia.com/gpu.clique."""
    addresses: dict[str, str]
    """By node, the address of the next IMEX daemon's pod there. Without an entry, the next free address."""


# The ground truth.


class Truth:
    """Every fabric as it is. `holder` maps each machine to the tenant that got it last."""

    def __init__(
        self,
        site: RackSite,
        switches: Sequence[SwitchControl],
        holder: Mapping[str, str],
        nodes: TrayNodes | None = None,
    ) -> None:
        self.site = site
        self.switches = switches
        self.racks = racks_of(site)
        """The first rack of each domain. Steps name a switch by it."""
        self.invariants = FabricInvariants([switch.fabric for switch in switches], holder)
        self.joining: set[str] = set()
        """Nodes with a GPU that reports that it is joining its fabric."""
        self.domains = [switch.fabric.domain for switch in switches]
        """The domain UUID of each rack at the start."""
        self.serials = [
            sorted({gpu.chassis_serial for gpu in switch.fabric.gpus.values()}) for switch in switches
        ]
        """The chassis of each rack at the start."""
        self._nodes = nodes
        self._node_names = {node.tray: node.name for node in nodes or ()}
        self._trays = {
            str(PartName(tray.rack, tray.slot)): tray for domain in site.domains for tray in domain.trays
        }

    def number(self, rack: str) -> int:
        """Which switch is that of a rack, from 0."""
        return self.racks.index(rack)

    def rack(self, rack: str) -> SwitchControl:
        """The switch of a rack."""
        return self.switches[self.number(rack)]

    def machine(self, name: str) -> str:
        """The machine that was in a tray at the start. `name` is that of the tray, or of a part of it."""
        tray = self._tray(name)
        return machine_id_of(tray.chassis_serial, tray.slot)

    def tray_of(self, machine: str) -> str:
        """The name of the tray that a machine is."""
        return next(name for name in self._trays if self.machine(name) == machine)

    def locate(self, machine: str) -> tuple[SwitchControl, tuple[FabricGpu, ...]]:
        """The switch of a machine and the GPUs that are in it now, by module id."""
        for switch in self.switches:
            if found := _gpus_in(switch.fabric, machine):
                return switch, found
        raise NotObserved(f"no fabric shows a GPU of machine {machine}")

    # The nodes of the trays.

    def node(self, name: str) -> str:
        """The node that a tray is. `name` is that of the tray, or of a part of it."""
        return self._node_names[self._tray(name)]

    def _tray(self, name: str) -> ComputeTray:
        return self._trays[str(read_part_name(name).tray)]

    def gpus_of(self, node: str) -> tuple[SimulatedFabric, tuple[FabricGpu, ...]]:
        """The fabric of a node, and the GPUs that are in its tray now."""
        assert self._nodes is not None  # noqa: S101 (only steps of a cluster name nodes)
        tray = self._nodes[node].tray
        domains = zip(self.site.domains, self.switches, strict=True)
        fabric = next(switch.fabric for domain, switch in domains if tray in domain.trays)
        return fabric, _gpus_in(fabric, machine_id_of(tray.chassis_serial, tray.slot))

    def clique(self, node: str) -> str | None:
        """The label that a node must have, from the true fabric, or None if it must have none."""
        fabric, gpus = self.gpus_of(node)
        # GPU Feature Discovery labels a node only if all its GPUs report the same partition.
        held = {fabric.partition_of(gpu.guid) for gpu in gpus}
        if len(held) != 1 or 0 in held or node in self.joining:
            return None
        return f"{fabric.domain}.{held.pop()}"


def _gpus_in(fabric: SimulatedFabric, machine: str) -> tuple[FabricGpu, ...]:
    gpus = (gpu for gpu in fabric.gpus.values() if machine_id_of(gpu.chassis_serial, gpu.slot) == machine)
    return tuple(sorted(gpus, key=lambda gpu: gpu.module_id))


def racks_of(site: RackSite) -> tuple[str, ...]:
    """The first rack of each domain. Steps name the switch of the domain by it."""
    return tuple(domain.racks[0] for domain in site.domains)


# The argument of every step.


class Damage(msgspec.Struct):
    """The damage by steps that is not repaired yet, for `heal`."""

    stopped: set[str] = msgspec.field(default_factory=set)
    """Racks with a controller that was stopped."""
    pulled: dict[str, tuple[SwitchControl, tuple[FabricGpu, ...]]] = msgspec.field(default_factory=dict)
    """Machines with a tray that was taken out, and its GPUs."""
    exchanged: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Pairs of machines with trays in one another's slots."""
    unregistered: set[str] = msgspec.field(default_factory=set)
    """Racks with a leader that is not at the address at which their chassis are registered."""
    succeeded: set[str] = msgspec.field(default_factory=set)
    """Racks where another controller led before."""


class Stage:
    """A site, its cluster if there is one, and the memory of steps."""

    def __init__(self, site: SiteControl, cluster: ClusterControl | None = None) -> None:
        self.site = site
        self.rest = ScenarioRestClient(site)
        self.truth = Truth(site.site, site.switches, self.rest.holder, cluster.nodes if cluster else None)
        self.damage = Damage()
        self.lists_read: dict[str, tuple[SwitchControl, FabricPartition]] = {}
        """Partitions as another writer read them, by the name of that reading."""
        self.with_standby: set[str] = set()
        """Racks with a next leader that is registered, or was before it led."""
        self.new_guids = itertools.count(0xF000_0000_0000_0001)
        """Of GPUs that come into a swapped tray."""
        self.plans_written: Counter[GangKey] = Counter()
        """Plans that were recorded of each gang, one after the other."""
        self._plans: dict[GangKey, GangPlan | None] = {}
        self._cluster = cluster
        if cluster is not None:
            cluster.kube.store.listeners.append(self._count_plan)
        self._recorded: dict[Any, Any] = {}
        self._previous: dict[Any, Any] = {}
        self._first: dict[Any, Any] = {}

    @property
    def has_cluster(self) -> bool:
        """Whether there is one."""
        return self._cluster is not None

    @property
    def cluster(self) -> ClusterControl:
        """Only for steps of that layer."""
        assert self._cluster is not None  # noqa: S101 (else no such step is played)
        return self._cluster

    @property
    def candidates(self) -> ControllerReplicas | None:
        """Rackloom's controllers where they are elected."""
        return self._cluster.candidates if self._cluster else None

    def _count_plan(self, kind: ResourceKind, obj: Object) -> None:
        """Count each plan as it is written, also one that is replaced before it is read."""
        if kind == GANG_PLAN:
            record = read_record(obj)
            is_new = record.plan is not None and record.plan != self._plans.get(record.key)
            self._plans[record.key] = record.plan
            self.plans_written[record.key] += is_new

    def begin_step(self) -> None:
        """From now on `previous` gives the values that were recorded until now."""
        self._previous = dict(self._recorded)
        self._first = {}

    def previous(self, key: object) -> Any:
        """The newest record of an earlier step, or None if there is none."""
        return self._previous.get(key)

    def record(self, key: object, value: object) -> None:
        """For later steps."""
        self._recorded[key] = value

    def at_first_check(self, key: object, value: Any) -> Any:
        """The value that this step found when it checked first."""
        return self._first.setdefault(key, value)

    # Access to the cluster.

    async def pods(self, namespace: str | None, labels: str) -> list[Object]:
        """Pods with these labels that are not being deleted."""
        listed = await self.cluster.api.list(POD, namespace, labels=labels)
        return [pod for pod in listed.items if "deletionTimestamp" not in pod["metadata"]]
