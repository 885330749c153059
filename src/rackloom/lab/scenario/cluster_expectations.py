"""The expectations on a scenario's cluster: objects, pods, labels, slices, IMEX, gangs.

Each expectation reads the API server once and compares the answer with the truth: the partition in which
the fabric holds a node's GPUs, the GPUs that answer in a tray, the IMEX daemons that run in memory. Earlier
reports of pods by a node that is now without power do not count.

For gangs the record, the members' pods and the reservations of trays are read at one moment. Members
that moved are counted against the observation of the previous step.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from rackloom.claim.kube.api import NotFound
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.core.cluster.gang_objects import DEFAULT_GROUP, GROUP_LABEL, read_tray_node
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import GANG_PLAN, NODE, RESOURCE_SLICE, Object
from rackloom.core.cluster.pods import GANG_LABEL
from rackloom.core.gangs.snapshot import PLACED, read_record
from rackloom.lab.scenario.model import NotObserved, expectation, require
from rackloom.lab.scenario.parameters import (
    Count,
    Driver,
    KindName,
    NamedObject,
    ObjectName,
    Tray,
    kind_named,
)
from rackloom.lab.scenario.stage import Stage

# Objects.


@expectation(layer="cluster")
async def object_(
    stage: Stage,
    *,
    kind: KindName,
    name: ObjectName,
    path: tuple[str, ...],
    equals: str | None = None,
    namespace: str = "default",
) -> str:
    """A field of an object, at the keys of `path`, is `equals` (as text). Without `equals`, it is absent."""
    found: Any = await _read(stage, kind, name, namespace)
    require(found is not None, f"there is no {kind} {name}")
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    value = None if found is None else str(found)
    return require(value == equals, f"{'.'.join(path)} of {kind} {name} is {value}")


@expectation(layer="cluster")
async def condition(
    stage: Stage,
    *,
    kind: KindName,
    name: str,
    type: str,  # noqa: A002 (the key in files, as in Kubernetes)
    status: Literal["True", "False", "Unknown"],
    reason: str | None = None,
    namespace: str = "default",
) -> str:
    """A condition of an object has this status, and reason."""
    found = _condition_of(await _read(stage, kind, name, namespace) or {}, type)
    text = f"{type} of {kind} {name} is {found.get('status')}, {found.get('reason')}"
    text = f"{text}: {found['message']}" if found.get("message") else text
    return require(found.get("status") == status and reason in (None, found.get("reason")), text)


@expectation(layer="cluster")
async def gone(stage: Stage, *, kind: KindName, name: NamedObject, namespace: str = "default") -> str:
    """There is no such object."""
    require(await _read(stage, kind, name, namespace) is None, f"{kind} {name} is still there")
    return f"{kind} {name} is gone"


async def _read(stage: Stage, kind: str, name: str, namespace: str) -> Object | None:
    known = kind_named(kind)
    try:
        return await stage.cluster.api.get(known, name, namespace if known.namespaced else None)
    except NotFound:
        return None


def _condition_of(obj: Object, kind: str) -> Object:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    found: Object = next((found for found in conditions if found["type"] == kind), {})
    return found


# Pods.


@expectation(layer="cluster")
async def pods(
    stage: Stage,
    *,
    labels: str,
    count: Count,
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Running",
    namespace: str = "default",
) -> str:
    """`count` pods with these labels are in this phase, on nodes with kubelets that report it now."""
    present = [pod for pod in await stage.pods(namespace, labels) if not _is_on_lost_node(stage, pod)]
    phases = Counter(pod["status"].get("phase", "Pending") for pod in present)
    counts = ", ".join(f"{number} {found}" for found, number in sorted(phases.items())) or "none"
    return require(phases[phase] == count, f"pods {labels}: {counts}")


@expectation(layer="cluster")
async def one_clique(stage: Stage, *, labels: str, namespace: str = "default") -> str:
    """All pods with these labels are on nodes of one NVLink partition, as the true fabrics say."""
    found = await stage.pods(namespace, labels)
    nodes = [pod["spec"]["nodeName"] for pod in found if pod["spec"].get("nodeName")]
    cliques = {stage.truth.clique(node) for node in nodes}
    require(nodes, f"no pod {labels} is on a node")
    return require(
        len(cliques) == 1 and None not in cliques,
        f"{len(nodes)} pods {labels} are in {', '.join(sorted(map(str, cliques)))}",
    )


def _is_on_lost_node(stage: Stage, pod: Object) -> bool:
    return pod["spec"].get("nodeName") in stage.cluster.nodes.off


# Nodes and their devices.


@expectation(layer="cluster")
async def clique_label(stage: Stage, *, tray: Tray, present: bool = True, stale: bool = False) -> str:
    """nvidia.com/gpu.clique of a tray is the true clique of its GPUs.

    Or (`present` false) there is none, or (`stale`) it is old.
    """
    node = stage.truth.node(tray)
    labels = (await stage.cluster.api.get(NODE, node))["metadata"].get("labels", {})
    label, clique = labels.get(GPU_CLIQUE_LABEL), stage.truth.clique(node)
    if stale:
        text = f"{node} says {label or 'no clique'}, its fabric {clique or 'none'}"
        require(label is not None and label != clique, text)
        return text
    require(label == clique, f"{node} says {label}, its fabric {clique}")
    require((label is not None) == present, f"{node} says {label}")
    return f"{node} says {label or 'no clique'}, as its fabric does"


@expectation(layer="cluster")
async def node(stage: Stage, *, tray: Tray, ready: bool = True) -> str:
    """A node is Ready, or (`ready` false) is not."""
    name = stage.truth.node(tray)
    status = _condition_of(await stage.cluster.api.get(NODE, name), "Ready").get("status", "absent")
    return require((status == "True") == ready, f"Ready of {name} is {status}")


@expectation(layer="cluster")
async def devices(stage: Stage, *, driver: Driver, count: Count, tray: Tray, tainted: bool = False) -> str:
    """`count` devices of a driver are published for a tray. `tainted` counts only those with a taint."""
    name = stage.truth.node(tray)
    counted = [
        device for device in await _devices(stage, name, driver) if device.get("taints") or not tainted
    ]
    return require(
        len(counted) == count,
        f"{name} publishes {len(counted)}{' tainted' if tainted else ''} devices of {driver}",
    )


@expectation(layer="cluster")
async def gpus(stage: Stage, *, tray: Tray, swapped: bool = False) -> str:
    """A node publishes (UUIDs) the GPUs in its tray. `swapped`: none of those that the last such step saw."""
    name = stage.truth.node(tray)
    published = {
        device["attributes"]["uuid"]["string"]
        for device in await _devices(stage, name, GPU_DRIVER)
        if device.get("attributes", {}).get("uuid", {}).get("string")
    }
    answering = set(stage.cluster.nodes[name].gpus.uuids.values())
    present = len(stage.truth.gpus_of(name)[1])
    text = f"{name} publishes {_sorted_names(published)}"
    in_tray = f"in its tray are {_sorted_names(answering)}, on {present} seats"
    require(published == answering and len(answering) == present, f"{text}; {in_tray}")
    key = "gpus", name
    before = stage.previous(key)
    if swapped:
        old = published if before is None else published & before
        require(not old, f"{text}; of these, {len(old)} were there before")
    stage.record(key, published)
    return text


async def _devices(stage: Stage, name: str, driver: str) -> list[Object]:
    slices = [item["spec"] for item in (await stage.cluster.api.list(RESOURCE_SLICE)).items]
    own = [slice_ for slice_ in slices if slice_.get("nodeName") == name and slice_["driver"] == driver]
    return [device for slice_ in own for device in slice_.get("devices", ())]


def _sorted_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# IMEX.


@expectation(layer="cluster")
async def imex_mesh(stage: Stage, *, count: Count, begun: int | None = None) -> str:
    """`count` nvidia-imex truly run, and each knows and reaches those in its domain, and no other.

    `begun`: the number of them that did not run when the last such step looked.
    """
    network = stage.cluster.imex
    running = list(network.running.values())
    require(len(running) == count, f"{len(running)} nvidia-imex run")
    for daemon in running:
        domain = {peer.address for peer in running if peer.authority == daemon.authority}
        strange, unknown = daemon.peers - domain, domain - daemon.peers
        require(not strange, f"{daemon.address} is told of {_sorted_names(strange)}, not of its domain")
        require(not unknown, f"{daemon.address} does not know {_sorted_names(unknown)}")
        cut = {peer for peer in domain - {daemon.address} if not network.links(daemon, peer)}
        require(not cut, f"{daemon.address} does not reach {_sorted_names(cut)}")
    before = stage.previous("imex") or ()
    started = sum(all(daemon is not known for known in before) for daemon in running)
    require(begun in (None, started), f"{len(running)} nvidia-imex run, {started} of them since before")
    stage.record("imex", running)
    text = f"{len(running)} nvidia-imex run, each connected with all of its domain and no other"
    return f"{text}; {started} of them began since"


# Gangs.


@expectation(layer="cluster")
async def gang(
    stage: Stage,
    *,
    name: str,
    seats: int,
    spares: int = 0,
    running: int | None = None,
    moved: int | None = None,
    plans: int | None = None,
    namespace: str = "default",
) -> str:
    """A gang's record has this number of `seats` and `spares`.

    `running`: how many members run on seats reserved for this gang alone. `moved`: how many have another
    seat than the last such step saw. `plans`: how many plans were recorded in all.
    """
    stored = await _read(stage, GANG_PLAN.kind, name, namespace)
    require(stored is not None, f"there is no GangPlan {name}")
    record = read_record(stored or {})
    plan, placed = record.plan, record.status.condition(PLACED)
    why = "nobody says why" if placed is None else placed.message
    if plan is None:
        raise NotObserved(f"no plan is recorded of {name}: {why}")

    # A member runs where its pod does, on a tray of the plan that is reserved for this gang alone.
    holders = await _holders(stage)
    assigned = Counter(
        (seat.group, seat.tray) for seat in plan.seats if holders.get(seat.tray) == (record.uid,)
    )
    present = Counter(
        (
            pod["metadata"]["labels"].get(GROUP_LABEL, DEFAULT_GROUP),
            pod["spec"]["nodeName"],
        )
        for pod in await stage.pods(record.key.namespace, f"{GANG_LABEL}={record.key.name}")
        if pod["status"].get("phase") == "Running" and not _is_on_lost_node(stage, pod)
    )
    at_work = (assigned & present).total()
    text = f"{len(plan.seats)} seats and {len(plan.spares)} spares of {name}, {at_work} running"
    require((len(plan.seats), len(plan.spares)) == (seats, spares) and running in (None, at_work), text)

    trays = {(seat.group, seat.member): seat.tray for seat in plan.seats}
    key = "gang", record.key
    before = stage.previous(key) or trays
    stage.record(key, trays)
    changed = sum(before.get(member) != tray for member, tray in trays.items())
    written = stage.plans_written[record.key]
    return require(
        moved in (None, changed) and plans in (None, written),
        f"{text}; {changed} moved; {written} plans were recorded",
    )


@expectation(layer="cluster")
async def reserved_trays(stage: Stage, *, count: Count) -> str:
    """So many trays are reserved for gangs."""
    reserved = sum(len(holders) > 0 for holders in (await _holders(stage)).values())
    return require(reserved == count, f"{reserved} trays are reserved")


async def _holders(stage: Stage) -> dict[str, tuple[str, ...]]:
    """By node, the gangs for which it is reserved."""
    nodes = map(read_tray_node, (await stage.cluster.api.list(NODE)).items)
    return {tray.name: tray.holders for tray in nodes}
