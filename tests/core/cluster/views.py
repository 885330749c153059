"""The site of some objects, as the planner of `place` and the gang controller take it."""

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import placement_site
from rackloom.core.gangs.snapshot import ClusterLists, GangSettings
from rackloom.core.gangs.trays import running_site

READY = [{"type": "Ready", "status": "True"}]


def read_site(nodes, pods=(), labels=SchedulerLabels(), *, claims=(), slices=(), **terms):  # noqa: B008
    return placement_site(read_state(map(as_ready, nodes), pods, claims, slices, labels), **terms)


def as_ready(node):
    """A node with Ready conditions, unless the test set its conditions."""
    status = node.get("status") or {}
    return node if "conditions" in status else {**node, "status": {**status, "conditions": READY}}


def lists_of(nodes=(), pods=(), claims=(), slices=(), *, settings=GangSettings(), **others):  # noqa: B008
    """The lists that the gang controller makes of a cluster."""
    labels = SchedulerLabels(clique=settings.clique_label)
    state = read_state(map(as_ready, nodes), pods, claims, slices, labels)
    return ClusterLists(slices=tuple(slices), state=state, running=running_site(state), **others)
