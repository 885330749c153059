"""The site of some objects, as the planner of `place` and the gang controller take it."""

from msgspec.structs import replace

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import placement_site
from rackloom.core.gangs.trays import running_site

READY = [{"type": "Ready", "status": "True"}]


def read_site(nodes, pods=(), labels=SchedulerLabels(), *, claims=(), slices=(), **terms):  # noqa: B008
    return placement_site(read_state(map(as_ready, nodes), pods, claims, slices, labels), **terms)


def as_ready(node):
    """A node whose kubelet has reported, unless the test says what it reported."""
    status = node.get("status") or {}
    return node if "conditions" in status else {**node, "status": {**status, "conditions": READY}}


def with_state(lists, settings):
    """Lists of a gang controller with the facts of them."""
    labels = SchedulerLabels(clique=settings.clique_label)
    state = read_state(map(as_ready, lists.nodes), lists.pods, lists.claims, lists.slices, labels)
    return replace(lists, claims=state.claims, state=state, running=running_site(state))
