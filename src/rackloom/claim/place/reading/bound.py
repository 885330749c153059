"""Trays to which what runs may not be moved: labels and taints of nodes, and pods that it is never beside."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from rackloom.claim.allocate.nodes import MalformedSelector
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.foes import Foes, foes_of
from rackloom.claim.place.reading.jobs import owner_of, part
from rackloom.claim.place.reading.node_rules import node_rule, unmet
from rackloom.claim.place.reading.observed import hold_of
from rackloom.claim.place.reading.pods import Json, Toleration, taints_kept_off
from rackloom.claim.place.values import Hold


def bound(
    holds: Sequence[Hold], nodes: Sequence[Json], pods: Sequence[Json], labels: Labels
) -> tuple[Hold, ...]:
    """The holds with the trays that their owners are kept off, and whom these are kept apart from.

    What one pod of a job may not use, none of them is moved to; where two are never on one node, no two are
    moved to one. A job with a pod that cannot be read stays.
    """
    movable = {hold.owner for hold in holds if hold.movable}
    kept: dict[bytes, frozenset[str] | None] = {}
    off: dict[str, frozenset[str] | None] = {}
    for pod in pods:
        owner = owner_of(pod, labels)
        if owner in movable:
            spec = pod.get("spec") or {}
            ruling = (
                spec.get("nodeSelector"),
                part(spec, ("affinity", "nodeAffinity")),
                spec.get("tolerations"),
            )
            key = msgspec.json.encode(ruling)
            if key not in kept:
                kept[key] = _kept_off(spec, nodes)
            off[owner] = _both(off.get(owner, frozenset()), kept[key])
    foes = foes_of(holds, nodes, pods, labels)
    off |= {owner: _both(off.get(owner, frozenset()), one.nodes) for owner, one in foes.items()}
    return tuple(
        _bound(hold, off.get(hold.owner, frozenset()), foes.get(hold.owner, Foes())) if hold.movable else hold
        for hold in holds
    )


def _bound(hold: Hold, off: frozenset[str] | None, foes: Foes) -> Hold:
    if off is None:
        return replace(hold, movable=False)
    return replace(hold, kept_off=off, apart=foes.owners)


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return None if one is None or other is None else one | other


def _kept_off(spec: Json, nodes: Iterable[Json]) -> frozenset[str] | None:
    """None where the rules are none that Kubernetes knows."""
    try:
        rule = node_rule(spec)
        tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
        return frozenset(
            node["metadata"]["name"]
            for node in nodes
            if any(unmet(rule, node)) or any(taints_kept_off(node, tolerations))
        )
    except (msgspec.ValidationError, MalformedSelector):
        return None


def tolerated(pods: Iterable[Json], labels: Labels) -> tuple[Toleration, ...]:
    """All taints that some pod which may move tolerates: where nobody could go is no place to move to."""
    found: dict[Toleration, None] = {}
    for pod in pods:
        if hold_of(pod, labels).movable:
            with suppress(msgspec.ValidationError):
                spec = pod.get("spec") or {}
                found |= dict.fromkeys(msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...]))
    return tuple(found)
