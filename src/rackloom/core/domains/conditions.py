"""The conditions of a ComputeDomain: what is true, why, what would change it, and its events.

Ready is never vacuously true: it needs nodes, and each of them observed ready. (NVIDIA's driver calls a
ComputeDomain with numNodes 0 Ready before it has any node.) Degraded lists the problems, each with what
to change; they heal when it is changed. Meshed says whether every daemon reaches all its peers.
SpansCliques says whether the nodes are in several cliques, between which no memory is shared over
NVLink; daemons and node labels may each be behind when a fabric is partitioned anew, so it is enough
that one source shows several.

In channel mode the nodes are those of the clique's warm IMEX domain, and which of them a job runs on is
not visible here: with some nodes ready, Ready is Unknown instead of False.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from rackloom.core.domains import names, owned
from rackloom.core.domains.clique import Readiness
from rackloom.core.domains.compute_domain import (
    AllocationMode,
    ComputeDomain,
    ComputeDomainNode,
    ComputeDomainStatus,
    Condition,
)
from rackloom.core.domains.names import SPANS_CLIQUES, ImexIsolation, ImexMode
from rackloom.core.domains.owned import RequiredObject, required_objects, uses_warm_clique
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import DomainSnapshot
from rackloom.core.kubernetes.objects import RESOURCE_CLAIM_TEMPLATE, EventNotice

# Problems, the one to solve first in front.


MOST_NAMES = 8
"""Names listed in a message; the rest are counted."""
MOST_ERRORS = 4
"""Different errors of nvidia-imex in one status."""


class DomainProblem(msgspec.Struct, frozen=True):
    """One problem: a condition's reason and message."""

    reason: str
    message: str


def domain_problems(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> tuple[DomainProblem, ...]:
    """All problems of a ComputeDomain that is not being deleted, the one to solve first in front."""
    if snapshot.invalid:
        return (DomainProblem("InvalidSpec", snapshot.invalid),)
    found = [problem for slot in required_objects(domain, snapshot, settings) for problem in _of_slot(slot)]
    found += _of_labels(domain, settings)
    found += _of_cliques(snapshot)
    found += _of_daemons(snapshot)
    if uses_warm_clique(domain, settings):
        found += _of_channel_mode(domain, snapshot)
    found += [DomainProblem("ApiRefused", failure) for failure in snapshot.failures]
    return tuple(found)


def shortened_list(found: Collection[str]) -> str:
    """Names for a message."""
    shown = ", ".join(sorted(found)[:MOST_NAMES])
    more = len(found) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _of_slot(slot: RequiredObject) -> list[DomainProblem]:
    if len(slot.ours) > 1:
        found = ", ".join(sorted(our.called for our in slot.ours))
        return [
            DomainProblem("DuplicateObjects", f"{found} belong to this ComputeDomain; delete all but one")
        ]
    if slot.ours or slot.taken_by is None:
        return []
    whose = f"ComputeDomain {slot.taken_by.domain}" if slot.taken_by.domain else "somebody else"
    fix = f"delete it ({slot.taken_by.called})"
    if slot.kind == RESOURCE_CLAIM_TEMPLATE and slot.wanted["metadata"]["labels"].get(names.TARGET_LABEL) == (
        names.TARGET_WORKLOAD
    ):
        fix += ", or create this ComputeDomain anew with another spec.channel.resourceClaimTemplate.name"
        return [DomainProblem("TemplateNameTaken", f"{slot.called} exists and belongs to {whose}; {fix}")]
    return [DomainProblem("ObjectNameTaken", f"{slot.called} exists and belongs to {whose}; {fix}")]


def _of_labels(domain: ComputeDomain, settings: ControllerSettings) -> list[DomainProblem]:
    asked = domain.labels.get(names.ISOLATION_LABEL)
    if asked == ImexIsolation.CHANNEL and settings.imex_mode is ImexMode.HOST_MANAGED:
        told = f"label {names.ISOLATION_LABEL} asks for a channel of its own, but the hosts run nvidia-imex"
        return [DomainProblem("ChannelModeUnavailable", f"{told} here and share one; remove the label")]
    if asked is None or asked in set(ImexIsolation):
        return []
    known = " or ".join(ImexIsolation)
    return [DomainProblem("UnknownIsolation", f"label {names.ISOLATION_LABEL} is {asked!r}; use {known}")]


def _of_cliques(snapshot: DomainSnapshot) -> list[DomainProblem]:
    return [
        DomainProblem(
            "IsolationMixed",
            f"nodes of clique {clique_id} disagree about isolation ({', '.join(said)}), but a node holds one"
            f" IMEX session; give all of them the same {names.ISOLATION_LABEL}",
        )
        for clique_id, said in sorted(snapshot.mixed_nodes.items())
    ]


def _of_daemons(snapshot: DomainSnapshot) -> list[DomainProblem]:
    """Nodes on which nvidia-imex does not run, by what it logged; in channel mode those of the clique."""
    pods = (*snapshot.pods, *(() if snapshot.warm is None else snapshot.warm.pods))
    errors: dict[str, set[str]] = {}
    for pod in pods:
        if pod.alive and pod.imex_error:
            errors.setdefault(pod.imex_error, set()).add(pod.node)
    return [
        DomainProblem("ImexStartFailed", f"nvidia-imex does not run on {shortened_list(nodes)}: {error}")
        for error, nodes in sorted(errors.items())[:MOST_ERRORS]
    ]


def _of_channel_mode(domain: ComputeDomain, snapshot: DomainSnapshot) -> list[DomainProblem]:
    if domain.allocation_mode is AllocationMode.ALL:
        fix = f"use Single, or label the ComputeDomain {names.ISOLATION_LABEL}=domain"
        return [
            DomainProblem("AllChannelsRefused", f"allocationMode All would take every job's channel; {fix}")
        ]
    return [*_of_claim_size(snapshot), *_of_clique_size(domain, snapshot)]


def _of_claim_size(snapshot: DomainSnapshot) -> list[DomainProblem]:
    shared = names.shared_claim_name(snapshot.uid)
    pods = sum(len(claim.reserved_for) for claim in snapshot.claims if claim.thing.name == shared)
    if pods < names.PODS_PER_CLAIM:
        return []
    limit = f"ResourceClaim {shared} is reserved for {pods} pods, the most that one claim allows"
    return [
        DomainProblem("ClaimFull", f"{limit}; further pods wait: put more GPUs in each pod, or split the job")
    ]


def _of_clique_size(domain: ComputeDomain, snapshot: DomainSnapshot) -> list[DomainProblem]:
    if snapshot.warm is None or domain.num_nodes <= len(snapshot.warm.nodes):
        return []
    has = f"clique {snapshot.warm.clique_id} has {len(snapshot.warm.nodes)}"
    fix = "one channel spans one clique: ask for fewer, or use a ComputeDomain per clique"
    return [DomainProblem("ExceedsClique", f"numNodes is {domain.num_nodes}, and {has}; {fix}")]


# Conditions.


READY, PROGRESSING, DEGRADED, MESHED = "Ready", "Progressing", "Degraded", "Meshed"


class ConditionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What conditions are computed from."""

    domain: ComputeDomain
    snapshot: DomainSnapshot
    settings: ControllerSettings
    joined: frozenset[str]
    """Nodes that are to have a daemon."""
    nodes: tuple[ComputeDomainNode, ...]
    problems: tuple[DomainProblem, ...]


def domain_conditions(view: ConditionInputs) -> tuple[Condition, ...]:
    """Ready, Progressing, Degraded; Meshed where there are peers, SpansCliques where there are nodes.

    Each is dated when its status changed.
    """
    ready = _ready(view)
    said = (ready, _progressing(view, ready), _degraded(view), *_meshed(view), *_spans_cliques(view))
    return tuple(_with_transition_time(one, view) for one in said)


def _ready(view: ConditionInputs) -> Condition:
    if view.settings.imex_mode is ImexMode.HOST_MANAGED:
        said = "each node asks its own nvidia-imex when it prepares a claim; it is not observed from here"
        return _new_condition(READY, "Unknown", "HostManaged", said)
    if not view.nodes:
        return _new_condition(READY, "False", *_why_no_nodes(view))
    waiting = _not_ready(view)
    if waiting is not None:
        return _new_condition(READY, _status_of_not_ready(view, waiting[0]), *waiting)
    cliques = {node.clique_id for node in view.nodes}
    names = shortened_list({clique or "(no fabric)" for clique in cliques})
    said = f"{len(view.nodes)} nodes ready, in cliques {names}"
    return _new_condition(READY, "True", "AllNodesReady", said)


def _status_of_not_ready(view: ConditionInputs, reason: str) -> str:
    """In channel mode the nodes are all of the clique, and which of them a job runs on is not seen here."""
    shared = uses_warm_clique(view.domain, view.settings)
    some = any(node.status is Readiness.READY for node in view.nodes)
    return "Unknown" if shared and some and reason == "NodesNotReady" else "False"


def _why_no_nodes(view: ConditionInputs) -> tuple[str, str]:
    if view.joined:
        return "DaemonsMissing", f"no daemon yet on {shortened_list(view.joined)}"
    if uses_warm_clique(view.domain, view.settings) and view.snapshot.warm is not None:
        return "CliqueNotWarm", f"no IMEX daemon is ready in clique {view.snapshot.warm.clique_id}"
    return "NoNodes", "no channel of it is in use: nodes join when pods that claim a channel land on them"


def _not_ready(view: ConditionInputs) -> tuple[str, str] | None:
    present = {node.name for node in view.nodes}
    missing = view.joined - present
    if missing:
        return "DaemonsMissing", f"no daemon yet on {shortened_list(missing)}"
    waiting = [node.name for node in view.nodes if node.status is not Readiness.READY]
    if waiting:
        return "NodesNotReady", f"IMEX is not READY on {shortened_list(waiting)}"
    if len(present) < view.domain.num_nodes:
        return "TooFewNodes", f"{len(present)} of numNodes {view.domain.num_nodes} nodes have joined"
    return None


def _progressing(view: ConditionInputs, ready: Condition) -> Condition:
    if view.domain.deleting:
        return _deletion(view)
    waits = ready.status == "False" and ready.reason not in ("NoNodes", "TooFewNodes")
    if waits:
        return _new_condition(PROGRESSING, "True", "WaitingForDaemons", ready.message)
    return _new_condition(PROGRESSING, "False", "Settled", "nothing is left to do")


def _deletion(view: ConditionInputs) -> Condition:
    users = owned.channel_users(view.snapshot)
    if users:
        fix = f'end them, or annotate it with {names.ALLOW_DELETION_ANNOTATION}: "true"'
        said = f"deletion would take IMEX from running pods {shortened_list(users)}; {fix}"
        return _new_condition(PROGRESSING, "False", "DeletionHeld", said)
    return _new_condition(PROGRESSING, "True", "TearingDown", "its objects are being deleted")


def _degraded(view: ConditionInputs) -> Condition:
    if not view.problems:
        return _new_condition(DEGRADED, "False", "AsExpected", "nothing is wrong")
    said = "; ".join(problem.message for problem in view.problems)
    return _new_condition(DEGRADED, "True", view.problems[0].reason, said)


def _meshed(view: ConditionInputs) -> tuple[Condition, ...]:
    """Whether every daemon reaches all its peers: readiness is only about each daemon by itself."""
    of_it = {node.name for node in view.nodes}
    pods = (pod for pod in view.snapshot.pods if pod.node in of_it)
    on = {pod.node: pod.mesh for pod in pods if pod.alive and pod.clique_id}
    if not on:
        return ()
    missing = [peer for mesh in on.values() if mesh is not None for peer in mesh.missing]
    silent = [node for node, mesh in on.items() if mesh is None]
    if any(mesh is not None and not mesh.complete for mesh in on.values()):
        return (
            _new_condition(MESHED, "False", "PeersMissing", f"not connected: {shortened_list(set(missing))}"),
        )
    if silent:
        return (
            _new_condition(MESHED, "Unknown", "NotReported", f"not reported by {shortened_list(silent)}"),
        )
    return (_new_condition(MESHED, "True", "Complete", f"{len(on)} daemons reach all their peers"),)


def _spans_cliques(view: ConditionInputs) -> tuple[Condition, ...]:
    """Whether its nodes are in several cliques, between which no memory is shared over NVLink.

    Daemons say in which clique they entered, labels in which one the node is now. Each may be behind the
    other when a fabric is partitioned anew: it is enough that one of them shows several. A channel in channel
    mode is of one clique.
    """
    nodes = view.joined | view.snapshot.channel_nodes
    if not nodes or uses_warm_clique(view.domain, view.settings):
        return ()
    status, reason, message = _where_nodes_are(view, nodes)
    return (_new_condition(names.SPANS_CLIQUES, status, reason, message),)


def _where_nodes_are(view: ConditionInputs, nodes: Collection[str]) -> tuple[str, str, str]:
    labels = {name: label for name, label in view.snapshot.clique_labels.items() if name in nodes}
    entered = {node.name: node.clique_id for node in view.nodes}
    known = labels | entered
    sources = (("IMEX daemons", entered), ("node labels", labels), ("daemons and labels", known))
    for source, cliques in sources:
        if len(set(cliques.values())) > 1:
            apart = f"no memory is shared over NVLink between cliques {_by_clique(cliques)}, by {source}"
            return "True", "SeveralCliques", apart
    silent = [name for name in nodes if name not in known]
    if silent:
        return "Unknown", "CliqueUnknown", f"no clique is known of {shortened_list(silent)}"
    (clique_id,) = set(known.values())
    if not clique_id:
        return "False", "NoFabric", "no NVLink fabric joins its nodes"
    return "False", "OneClique", f"all nodes are in clique {clique_id}"


def _by_clique(cliques: Mapping[str, str]) -> str:
    """The nodes of each clique."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for name, clique_id in cliques.items():
        nodes[clique_id or "(no fabric)"].append(name)
    shown = "; ".join(f"{node} ({shortened_list(nodes[node])})" for node in sorted(nodes)[:MOST_NAMES])
    more = len(nodes) - MOST_NAMES
    return f"{shown} and {more} more cliques" if more > 0 else shown


def _new_condition(type_: str, status: str, reason: str, message: str) -> Condition:
    return Condition(type=type_, status=status, reason=reason, message=message)


def _with_transition_time(new: Condition, view: ConditionInputs) -> Condition:
    old = view.domain.status.condition(new.type)
    same = old is not None and old.status == new.status
    since = old.last_transition_time if old is not None and same else view.snapshot.now
    return msgspec.structs.replace(
        new, last_transition_time=since, observed_generation=view.domain.generation
    )


# Events about changed conditions.


_WARNING_CONDITIONS = {("Degraded", "True"), (SPANS_CLIQUES, "True")}
"""Types and statuses of conditions that are told as warnings when they begin."""


def status_events(old: ComputeDomainStatus, new: ComputeDomainStatus) -> tuple[EventNotice, ...]:
    """One notice for each condition that turned into something a person may want to know."""
    told = (_status_event(old.condition(condition.type), condition) for condition in new.conditions)
    return tuple(notice for notice in told if notice is not None)


def _status_event(old: Condition | None, new: Condition) -> EventNotice | None:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    if (new.type, new.status) in _WARNING_CONDITIONS or new.reason == "DeletionHeld":
        return EventNotice(True, new.reason, new.message)
    if new.type != "Ready":
        return None
    if new.status == "True":
        return EventNotice(False, new.reason, new.message)
    was_ready = old is not None and old.status == "True"
    return EventNotice(True, new.reason, new.message) if was_ready else None
