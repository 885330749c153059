"""Leftovers of deleted ComputeDomains: objects, labels, claims, files. Each is a violation.

A clean end is a promise of the design: after any disruption, no object, label, reservation, prepared claim or
file of a ComputeDomain outlives it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.simulation.compute_domains.tray import ImexTray

from rackloom.claim.node.plugin import PrepareState
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import reserving_plans
from rackloom.core.cluster.objects import (
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
    Object,
)
from rackloom.lab.kube.store import ObjectStore

TraysOn = Mapping[str, ImexTray]
"""Trays that have power, by node."""
_KINDS_TO_BE_GONE = (
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
_LABELS_TO_BE_GONE = (names.COMPUTE_DOMAIN_LABEL, names.WARM_CLIQUE_LABEL, names.CHANNELS_READY_LABEL)


def find_leftovers(store: ObjectStore, on: TraysOn) -> Iterator[str]:
    """All of it, named."""
    yield from _leftover_objects(store)
    for tray in on.values():
        yield from _leftover_claims(tray)
        yield from _leftover_files(tray, tray.domains)


def find_stray_labels(store: ObjectStore, on: TraysOn, jobs: str) -> tuple[str, ...]:
    """Labels of nodes that are on and belong to a ComputeDomain, but have no pod of namespace `jobs`."""
    used = {pod["spec"].get("nodeName") for pod in store.all(POD) if pod["metadata"]["namespace"] == jobs}
    labelled = {
        node["metadata"]["name"]
        for node in store.all(NODE)
        if names.COMPUTE_DOMAIN_LABEL in (node["metadata"].get("labels") or {})
    }
    stray = sorted((labelled - used) & on.keys())
    return tuple(f"label {names.COMPUTE_DOMAIN_LABEL} of node {node}" for node in stray)


def leftovers_on_tray(store: ObjectStore, on: TraysOn, tray: ImexTray) -> tuple[str, ...]:
    """Leftovers on one tray that no job uses, if the tray is on, while ComputeDomains live.

    The mark of a claim that was given up stays until the next sweep, and blocks nothing.
    """
    node = store.find(NODE, (None, tray.name))
    labels = () if node is None else _leftover_node_labels(node)
    claims = _leftover_claims(tray, but_for=PrepareState.ABORTED) if tray.name in on else ()
    return (*labels, *claims)


def _leftover_objects(store: ObjectStore) -> Iterator[str]:
    for kind in _KINDS_TO_BE_GONE:
        for obj in store.all(kind):
            yield f"{kind.kind} {obj['metadata']['name']}"
    for node in store.all(NODE):
        yield from _leftover_node_labels(node)
    for slice_ in store.all(RESOURCE_SLICE):
        if names.clique_of_pool(slice_["spec"]["pool"]["name"]) is not None:
            yield f"ResourceSlice {slice_['metadata']['name']}"


def _leftover_node_labels(node: Object) -> Iterator[str]:
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    for label in _LABELS_TO_BE_GONE:
        if label in labels:
            yield f"label {label} of node {name}"
    for uid in reserving_plans(node):
        yield f"node {name} is reserved for the gang {uid}"


def _leftover_claims(tray: ImexTray, but_for: PrepareState | None = None) -> Iterator[str]:
    plugin = tray.running.get(names.IMEX_DRIVER)
    if plugin is None:
        yield f"no plugin answers on {tray.name}"
    else:
        for uid, entry in plugin.checkpoint.claims.items():
            if entry.state is not but_for:
                yield f"checkpoint entry {uid} ({entry.state}) on {tray.name}"
    yield from _leftover_files(tray, tray.places.cdi)


def _leftover_files(tray: ImexTray, directory: Path) -> Iterator[str]:
    if directory.is_dir():
        for path in directory.iterdir():
            yield f"{path.relative_to(tray.disk)} on {tray.name}"
