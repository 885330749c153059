"""One ComputeDomain: from a snapshot to the next writes, status and events.

A decision contains everything that can be done at once, in order. The executor stops at the first write
that fails. Carrying out a decision and deciding again converges: it ends with no write and no status
change.

The finalizer and the UID label come first, then missing objects, then nodes that left and stale clique
entries. One that waits for quota gets no missing objects, and one that is evicted loses those that it has
when no pod uses it. A ComputeDomain that is being deleted waits while pods hold its channels, then is taken
apart. For a UID without a ComputeDomain only teardown remains.
"""

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomain,
    ComputeDomainNode,
    ComputeDomainStatus,
    Readiness,
)
from rackloom.core.cluster.names import ImexMode
from rackloom.core.cluster.objects import CreateObject, EventNotice, ObjectWrite
from rackloom.core.domains import conditions, membership, owned
from rackloom.core.domains.conditions import DomainProblem, api_failures, domain_problems, status_events
from rackloom.core.domains.owned import required_objects, uses_warm_clique
from rackloom.core.domains.quota import QuotaState
from rackloom.core.domains.snapshot import DomainSnapshot, adopt_domain


class DomainDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The writes for one ComputeDomain, in order, and the report after them."""

    actions: tuple[ObjectWrite, ...] = ()
    status: ComputeDomainStatus | None = None
    """None if the recorded status holds."""
    notices: tuple[EventNotice, ...] = ()
    """Events about the status, once it is written."""
    done: tuple[EventNotice, ...] = ()
    """Events about the actions, once they are executed."""
    recheck_after: float | None = None
    """Seconds after which the passage of time alone may change the decision."""


def reconcile_domain(snapshot: DomainSnapshot) -> DomainDecision:
    """Decide about one ComputeDomain, or about the remains of one."""
    domain = snapshot.domain
    if domain is None:
        return DomainDecision(actions=owned.teardown_writes(snapshot))
    if domain.deleting:
        return _reconcile_deleted(domain, snapshot)
    return _reconcile_wanted(domain, snapshot)


def _reconcile_wanted(domain: ComputeDomain, snapshot: DomainSnapshot) -> DomainDecision:
    actions = () if snapshot.invalid else _upkeep(domain, snapshot)
    problems = domain_problems(domain, snapshot)
    if not problems and any(isinstance(action, CreateObject) for action in actions):
        # The next pass sees the new objects and reports them.
        return DomainDecision(actions=actions)
    decision = _with_status(domain, snapshot, actions, problems)
    abandoned = () if snapshot.invalid else membership.remove_abandoned_labels(snapshot)
    why = f"has not been ready for {snapshot.settings.lost_after:.0f} s, and no pod holds a channel on it"
    left = (f"node {node.name} {why}: it is no node of this ComputeDomain any more" for node in abandoned)
    return msgspec.structs.replace(
        decision,
        done=tuple(EventNotice(False, "NodeLeft", message) for message in left),
        recheck_after=membership.seconds_to_next_loss(snapshot),
    )


def _upkeep(domain: ComputeDomain, snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    actions: list[ObjectWrite] = []
    owned_domain = snapshot.domain_object
    if owned_domain is not None and not (
        names.FINALIZER in owned_domain.finalizers and owned_domain.domain == owned_domain.uid
    ):
        # The finalizer comes before all other objects: without it they could outlive their ComputeDomain.
        actions.append(adopt_domain(owned_domain))
    if owned.is_withdrawn(snapshot):
        actions += owned.withdraw_writes(snapshot)
    else:
        writes = (write for required in required_objects(domain, snapshot) for write in required.writes())
        # A ComputeDomain that waits for quota gets none of the objects that it lacks.
        waits = snapshot.quota.state is QuotaState.WAITING
        actions += (write for write in writes if not (waits and isinstance(write, CreateObject)))
    return (
        *actions,
        *membership.remove_abandoned_labels(snapshot),
        *membership.remove_stale_entries(snapshot),
        # Last: without Kueue, or the rights of its overlay, it fails, and running daemons are kept up.
        *(() if snapshot.quota.write is None else (snapshot.quota.write,)),
    )


def _reconcile_deleted(domain: ComputeDomain, snapshot: DomainSnapshot) -> DomainDecision:
    if names.FINALIZER not in domain.finalizers:
        return DomainDecision()
    # While pods hold channels only stale entries are removed, so that the daemons of those pods keep running.
    held_back = bool(owned.channel_users(snapshot))
    actions = membership.remove_stale_entries(snapshot) if held_back else owned.teardown_writes(snapshot)
    if not held_back and not snapshot.held and not snapshot.nodes:
        return DomainDecision(actions=actions)
    return _with_status(domain, snapshot, actions, api_failures(snapshot))


def _with_status(
    domain: ComputeDomain,
    snapshot: DomainSnapshot,
    actions: tuple[ObjectWrite, ...],
    problems: tuple[DomainProblem, ...],
) -> DomainDecision:
    nodes: tuple[ComputeDomainNode, ...] = ()
    if uses_warm_clique(domain, snapshot.settings):
        # In channel mode the nodes are those of the IMEX domain in which the channel was allocated.
        nodes = () if snapshot.warm is None else snapshot.warm.nodes
    elif snapshot.settings.imex_mode is ImexMode.DRIVER_MANAGED:
        nodes = membership.node_entries(snapshot)
    inputs = conditions.ConditionInputs(
        domain=domain,
        snapshot=snapshot,
        joined=membership.joined_nodes(snapshot),
        nodes=nodes,
        problems=problems,
    )
    reported = conditions.domain_conditions(inputs)
    # The field `status` has two values only, and in hostManaged mode it has always been Ready.
    is_ready = reported[0].status == "True" or (
        snapshot.settings.imex_mode is ImexMode.HOST_MANAGED
        and not conditions.has_nothing_by_quota(domain, snapshot)
    )
    status = ComputeDomainStatus(
        status=Readiness.READY if is_ready else Readiness.NOT_READY, nodes=nodes, conditions=reported
    )
    if status == domain.status:
        return DomainDecision(actions=actions)
    return DomainDecision(actions=actions, status=status, notices=status_events(domain.status, status))
