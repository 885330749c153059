"""What must be observed of a scenario's cluster: objects, pods, labels, slices, IMEX, gangs.

Each expectation is a step type and a method that looks once at the API server and compares it with the
truth: the partition that the fabric holds a node's GPUs in, the GPUs that answer in a tray, the IMEX
daemons that run in memory. What a node without power once reported of its pods does not count.

For gangs the probe reads the record, the members' pods and the reservations of trays at one moment.
Every plan that was recorded is counted as it is written, and members that moved are counted against
what the previous step saw.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from rackloom.claim.kube.api import NotFound
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.core.gangs import spec
from rackloom.core.gangs.conditions import PLACED
from rackloom.core.gangs.record import GangKey, GangRecord, read_record, read_tray_node
from rackloom.core.kubernetes.objects import GANG_PLAN, NODE, RESOURCE_SLICE, Object, ResourceKind
from rackloom.core.kubernetes.pods import GANG_LABEL
from rackloom.core.place.placement_values import GangPlan
from rackloom.lab.imex.in_process import InMemoryImex
from rackloom.lab.scenario.cluster_actions import kind_named
from rackloom.lab.scenario.model import ClusterExpectation, NotObserved
from rackloom.lab.scenario.stage import ClusterTruth


class ExpectImexMesh(ClusterExpectation, frozen=True, kw_only=True, tag="imex-mesh"):
    """So many nvidia-imex truly run, and each knows and reaches those of its own domain, and no other.

    `begun`: so many of them did not run when the last such step looked.
    """

    count: int
    begun: int | None = None


class ExpectGpus(ClusterExpectation, frozen=True, kw_only=True, tag="gpus"):
    """A node publishes (UUIDs) what is in its tray; `swapped`: nothing that the last such step saw."""

    tray: int
    rack: int = 1
    swapped: bool = False


class ExpectObject(ClusterExpectation, frozen=True, kw_only=True, tag="object"):
    """A field of an object, at the keys of `path`, is `equals` (as text); without that, it is not there."""

    kind: str
    name: str
    path: tuple[str, ...]
    equals: str | None = None
    namespace: str = "default"


class ExpectCondition(ClusterExpectation, frozen=True, kw_only=True, tag="condition"):
    """A condition of an object has this status, and `reason`."""

    kind: str
    name: str
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str | None = None
    namespace: str = "default"


class ExpectGang(ClusterExpectation, frozen=True, kw_only=True, tag="gang"):
    """A gang's record has so many `seats` and `spares`; so many members are `running` on reserved seats.

    `moved`: so many have another seat than the last such step saw; `plans`: so many were recorded in all.
    """

    name: str
    seats: int
    spares: int = 0
    running: int | None = None
    moved: int | None = None
    plans: int | None = None
    namespace: str = "default"


class ExpectReserved(ClusterExpectation, frozen=True, kw_only=True, tag="reserved-trays"):
    """So many trays are reserved for gangs."""

    count: int


class ExpectGone(ClusterExpectation, frozen=True, kw_only=True, tag="gone"):
    """There is no such object."""

    kind: str
    name: str
    namespace: str = "default"


class ExpectPods(ClusterExpectation, frozen=True, kw_only=True, tag="pods"):
    """So many pods with these labels are in this phase, on nodes whose kubelets say so now."""

    labels: str
    count: int
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Running"
    namespace: str = "default"


class ExpectOneClique(ClusterExpectation, frozen=True, kw_only=True, tag="one-clique"):
    """All pods with these labels are on nodes of one NVLink partition, as the true fabrics say."""

    labels: str
    namespace: str = "default"


class ExpectCliqueLabel(ClusterExpectation, frozen=True, kw_only=True, tag="clique-label"):
    """nvidia.com/gpu.clique is what the GPUs truly say; or (`present` false) none, or (`stale`) old."""

    tray: int
    rack: int = 1
    present: bool = True
    stale: bool = False


class ExpectNode(ClusterExpectation, frozen=True, kw_only=True, tag="node"):
    """A node is Ready, or (`ready` false) is not."""

    tray: int
    rack: int = 1
    ready: bool = True


class ExpectDevices(ClusterExpectation, frozen=True, kw_only=True, tag="devices"):
    """So many devices of a driver are published of a tray; `tainted` counts those with a taint alone."""

    driver: str
    count: int
    tray: int
    rack: int = 1
    tainted: bool = False


# Probes of objects and nodes.


class ClusterProbes:
    """Eyes on a cluster."""

    def __init__(self, ground: ClusterTruth) -> None:
        self._ground = ground
        self._known_gpus: dict[str, set[str | None]] = {}
        """What nodes published when a `gpus` step last looked."""
        self._gpus_before: dict[int, set[str | None] | None] = {}
        """By step, what its node published when the one before it last looked."""
        self._known_imex: list[InMemoryImex] = []
        """Those that ran when an `imex-mesh` step last saw what it must."""
        self._imex_before: dict[int, list[InMemoryImex]] = {}
        """By step, those of the one before it."""

    async def object(self, step: ExpectObject) -> str:
        """A field of an object."""
        found: Any = await self._found(step)
        _require(found is not None, f"there is no {step.kind} {step.name}")
        for key in step.path:
            found = found.get(key) if isinstance(found, dict) else None
        seen = None if found is None else str(found)
        told = f"{'.'.join(step.path)} of {step.kind} {step.name} is {seen}"
        _require(seen == step.equals, told)
        return told

    async def condition(self, step: ExpectCondition) -> str:
        """One of those that its status says."""
        found = await self._found(step) or {}
        said = (found.get("status") or {}).get("conditions") or ()
        one: Object = next((one for one in said if one["type"] == step.type), {})
        told = f"{step.type} of {step.kind} {step.name} is {one.get('status')}, {one.get('reason')}"
        told = f"{told}: {one['message']}" if one.get("message") else told
        _require(one.get("status") == step.status, told)
        _require(step.reason in (None, one.get("reason")), told)
        return told

    async def gone(self, step: ExpectGone) -> str:
        """No such object."""
        _require(await self._found(step) is None, f"{step.kind} {step.name} is still there")
        return f"{step.kind} {step.name} is gone"

    async def pods(self, step: ExpectPods) -> str:
        """How many are in which phase."""
        pods = await self._ground.pods(step.namespace, step.labels)
        phases = Counter(pod["status"].get("phase", "Pending") for pod in pods if not self._is_lost(pod))
        told = ", ".join(f"{number} {phase}" for phase, number in sorted(phases.items())) or "none"
        _require(phases[step.phase] == step.count, f"pods {step.labels}: {told}")
        return f"pods {step.labels}: {told}"

    async def one_clique(self, step: ExpectOneClique) -> str:
        """True cliques of the nodes of pods."""
        pods = await self._ground.pods(step.namespace, step.labels)
        placed = [pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")]
        cliques = {self._ground.clique(node) for node in placed}
        _require(bool(placed), f"no pod {step.labels} is on a node")
        told = f"{len(placed)} pods {step.labels} are in {', '.join(sorted(map(str, cliques)))}"
        _require(len(cliques) == 1 and None not in cliques, told)
        return told

    async def clique_label(self, step: ExpectCliqueLabel) -> str:
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

    async def node(self, step: ExpectNode) -> str:
        """Its Ready condition."""
        node = self._ground.node(step.rack, step.tray)
        conditions = (await self._ground.api.get(NODE, node))["status"].get("conditions", ())
        ready = next(
            (condition["status"] for condition in conditions if condition["type"] == "Ready"), "absent"
        )
        _require((ready == "True") == step.ready, f"Ready of {node} is {ready}")
        return f"Ready of {node} is {ready}"

    async def devices(self, step: ExpectDevices) -> str:
        """What its slices offer."""
        node = self._ground.node(step.rack, step.tray)
        devices = await self._devices(node, step.driver)
        counted = [device for device in devices if device.get("taints") or not step.tainted]
        told = f"{node} publishes {len(counted)}{' tainted' if step.tainted else ''} devices of {step.driver}"
        _require(len(counted) == step.count, told)
        return told

    async def gpus(self, step: ExpectGpus) -> str:
        """UUIDs of the slices against those of the tray."""
        node = self._ground.node(step.rack, step.tray)
        published = {_attribute_text(device, "uuid") for device in await self._devices(node, GPU_DRIVER)} - {
            None
        }
        true, seats = self._ground.uuids(node), len(self._ground.seats(node)[1])
        told = f"{node} publishes {_sorted_names(map(str, published))}"
        in_tray = f"in its tray are {_sorted_names(true)}, on {seats} seats"
        _require(published == true and len(true) == seats, f"{told}; {in_tray}")
        before = self._gpus_before.setdefault(id(step), self._known_gpus.get(node))
        if step.swapped:
            old = published if before is None else published & before
            _require(not old, f"{told}; of these, {len(old)} were there before")
        self._known_gpus[node] = published
        return told

    async def imex_mesh(self, step: ExpectImexMesh) -> str:
        """Who runs, and whom each knows."""
        network = self._ground.stage.imex
        running = list(network.running.values())
        _require(len(running) == step.count, f"{len(running)} nvidia-imex run")
        for one in running:
            domain = {other.address for other in running if other.authority == one.authority}
            strange, unknown = one.peers - domain, domain - one.peers
            _require(not strange, f"{one.address} is told of {_sorted_names(strange)}, not of its domain")
            _require(not unknown, f"{one.address} does not know {_sorted_names(unknown)}")
            cut = {peer for peer in domain - {one.address} if not network.links(one, peer)}
            _require(not cut, f"{one.address} does not reach {_sorted_names(cut)}")
        before = self._imex_before.setdefault(id(step), self._known_imex)
        begun = sum(all(one is not other for other in before) for one in running)
        _require(step.begun in (None, begun), f"{len(running)} nvidia-imex run, {begun} of them since before")
        self._known_imex = running
        told = f"{len(running)} nvidia-imex run, each connected with all of its domain and no other"
        return f"{told}; {begun} of them began since"

    async def _devices(self, node: str, driver: str) -> list[Object]:
        slices = [item["spec"] for item in (await self._ground.api.list(RESOURCE_SLICE)).items]
        own = [slice_ for slice_ in slices if slice_.get("nodeName") == node and slice_["driver"] == driver]
        return [device for one in own for device in one.get("devices", ())]

    async def _found(self, step: ExpectObject | ExpectCondition | ExpectGone) -> Object | None:
        kind = kind_named(step.kind)
        try:
            return await self._ground.api.get(kind, step.name, step.namespace if kind.namespaced else None)
        except NotFound:
            return None

    def _is_lost(self, pod: Any) -> bool:
        """What the kubelet of a node without power once said of a pod holds no longer."""
        return pod["spec"].get("nodeName") in self._ground.nodes.off


def _sorted_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _attribute_text(device: Object, attribute: str) -> str | None:
    found: str | None = device.get("attributes", {}).get(attribute, {}).get("string")
    return found


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotObserved(otherwise)


# Probes of gangs.


AssignedTrays = dict[tuple[str, int], str]
"""Trays, by group and number in it."""


class GangProbes:
    """Eyes on gangs. Methods raise `KubeError`; each plan that is recorded is noted as it is written."""

    def __init__(self, ground: ClusterTruth) -> None:
        self._ground = ground
        self._plans: dict[GangKey, list[GangPlan | None]] = defaultdict(lambda: [None])
        """Every plan of a gang one after the other; None: it had none."""
        self._known: dict[GangKey, AssignedTrays] = {}
        """What a `gang` step saw last."""
        self._before: dict[int, AssignedTrays | None] = {}
        """By step, what the one before it saw last."""
        ground.kube.store.listeners.append(self._note)

    async def gang(self, step: ExpectGang) -> str:
        """Record, pods and taints at one moment."""
        found = await self._record(step)
        if found.plan is None:
            placed = found.condition(PLACED)
            why = "nobody says why" if placed is None else placed.message
            raise NotObserved(f"no plan is recorded of {step.name}: {why}")
        plan, running = found.plan, await self._running(found, found.plan)
        told = f"{len(plan.seats)} seats and {len(plan.spares)} spares of {step.name}, {running} running"
        _require_of_gang((len(plan.seats), len(plan.spares)) == (step.seats, step.spares), told)
        _require_of_gang(step.running in (None, running), told)
        moved = self._moved(step, found.key, plan)
        written = sum(one is not None for one in self._plans[found.key])
        told = f"{told}; {moved} moved; {written} plans were recorded"
        _require_of_gang(step.moved in (None, moved), told)
        _require_of_gang(step.plans in (None, written), told)
        return told

    async def reserved(self, step: ExpectReserved) -> str:
        """Taints of nodes, whichever gang's."""
        reserved = sum(len(holders) > 0 for holders in (await self._holders()).values())
        told = f"{reserved} trays are reserved"
        _require_of_gang(reserved == step.count, told)
        return told

    def _note(self, kind: ResourceKind, obj: Object) -> None:
        if kind == GANG_PLAN:
            found = read_record(obj)
            if self._plans[found.key][-1] != found.plan:
                self._plans[found.key].append(found.plan)

    async def _record(self, step: ExpectGang) -> GangRecord:
        try:
            return read_record(await self._ground.api.get(GANG_PLAN, step.name, step.namespace))
        except NotFound as missing:
            raise NotObserved(f"there is no GangPlan {step.name}") from missing

    async def _running(self, found: GangRecord, plan: GangPlan) -> int:
        """Members on seats of theirs, whose trays are reserved for this gang alone."""
        holders = await self._holders()
        seats = Counter(
            (seat.group, seat.tray) for seat in plan.seats if holders.get(seat.tray) == (found.uid,)
        )
        pods = await self._ground.pods(found.key.namespace, f"{GANG_LABEL}={found.key.name}")
        return (seats & Counter(map(_assignment_of, filter(self._runs, pods)))).total()

    def _runs(self, pod: Object) -> bool:
        is_off = pod["spec"].get("nodeName") in self._ground.nodes.off
        return pod["status"].get("phase") == "Running" and not is_off

    async def _holders(self) -> dict[str, tuple[str, ...]]:
        nodes = map(read_tray_node, (await self._ground.api.list(NODE)).items)
        return {node.name: node.holders for node in nodes}

    def _moved(self, step: ExpectGang, key: GangKey, plan: GangPlan) -> int:
        now = {(seat.group, seat.member): seat.tray for seat in plan.seats}
        before = self._before.setdefault(id(step), self._known.get(key)) or now
        self._known[key] = now
        return sum(before.get(member) != tray for member, tray in now.items())


def _assignment_of(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["labels"].get(spec.GROUP_LABEL, spec.DEFAULT_GROUP), pod["spec"]["nodeName"]


def _require_of_gang(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotObserved(otherwise)
