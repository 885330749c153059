"""What is left of ComputeDomains after they are gone: nothing, anywhere, is the only good answer."""

from collections.abc import Iterator
from pathlib import Path

from rackloom.claim.cluster.gang.observe import holders_of
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    GANG_PLAN,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
)
from rackloom.claim.node.values import State
from rackloom.twin.claims.machines import Machine
from rackloom.twin.claims.plant import TEAM, Plant
from rackloom.twin.claims.tray import Tray

_NONE_LEFT = (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    GANG_PLAN,
    NETWORK_POLICY,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
)
_LABELS = (names.COMPUTE_DOMAIN_LABEL, names.WARM_CLIQUE_LABEL, names.CHANNELS_READY_LABEL)


def leftovers(plant: Plant) -> Iterator[str]:
    """All of it, named."""
    yield from _objects(plant)
    for machine in plant.machines.on.values():
        yield from _of(machine)


def stray_labels(plant: Plant) -> tuple[str, ...]:
    """Labels of nodes that are on and belong to a ComputeDomain, but have no pod of a job, named."""
    store = plant.kube.store
    used = {pod["spec"].get("nodeName") for pod in store.all(POD) if pod["metadata"]["namespace"] == TEAM}
    labelled = {
        node["metadata"]["name"]
        for node in store.all(NODE)
        if names.COMPUTE_DOMAIN_LABEL in (node["metadata"].get("labels") or {})
    }
    stray = sorted((labelled - used) & plant.machines.on.keys())
    return tuple(f"label {names.COMPUTE_DOMAIN_LABEL} of node {node}" for node in stray)


def left_on(plant: Plant, name: str) -> tuple[str, ...]:
    """What is left on one tray that no job uses, if it is on, while ComputeDomains live.

    The mark of a claim that was given up stays until the next sweep, and is in nobody's way.
    """
    node, machine = plant.kube.store.find(NODE, (None, name)), plant.machines.on.get(name)
    marks = () if node is None else _marks_of(node)
    return (*marks, *(() if machine is None else _prepared(machine, but_for=State.ABORTED)))


def _objects(plant: Plant) -> Iterator[str]:
    store = plant.kube.store
    for kind in _NONE_LEFT:
        for obj in store.all(kind):
            yield f"{kind.kind} {obj['metadata']['name']}"
    for node in store.all(NODE):
        yield from _marks_of(node)
    for one in store.all(RESOURCE_SLICE):
        if names.clique_of_pool(one["spec"]["pool"]["name"]) is not None:
            yield f"ResourceSlice {one['metadata']['name']}"


def _marks_of(node: Object) -> Iterator[str]:
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    for label in _LABELS:
        if label in labels:
            yield f"label {label} of node {name}"
    for uid in holders_of(node):
        yield f"node {name} is reserved for the gang {uid}"


def _of(machine: Machine) -> Iterator[str]:
    tray = machine.tray
    yield from _prepared(machine)
    yield from _files(tray, tray.domains)


def _prepared(machine: Machine, but_for: State | None = None) -> Iterator[str]:
    tray = machine.tray
    if machine.running is None:
        yield f"no plugin answers on {tray.name}"
    else:
        for uid, entry in machine.running.checkpoint.claims.items():
            if entry.state is not but_for:
                yield f"checkpoint entry {uid} ({entry.state}) on {tray.name}"
    yield from _files(tray, tray.places.cdi)


def _files(tray: Tray, directory: Path) -> Iterator[str]:
    if directory.is_dir():
        for path in directory.iterdir():
            yield f"{path.relative_to(tray.disk)} on {tray.name}"
