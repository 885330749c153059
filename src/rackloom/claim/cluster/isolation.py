"""Which cliques hand out channels instead of whole IMEX domains, and what one in that mode needs.

A node holds one IMEX session, so all nodes of a clique are in the same mode. In channel mode one IMEX domain
per clique is kept warm, as a ComputeDomain of the controller's own in the daemons' namespace; where its
daemon is ready the node carries a label, and one ResourceSlice offers the clique's channels on the nodes
that carry it. Channel 0 is not among them: it is what a claim in domain mode injects.
"""

from collections.abc import Iterable

import msgspec

from rackloom.claim.cluster.actions import Action, Create, Patch, delete, unlabel
from rackloom.claim.cluster.notices import Notice
from rackloom.claim.cluster.offers import pool_manifest, warm_manifest
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.things import Thing
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode, Isolation, isolation_of
from rackloom.claim.domain.objects import ComputeDomain, NodeStatus, Readiness, compute_domain
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, RESOURCE_SLICE


class CliqueView(msgspec.Struct, frozen=True, kw_only=True):
    """One clique and what is there of channel mode in it."""

    clique_id: str
    said: frozenset[Isolation]
    """What its nodes are set to; empty when it has no node."""
    nodes: tuple[Thing, ...]
    warm: ComputeDomain | None
    warm_thing: Thing | None
    members: tuple[NodeStatus, ...] = ()
    """Nodes of the warm domain, as its daemons say."""
    marked: tuple[Thing, ...] = ()
    """Nodes on which the warm domain's daemon runs or shall run."""
    labelled: tuple[Thing, ...] = ()
    """Nodes on which the clique's channels are offered now."""
    pool: Thing | None = None
    """The ResourceSlice."""
    in_use: bool = False
    """Whether a claim has one of its channels."""


def warm_domain(found: Iterable[Object], settings: Settings) -> ComputeDomain | None:
    """The controller's own ComputeDomain among those that carry a clique's label."""
    ours = (obj for obj in found if obj["metadata"]["namespace"] in settings.namespaces)
    return next((compute_domain(obj) for obj in ours), None)


def said_of(nodes: Iterable[Thing], settings: Settings) -> frozenset[Isolation]:
    """What the nodes of a clique are set to: all the same, if all is well."""
    return frozenset(isolation_of(node.labels, settings.isolation) for node in nodes)


def reconcile_clique(view: CliqueView, settings: Settings) -> tuple[Action, ...]:
    """What to do so that a clique offers channels, or no longer does. A mixed one is left as it is."""
    if len(view.said) > 1:
        return ()
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    if managed and view.said == {Isolation.CHANNEL}:
        return (*_warming(view, settings), *_marking(view), *_labelling(view), *_offering(view))
    return _withdrawing(view)


def mixed_notice(view: CliqueView) -> Notice | None:
    """What to tell about a clique whose nodes disagree."""
    if len(view.said) < 2:
        return None
    said = f"the nodes of clique {view.clique_id} disagree about isolation ({', '.join(sorted(view.said))})"
    return Notice(True, "IsolationMixed", f"{said}; give all of them the same {names.ISOLATION_LABEL}")


def _warming(view: CliqueView, settings: Settings) -> tuple[Action, ...]:
    if view.warm is not None:
        return ()
    return (Create(kind=COMPUTE_DOMAIN, obj=warm_manifest(view.clique_id, settings)),)


def _marking(view: CliqueView) -> tuple[Action, ...]:
    # A label of our own decides where the daemon runs: whoever writes the clique's label may take it off for
    # a moment, and the daemons of running jobs must not end with it.
    marked, members = {node.name for node in view.marked}, {node.name for node in view.nodes}
    on = (
        _label(node, names.WARM_CLIQUE_LABEL, view.clique_id)
        for node in view.nodes
        if node.name not in marked
    )
    off = (
        unlabel(node, names.WARM_CLIQUE_LABEL, view.clique_id)
        for node in view.marked
        if node.name not in members
    )
    return (*on, *off)


def _offering(view: CliqueView) -> tuple[Action, ...]:
    if view.pool is not None or not view.members:
        return ()
    return (Create(kind=RESOURCE_SLICE, obj=pool_manifest(view.clique_id)),)


def _labelling(view: CliqueView) -> tuple[Action, ...]:
    # A warm domain that is being deleted waits for the jobs that use it, and takes no new ones.
    stays = view.warm is not None and not view.warm.deleting
    ready = {node.name for node in view.members if stays and node.status is Readiness.READY}
    offered = {node.name for node in view.labelled}
    on = (
        _label(node, names.CHANNELS_READY_LABEL, view.clique_id)
        for node in view.nodes
        if node.name in ready - offered
    )
    off = (
        unlabel(node, names.CHANNELS_READY_LABEL, view.clique_id)
        for node in view.labelled
        if node.name not in ready
    )
    return (*on, *off)


def _withdrawing(view: CliqueView) -> tuple[Action, ...]:
    """First nothing new is offered; the IMEX domain stays while a job still has a channel of it."""
    off = tuple(unlabel(node, names.CHANNELS_READY_LABEL, view.clique_id) for node in view.labelled)
    if off or view.in_use:
        return off
    if view.pool is not None:
        return (delete(view.pool),)
    marks = tuple(unlabel(node, names.WARM_CLIQUE_LABEL, view.clique_id) for node in view.marked)
    if view.warm_thing is None or view.warm_thing.deleting:
        return marks
    return (*marks, delete(view.warm_thing))


def _label(node: Thing, label: str, value: str) -> Patch:
    patch = {"metadata": {"labels": {label: value}}}
    return Patch(kind=node.kind, namespace=None, name=node.name, patch=patch)
