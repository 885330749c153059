"""The conditions of a ComputeDomain, each with its reason and remedy, and its events.

Ready is never vacuously true: it needs nodes, and each of them observed ready. (NVIDIA's driver calls a
ComputeDomain with numNodes 0 Ready before it has any node.) Degraded lists the problems, each
with its remedy, and they heal after it. Meshed shows whether every daemon reaches all its peers.
SpansCliques shows whether the nodes are in several cliques, between which no memory is shared over NVLink.
Daemons and node labels may each be behind after a new partitioning of a fabric, so it is enough if one
source shows several.

A ComputeDomain that Kueue counts has QuotaReserved, which names the quota that it waits for.

In channel mode the nodes are those of the clique's warm IMEX domain, and which of them a job runs on is
not visible here: with some nodes ready, Ready is Unknown instead of False.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomain,
    ComputeDomainNode,
    ComputeDomainStatus,
    Readiness,
)
from rackloom.core.cluster.names import SPANS_CLIQUES, ImexIsolation, ImexMode
from rackloom.core.cluster.objects import (
    RESOURCE_CLAIM_TEMPLATE,
    Condition,
    EventNotice,
    dated_condition,
    labels_of,
)
from rackloom.core.domains import owned
from rackloom.core.domains.owned import (
    RequiredObject,
    asks_for_channels_of_others,
    required_objects,
    uses_warm_clique,
)
from rackloom.core.domains.quota import QuotaState
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import DomainSnapshot

# Problems, the one to solve first in front.


MOST_NAMES = 8
"""Names listed in a message. The rest are counted."""
MOST_ERRORS = 4
"""Different errors of nvidia-imex in one status."""


class DomainProblem(msgspec.Struct, frozen=True):
    """One problem: a condition's reason and message."""

    reason: str
    message: str


def domain_problems(domain: ComputeDomain, snapshot: DomainSnapshot) -> tuple[DomainProblem, ...]:
    """All problems of a ComputeDomain that is not being deleted, the one to solve first in front."""
    if snapshot.invalid:
        return (DomainProblem("InvalidSpec", snapshot.invalid),)
    conflicts = map(_of_required, required_objects(domain, snapshot))
    problems = [problem for problem in conflicts if problem is not None]
    problems += [*_of_labels(domain, snapshot.settings), *_of_cliques(snapshot), *_of_daemons(snapshot)]
    if uses_warm_clique(domain, snapshot.settings):
        problems += _of_channel_mode(domain, snapshot)
    return (*problems, *api_failures(snapshot))


def api_failures(snapshot: DomainSnapshot) -> tuple[DomainProblem, ...]:
    """Writes that the API server rejected."""
    return tuple(DomainProblem("ApiRefused", failure) for failure in snapshot.failures)


def shortened_list(names: Collection[str]) -> str:
    """The first names in order for a message, and the number of the others."""
    shown = ", ".join(sorted(names)[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _of_required(required: RequiredObject) -> DomainProblem | None:
    """Why a required object cannot exist: only a free name is filled, and nothing is deleted for it."""
    if len(required.ours) > 1:
        titles = ", ".join(sorted(owned.title for owned in required.ours))
        message = f"{titles} belong to this ComputeDomain; delete all but one"
        return DomainProblem("DuplicateObjects", message)
    taken_by = required.taken_by
    if required.ours or taken_by is None:
        return None
    owner = f"ComputeDomain {taken_by.domain}" if taken_by.domain else "somebody else"
    message = f"{required.title} exists and belongs to {owner}; delete it ({taken_by.title})"
    target = labels_of(required.wanted).get(names.TARGET_LABEL)
    if required.kind == RESOURCE_CLAIM_TEMPLATE and target == names.TARGET_WORKLOAD:
        fix = "or create this ComputeDomain anew with another spec.channel.resourceClaimTemplate.name"
        return DomainProblem("TemplateNameTaken", f"{message}, {fix}")
    return DomainProblem("ObjectNameTaken", message)


def _of_labels(domain: ComputeDomain, settings: ControllerSettings) -> list[DomainProblem]:
    label, value = names.ISOLATION_LABEL, domain.labels.get(names.ISOLATION_LABEL)
    if value == ImexIsolation.CHANNEL and settings.imex_mode is ImexMode.HOST_MANAGED:
        why = f"label {label} asks for a channel of its own, but the hosts run nvidia-imex here and share one"
        return [DomainProblem("ChannelModeUnavailable", f"{why}; remove the label")]
    if value is None or value in set(ImexIsolation):
        return []
    return [
        DomainProblem("UnknownIsolation", f"label {label} is {value!r}; use {' or '.join(ImexIsolation)}")
    ]


def _of_cliques(snapshot: DomainSnapshot) -> list[DomainProblem]:
    return [
        DomainProblem(
            "IsolationMixed",
            f"nodes of clique {clique_id} disagree about isolation ({', '.join(modes)}), but a node holds one"
            f" IMEX session; give all of them the same {names.ISOLATION_LABEL}",
        )
        for clique_id, modes in sorted(snapshot.mixed_nodes.items())
    ]


def _of_daemons(snapshot: DomainSnapshot) -> list[DomainProblem]:
    """Nodes on which nvidia-imex does not run, by its error. In channel mode the nodes of the clique."""
    errors: defaultdict[str, set[str]] = defaultdict(set)
    for pod in (*snapshot.pods, *(() if snapshot.warm is None else snapshot.warm.pods)):
        if pod.alive and pod.imex_error:
            errors[pod.imex_error].add(pod.node)
    return [
        DomainProblem("ImexStartFailed", f"nvidia-imex does not run on {shortened_list(nodes)}: {error}")
        for error, nodes in sorted(errors.items())[:MOST_ERRORS]
    ]


def _of_channel_mode(domain: ComputeDomain, snapshot: DomainSnapshot) -> list[DomainProblem]:
    if asks_for_channels_of_others(domain, snapshot.settings):
        why = "allocationMode All would take every job's channel, so there is no claim template"
        fix = f"label the ComputeDomain {names.ISOLATION_LABEL}=domain, or create it again with Single"
        return [DomainProblem("AllChannelsRefused", f"{why}; {fix}")]
    problems = []
    shared = names.shared_claim_name(snapshot.uid)
    pods = sum(len(claim.reserved_for) for claim in snapshot.claims if claim.name == shared)
    if pods >= names.PODS_PER_CLAIM:
        limit = f"ResourceClaim {shared} is reserved for {pods} pods, the most that one claim allows"
        fix = "further pods wait: put more GPUs in each pod, or split the job"
        problems.append(DomainProblem("ClaimFull", f"{limit}; {fix}"))
    warm = snapshot.warm
    if warm is not None and domain.num_nodes > len(warm.nodes):
        size = f"numNodes is {domain.num_nodes}, and clique {warm.clique_id} has {len(warm.nodes)}"
        fix = "one channel spans one clique: ask for fewer, or use a ComputeDomain per clique"
        problems.append(DomainProblem("ExceedsClique", f"{size}; {fix}"))
    return problems


# Conditions.


READY, PROGRESSING, DEGRADED, MESHED = "Ready", "Progressing", "Degraded", "Meshed"
KEPT_WITHOUT_QUOTA, EVICTED = "KeptWithoutQuota", "Evicted"


class ConditionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The values that the conditions are computed from."""

    domain: ComputeDomain
    snapshot: DomainSnapshot
    joined: frozenset[str]
    """Nodes that are to have a daemon."""
    nodes: tuple[ComputeDomainNode, ...]
    problems: tuple[DomainProblem, ...]


def domain_conditions(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Ready, Progressing and Degraded, and QuotaReserved, Meshed and SpansCliques if they apply."""
    ready = _ready(inputs)
    others = (
        _progressing(inputs, ready),
        _degraded(inputs),
        *_quota_reserved(inputs),
        *_meshed(inputs),
        *_spans_cliques(inputs),
    )
    now, generation = inputs.snapshot.now, inputs.domain.generation
    return tuple(
        dated_condition(condition, inputs.domain.status.condition(condition.type), now, generation)
        for condition in (ready, *others)
    )


def has_nothing_by_quota(domain: ComputeDomain, snapshot: DomainSnapshot) -> bool:
    """Whether it waits for quota and has nothing, or loses its objects: no claim of it may be prepared.

    It follows from the status, which tenants cannot write, and not from objects, which they may make under
    its label. While it waits nothing is made, so who has nothing goes on having nothing.
    """
    if snapshot.quota.state is not QuotaState.WAITING:
        return owned.is_withdrawn(snapshot)
    before, is_new = domain.status.condition(names.QUOTA_RESERVED), domain.status.condition(READY) is None
    if before is None:
        return is_new
    if before.reason == EVICTED:
        return not owned.channel_holders(snapshot)
    return before.reason in (names.WAITING_FOR_QUOTA, names.WITHDRAWN)


def _ready(inputs: ConditionInputs) -> Condition:
    if not inputs.nodes and has_nothing_by_quota(inputs.domain, inputs.snapshot):
        (quota,) = _quota_reserved(inputs)
        return _new_condition(READY, "False", names.WAITING_FOR_QUOTA, quota.message)
    if inputs.snapshot.settings.imex_mode is ImexMode.HOST_MANAGED:
        why = "each node asks its own nvidia-imex when it prepares a claim; it is not observed from here"
        return _new_condition(READY, "Unknown", "HostManaged", why)
    if not inputs.nodes:
        return _new_condition(READY, "False", *_why_no_nodes(inputs))
    waiting = _not_ready(inputs)
    if waiting is not None:
        # In channel mode these are all nodes of the clique, and it is unknown which of them a job uses.
        is_shared = uses_warm_clique(inputs.domain, inputs.snapshot.settings)
        are_some_ready = any(node.status is Readiness.READY for node in inputs.nodes)
        is_open = is_shared and are_some_ready and waiting[0] == "NodesNotReady"
        return _new_condition(READY, "Unknown" if is_open else "False", *waiting)
    cliques = {node.clique_id for node in inputs.nodes}
    shown = shortened_list({clique or "(no fabric)" for clique in cliques})
    message = f"{len(inputs.nodes)} nodes ready, in cliques {shown}"
    return _new_condition(READY, "True", "AllNodesReady", message)


def _why_no_nodes(inputs: ConditionInputs) -> tuple[str, str]:
    if inputs.joined:
        return "DaemonsMissing", f"no daemon yet on {shortened_list(inputs.joined)}"
    if uses_warm_clique(inputs.domain, inputs.snapshot.settings) and inputs.snapshot.warm is not None:
        return "CliqueNotWarm", f"no IMEX daemon is ready in clique {inputs.snapshot.warm.clique_id}"
    return "NoNodes", "no channel of it is in use: nodes join when pods that claim a channel land on them"


def _not_ready(inputs: ConditionInputs) -> tuple[str, str] | None:
    present = {node.name for node in inputs.nodes}
    missing = inputs.joined - present
    if missing:
        return "DaemonsMissing", f"no daemon yet on {shortened_list(missing)}"
    waiting = [node.name for node in inputs.nodes if node.status is not Readiness.READY]
    if waiting:
        return "NodesNotReady", f"IMEX is not READY on {shortened_list(waiting)}"
    if len(present) < inputs.domain.num_nodes:
        return "TooFewNodes", f"{len(present)} of numNodes {inputs.domain.num_nodes} nodes have joined"
    return None


def _progressing(inputs: ConditionInputs, ready: Condition) -> Condition:
    if inputs.domain.deleting:
        return _deletion(inputs)
    waits = ready.status == "False" and ready.reason not in ("NoNodes", "TooFewNodes")
    if ready.reason == names.WAITING_FOR_QUOTA:
        return _new_condition(PROGRESSING, "True", names.WAITING_FOR_QUOTA, ready.message)
    if waits:
        return _new_condition(PROGRESSING, "True", "WaitingForDaemons", ready.message)
    return _new_condition(PROGRESSING, "False", "Settled", "nothing is left to do")


def _deletion(inputs: ConditionInputs) -> Condition:
    users = owned.channel_users(inputs.snapshot)
    if users:
        fix = f'end them, or annotate it with {names.ALLOW_DELETION_ANNOTATION}: "true"'
        why = f"deletion would take IMEX from running pods {shortened_list(users)}; {fix}"
        return _new_condition(PROGRESSING, "False", "DeletionHeld", why)
    return _new_condition(PROGRESSING, "True", "TearingDown", "its objects are being deleted")


def _degraded(inputs: ConditionInputs) -> Condition:
    if not inputs.problems:
        return _new_condition(DEGRADED, "False", "AsExpected", "nothing is wrong")
    message = "; ".join(problem.message for problem in inputs.problems)
    return _new_condition(DEGRADED, "True", inputs.problems[0].reason, message)


def _quota_reserved(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Whether it has quota of Kueue, if Kueue counts it."""
    quota, type_ = inputs.snapshot.quota, names.QUOTA_RESERVED
    queue = f" in queue {quota.queue}" if quota.queue else ""
    if quota.state is QuotaState.UNCOUNTED:
        return ()
    if quota.state is QuotaState.ADMITTED:
        spares = f", spare nodes: {quota.spares}" if quota.spares else ""
        return (_new_condition(type_, "True", "Admitted", f"it has quota{queue}{spares}"),)
    if quota.state is QuotaState.WAITING:
        waits = f"waits for quota{queue}: {quota.why}"
        if has_nothing_by_quota(inputs.domain, inputs.snapshot):
            return (_new_condition(type_, "False", names.WAITING_FOR_QUOTA, waits),)
        return (_new_condition(type_, "False", KEPT_WITHOUT_QUOTA, f"keeps what it has, and {waits}"),)
    users = owned.channel_holders(inputs.snapshot)
    until = f"it keeps what it has until pods {shortened_list(users)} end" if users else "it is taken apart"
    why = f"evicted by Kueue{queue} ({quota.why}): {until}, and then waits for quota anew"
    return (_new_condition(type_, "False", EVICTED if users else names.WITHDRAWN, why),)


def _meshed(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Whether every daemon reaches all its peers. Readiness covers each daemon alone."""
    members = {node.name for node in inputs.nodes}
    pods = (pod for pod in inputs.snapshot.pods if pod.node in members)
    meshes = {pod.node: pod.mesh for pod in pods if pod.alive and pod.clique_id}
    if not meshes:
        return ()
    reported = [mesh for mesh in meshes.values() if mesh is not None]
    silent = [node for node, mesh in meshes.items() if mesh is None]
    if not all(mesh.complete for mesh in reported):
        missing = shortened_list({peer for mesh in reported for peer in mesh.missing})
        return (_new_condition(MESHED, "False", "PeersMissing", f"not connected: {missing}"),)
    if silent:
        message = f"not reported by {shortened_list(silent)}"
        return (_new_condition(MESHED, "Unknown", "NotReported", message),)
    message = f"{len(meshes)} daemons reach all their peers"
    return (_new_condition(MESHED, "True", "Complete", message),)


def _spans_cliques(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Whether its nodes are in several cliques, between which no memory is shared over NVLink.

    Daemons report the clique that they entered, labels the one in which the node is now. Each may lag behind
    the other when a fabric is repartitioned, so it is enough that one source shows several cliques. A channel
    in channel mode belongs to one clique.
    """
    nodes = inputs.joined | inputs.snapshot.channel_nodes
    if not nodes or uses_warm_clique(inputs.domain, inputs.snapshot.settings):
        return ()
    status, reason, message = _where_nodes_are(inputs, nodes)
    return (_new_condition(names.SPANS_CLIQUES, status, reason, message),)


def _where_nodes_are(inputs: ConditionInputs, nodes: Collection[str]) -> tuple[str, str, str]:
    labels = {name: label for name, label in inputs.snapshot.clique_labels.items() if name in nodes}
    entered = {node.name: node.clique_id for node in inputs.nodes}
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


# Events about changed conditions.


_WARNING_CONDITIONS = {("Degraded", "True"), (SPANS_CLIQUES, "True")}
"""Types and statuses of conditions that are reported as warnings when they begin."""


def status_events(old: ComputeDomainStatus, new: ComputeDomainStatus) -> tuple[EventNotice, ...]:
    """An event for each condition that began to hold, or failed, in a way that a person should know."""
    events = (_status_event(old.condition(condition.type), condition) for condition in new.conditions)
    return tuple(event for event in events if event is not None)


def _status_event(old: Condition | None, new: Condition) -> EventNotice | None:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    if (new.type, new.status) in _WARNING_CONDITIONS or new.reason == "DeletionHeld":
        return EventNotice(True, new.reason, new.message)
    if new.type == names.QUOTA_RESERVED:
        return EventNotice(new.reason in (EVICTED, names.WITHDRAWN), new.reason, new.message)
    if new.type != "Ready":
        return None
    if new.status == "True":
        return EventNotice(False, new.reason, new.message)
    was_ready = old is not None and old.status == "True"
    return EventNotice(True, new.reason, new.message) if was_ready else None
