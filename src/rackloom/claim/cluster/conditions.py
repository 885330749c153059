"""The conditions of a ComputeDomain: what is true, why, and what would change it.

Ready is never vacuous: it needs nodes, and each of them observed ready. NVIDIA's driver calls a
ComputeDomain of numNodes 0 Ready before it has any.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from rackloom.claim.cluster import teardown
from rackloom.claim.cluster.problems import NAMED_AT_MOST, Problem, listed
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.slots import uses_warm_clique
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode
from rackloom.claim.domain.objects import ComputeDomain, Condition, NodeStatus, Readiness

READY, PROGRESSING, DEGRADED, MESHED = "Ready", "Progressing", "Degraded", "Meshed"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What conditions are computed from."""

    domain: ComputeDomain
    snapshot: Snapshot
    settings: Settings
    joined: frozenset[str]
    """Nodes that are to have a daemon."""
    nodes: tuple[NodeStatus, ...]
    problems: tuple[Problem, ...]


def conditions(view: View) -> tuple[Condition, ...]:
    """Ready, Progressing, Degraded; Meshed where there are peers, SpansCliques where there are nodes.

    Each is dated when its status changed.
    """
    ready = _ready(view)
    said = (ready, _progressing(view, ready), _degraded(view), *_meshed(view), *_spans_cliques(view))
    return tuple(_dated(one, view) for one in said)


def _ready(view: View) -> Condition:
    if view.settings.imex_mode is ImexMode.HOST_MANAGED:
        said = "each node asks its own nvidia-imex when it prepares a claim; it is not observed from here"
        return _condition(READY, "Unknown", "HostManaged", said)
    if not view.nodes:
        return _condition(READY, "False", *_why_no_nodes(view))
    waiting = _not_ready(view)
    if waiting is not None:
        return _condition(READY, _how_sure(view, waiting[0]), *waiting)
    cliques = {node.clique_id for node in view.nodes}
    said = f"{len(view.nodes)} nodes ready, in cliques {listed({one or '(no fabric)' for one in cliques})}"
    return _condition(READY, "True", "AllNodesReady", said)


def _how_sure(view: View, reason: str) -> str:
    """In channel mode the nodes are all of the clique, and which of them a job runs on is not seen here."""
    shared = uses_warm_clique(view.domain, view.settings)
    some = any(node.status is Readiness.READY for node in view.nodes)
    return "Unknown" if shared and some and reason == "NodesNotReady" else "False"


def _why_no_nodes(view: View) -> tuple[str, str]:
    if view.joined:
        return "DaemonsMissing", f"no daemon yet on {listed(view.joined)}"
    if uses_warm_clique(view.domain, view.settings) and view.snapshot.warm is not None:
        return "CliqueNotWarm", f"no IMEX daemon is ready in clique {view.snapshot.warm.clique_id}"
    return "NoNodes", "no channel of it is in use: nodes join when pods that claim a channel land on them"


def _not_ready(view: View) -> tuple[str, str] | None:
    present = {node.name for node in view.nodes}
    missing = view.joined - present
    if missing:
        return "DaemonsMissing", f"no daemon yet on {listed(missing)}"
    waiting = [node.name for node in view.nodes if node.status is not Readiness.READY]
    if waiting:
        return "NodesNotReady", f"IMEX is not READY on {listed(waiting)}"
    if len(present) < view.domain.num_nodes:
        return "TooFewNodes", f"{len(present)} of numNodes {view.domain.num_nodes} nodes have joined"
    return None


def _progressing(view: View, ready: Condition) -> Condition:
    if view.domain.deleting:
        return _deletion(view)
    waits = ready.status == "False" and ready.reason not in ("NoNodes", "TooFewNodes")
    if waits:
        return _condition(PROGRESSING, "True", "WaitingForDaemons", ready.message)
    return _condition(PROGRESSING, "False", "Settled", "nothing is left to do")


def _deletion(view: View) -> Condition:
    users = teardown.users(view.snapshot)
    if users:
        fix = f'end them, or annotate it with {names.ALLOW_DELETION_ANNOTATION}: "true"'
        said = f"deletion would take IMEX from running pods {listed(users)}; {fix}"
        return _condition(PROGRESSING, "False", "DeletionHeld", said)
    return _condition(PROGRESSING, "True", "TearingDown", "its objects are being deleted")


def _degraded(view: View) -> Condition:
    if not view.problems:
        return _condition(DEGRADED, "False", "AsExpected", "nothing is wrong")
    said = "; ".join(problem.message for problem in view.problems)
    return _condition(DEGRADED, "True", view.problems[0].reason, said)


def _meshed(view: View) -> tuple[Condition, ...]:
    """Whether every daemon reaches all its peers: readiness is only about each daemon by itself."""
    of_it = {node.name for node in view.nodes}
    pods = (pod for pod in view.snapshot.pods if pod.node in of_it)
    on = {pod.node: pod.mesh for pod in pods if pod.alive and pod.clique_id}
    if not on:
        return ()
    missing = [peer for mesh in on.values() if mesh is not None for peer in mesh.missing]
    silent = [node for node, mesh in on.items() if mesh is None]
    if any(mesh is not None and not mesh.complete for mesh in on.values()):
        return (_condition(MESHED, "False", "PeersMissing", f"not connected: {listed(set(missing))}"),)
    if silent:
        return (_condition(MESHED, "Unknown", "NotReported", f"not reported by {listed(silent)}"),)
    return (_condition(MESHED, "True", "Complete", f"{len(on)} daemons reach all their peers"),)


def _spans_cliques(view: View) -> tuple[Condition, ...]:
    """Whether its nodes are in several cliques, between which no memory is shared over NVLink.

    Daemons say in which clique they entered, labels in which one the node is now. Each may be behind the
    other when a fabric is partitioned anew: it is enough that one of them shows several. A channel in channel
    mode is of one clique.
    """
    nodes = view.joined | view.snapshot.channel_nodes
    if not nodes or uses_warm_clique(view.domain, view.settings):
        return ()
    status, reason, message = _where_nodes_are(view, nodes)
    return (_condition(names.SPANS_CLIQUES, status, reason, message),)


def _where_nodes_are(view: View, nodes: Collection[str]) -> tuple[str, str, str]:
    labels = {name: one for name, one in view.snapshot.clique_labels.items() if name in nodes}
    entered = {node.name: node.clique_id for node in view.nodes}
    known = labels | entered
    sources = (("IMEX daemons", entered), ("node labels", labels), ("daemons and labels", known))
    for source, cliques in sources:
        if len(set(cliques.values())) > 1:
            apart = f"no memory is shared over NVLink between cliques {_by_clique(cliques)}, by {source}"
            return "True", "SeveralCliques", apart
    silent = [name for name in nodes if name not in known]
    if silent:
        return "Unknown", "CliqueUnknown", f"no clique is known of {listed(silent)}"
    (clique_id,) = set(known.values())
    if not clique_id:
        return "False", "NoFabric", "no NVLink fabric joins its nodes"
    return "False", "OneClique", f"all nodes are in clique {clique_id}"


def _by_clique(cliques: Mapping[str, str]) -> str:
    """The nodes of each clique."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for name, clique_id in cliques.items():
        nodes[clique_id or "(no fabric)"].append(name)
    shown = "; ".join(f"{one} ({listed(nodes[one])})" for one in sorted(nodes)[:NAMED_AT_MOST])
    more = len(nodes) - NAMED_AT_MOST
    return f"{shown} and {more} more cliques" if more > 0 else shown


def _condition(type_: str, status: str, reason: str, message: str) -> Condition:
    return Condition(type=type_, status=status, reason=reason, message=message)


def _dated(new: Condition, view: View) -> Condition:
    old = view.domain.status.condition(new.type)
    same = old is not None and old.status == new.status
    since = old.last_transition_time if old is not None and same else view.snapshot.now
    return msgspec.structs.replace(
        new, last_transition_time=since, observed_generation=view.domain.generation
    )
