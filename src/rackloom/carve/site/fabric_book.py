"""What the reconciler reads from the records and writes into them: intent out, observations in.

Each function is one transaction when run through the store. Nothing here asks the fabric anything.
"""

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from rackloom.carve.plan.trays import is_tray
from rackloom.carve.plan.values import AddGpus, Blocked, CreatePartition, Intent, Observation, Operation
from rackloom.carve.site import (
    blocks,
    disputes,
    drains,
    emptied,
    holdings,
    intents,
    knowledge,
    leases,
    operations,
    ownership,
    pauses,
    repeats,
    revisions,
    rivals,
    settle,
    taking_over,
)
from rackloom.carve.site import endpoints as _endpoints
from rackloom.carve.site.disputes import Contradicted, Dispute
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.leases import Lease
from rackloom.errors import Refused

__all__ = [
    "Endpoint",
    "begin_operation",
    "endpoint_domain",
    "endpoints",
    "finish_operation",
    "intent",
    "record_blocked",
    "record_observation",
    "record_unknown",
]


def endpoints(conn: sa.Connection) -> tuple[Endpoint, ...]:
    """All switch controller endpoints of the site."""
    return _endpoints.every(conn)


def endpoint_domain(conn: sa.Connection, endpoint_id: str) -> str | None:
    """Domain uuid that the endpoint last answered with; None until it has answered."""
    return _endpoints.domain_of(conn, endpoint_id)


def intent(conn: sa.Connection, domain: str) -> Intent:
    """What the site wants of `domain` now."""
    return Intent(
        domain=domain,
        assignments=intents.assignments(conn, domain),
        owned=ownership.of_domain(conn, domain),
        managed=holdings.managed(conn, domain),
        default_partition=holdings.default_partition(conn, domain),
        revision=revisions.current(conn, domain),
        paused=pauses.reason(conn, domain),
        drained=drains.gpus(conn, domain),
    )


def record_observation(
    conn: sa.Connection, endpoint_id: str, observation: Observation, now: float
) -> Dispute | None:
    """Take over all that a complete reading shows: identities, partitions of ours, and every status.

    A reading older than the one already recorded teaches nothing and is dropped, and so does one by an
    endpoint that was given up while it was being read. One that another controller contradicts, of
    this domain or of another that lists the same hardware, is kept and teaches nothing: then returns the
    dispute, in which nothing may be done. One that lists no GPU where some are recorded is none, and its
    endpoint is lost.
    """
    standing = _endpoints.standing(conn, endpoint_id, observation.domain)
    if standing is None or observation.observed_at < (standing.observed_at or 0.0):
        return None
    why_not = emptied.why_no_reading(conn, [observation]).get(observation.domain)
    if why_not is not None and not knowledge.is_standby(conn, endpoint_id, observation.domain):
        _endpoints.set_domain(conn, endpoint_id, observation.domain, now)
        _lose(conn, endpoint_id, why_not, now, {standing.domain, observation.domain})
        return None
    # Where several tell of a domain, one of the others may have told something else meanwhile.
    if not standing.is_shared and repeats.is_repeat(conn, endpoint_id, observation, now):
        knowledge.confirm(conn, endpoint_id, observation.observed_at)
        return None
    knowledge.learn(conn, endpoint_id, observation)
    _endpoints.set_domain(conn, endpoint_id, observation.domain, now)
    operations.close_interrupted(conn, endpoint_id, observation.observed_at, now)
    operations.confirm(conn, endpoint_id, observation.observed_at)
    if standing.is_shared:
        operations.close_given_up(conn, observation.domain, observation.observed_at, now)
    left = frozenset(() if standing.domain is None else (standing.domain,)) - {observation.domain}
    others = rivals.listed_by(conn, observation)
    if not standing.is_shared and not others - left:
        taking_over.take_over(conn, [observation], now, left)
        return None
    dispute = taking_over.compare(conn, observation.domain, now, others)
    for domain in left:
        taking_over.give_up(conn, domain, now)
    return dispute


def record_unknown(conn: sa.Connection, endpoint_id: str, reason: str, now: float) -> None:
    """Note that the endpoint could not be read, and take back what rested on its observations."""
    standing = _endpoints.standing(conn, endpoint_id)
    if standing is None:
        return
    _lose(conn, endpoint_id, reason, now, {standing.domain})


def _lose(
    conn: sa.Connection, endpoint_id: str, reason: str, now: float, domains: Collection[str | None]
) -> None:
    knowledge.lose(conn, endpoint_id, reason, now)
    for domain in sorted(one for one in domains if one is not None):
        taking_over.give_up(conn, domain, now)


def record_blocked(conn: sa.Connection, domain: str, blocked: Sequence[Blocked], now: float) -> None:
    """Note what the newest plan of `domain` found in the way of wishes, and tell the tenants concerned."""
    if blocks.replace(conn, domain, blocked, now):
        settle.settle(conn, domain, now)


def begin_operation(
    conn: sa.Connection, lease: Lease, operation: Operation, observed_at: float, now: float
) -> str:
    """Record an operation before the fabric is asked for it; returns the id that `finish_operation` takes.

    Raises LeaseLost when another replica reconciles the domain now, Contradicted when its controllers
    contradict one another, and Refused when the endpoint never answered, when the name of a partition already
    means another, or when a GPU is no longer wanted where the operation would put it: then the plan is out of
    date.
    """
    leases.require(conn, lease, now)
    domain, dispute = disputes.of_endpoint(conn, lease.endpoint_id)
    if domain is None:
        raise Refused("no operation can be planned for an endpoint that was never observed")
    if dispute is not None:
        raise Contradicted(dispute)
    why = pauses.reason(conn, domain)
    if why is not None:
        raise Refused(f"domain {domain} is paused: {why}", nearest_fix="resume the domain")
    operation_id = operations.begin(conn, lease.endpoint_id, domain, operation, observed_at, now)
    if isinstance(operation, CreatePartition):
        ownership.claim(conn, domain, operation, operation_id, now)
    _check_still_wanted(conn, domain, operation)
    return str(operation_id)


def finish_operation(
    conn: sa.Connection, operation_id: str, state: str, code: str | None, message: str | None, now: float
) -> None:
    """Record the answer: `state` is `done`, `refused` or `unknown` (no answer came)."""
    operations.finish(conn, int(operation_id), operations.OperationState(state), code, message, now)


def _check_still_wanted(conn: sa.Connection, domain: str, operation: Operation) -> None:
    if not isinstance(operation, CreatePartition | AddGpus):
        return
    partitions = {one.name: one.logical_partition for one in ownership.of_domain(conn, domain)}
    owner = partitions.get(operation.name)
    assignments = intents.assignments(conn, domain)
    if owner is None or is_tray(owner):
        # The default partition and those of trays are for GPUs that nobody was given.
        given = {one.guid for one in assignments}
        wanted = holdings.managed(conn, domain) - given - drains.gpus(conn, domain)
    else:
        wanted = frozenset(one.guid for one in assignments if one.logical_partition == owner)
    if not wanted.issuperset(operation.guids):
        raise Refused(
            f"GPUs that {operation.name} would get are no longer wanted there", nearest_fix="plan again"
        )
