"""Conflicting controllers: split brain within a domain, or two domains that list the same hardware.

`compare_readings` compares two readings of one domain. Operations move no hardware, so differing GPUs
always conflict. Differing partitions conflict only when both readings are newer than the last change by
the site, because an older reading shows an earlier state. Healths and limits are measurements and are
not compared. A reading without GPUs is from a standby and is not compared. `shared_hardware` finds GPUs
that controllers of two domains list in the same place: a GPU is on one NVLink switch fabric, so both
cannot be right.

`update_conflict` records the outcome for a domain. Which controller is wrong cannot be determined here,
so the domain is unknown and no operation begins until the controllers agree or only one is left. A
conflict does not end because one controller became unreadable, or was read before the last change.
Opening a conflict increments the intent revision: earlier plans no longer hold, and the other
controllers are read at once.

`conflicting_domains` names the other domains that have to be compared.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import delete_rows, find_row, insert_row, update_rows
from rackloom.carve.store.schema import domain_dispute, endpoint, observation, operation
from rackloom.carve.store.values import OperationState
from rackloom.core.partitions.domain import DomainObservation, ObservedPartition
from rackloom.core.partitions.status_rules import READING_VALID_SECONDS
from rackloom.errors import Refused

# Comparing two readings. Pure.


MAX_LISTED_PARTITIONS = 3
"""Differing partitions that the reason names. The others are only counted."""


class ControllerReading(msgspec.Struct, frozen=True):
    """The last reading of one switch controller."""

    url: str
    observation: DomainObservation


def compare_readings(first: ControllerReading, second: ControllerReading, changed_at: float) -> str | None:
    """The reason why the two readings of one domain conflict, or None if they agree.

    `changed_at` is when the site last changed partitions of the domain.
    """
    # A standby answers for its domain before it knows the content: it lists no GPU, and cannot conflict.
    if not (first.observation.gpus and second.observation.gpus):
        return None
    # Operations move no hardware, so GPUs are comparable whenever they were read.
    in_first, in_second = _gpu_locations(first.observation), _gpu_locations(second.observation)
    surplus = ((first.url, in_first - in_second), (second.url, in_second - in_first))
    differences = [f"only {url} lists {len(gpus)} of the GPUs" for url, gpus in surplus if gpus]
    # A reading that began before the last change shows the partitions of before: that is lag, no conflict.
    # One that contradicts itself about partitions is no evidence of them.
    is_certain = not (first.observation.uncertain or second.observation.uncertain)
    if is_certain and min(first.observation.observed_at, second.observation.observed_at) > changed_at:
        differences += _differing_partitions(first.observation, second.observation)
    if not differences:
        return None
    pair = f"switch controllers {first.url} and {second.url}"
    return f"{pair} contradict one another: {'; '.join(differences)}"


def shared_hardware(first: ControllerReading, second: ControllerReading) -> str | None:
    """The reason why controllers of two domains conflict: both list the same GPUs in the same places.

    A GPU with another GUID in the same place is another GPU.
    """
    shared = len(_gpu_locations(first.observation) & _gpu_locations(second.observation))
    if not shared:
        return None
    names = [f"{reading.url} of domain {reading.observation.domain}" for reading in (first, second)]
    # Sorted, so that both domains record the same reason.
    pair = f"switch controllers {' and '.join(sorted(names))}"
    return f"{pair} contradict one another: both list the same {shared} GPUs"


def _gpu_locations(reading: DomainObservation) -> set[tuple[int, str, int, int]]:
    return {(gpu.guid, gpu.chassis_serial, gpu.slot, gpu.module_id) for gpu in reading.gpus}


def _differing_partitions(first: DomainObservation, second: DomainObservation) -> list[str]:
    in_first = {partition.id: partition for partition in first.partitions}
    in_second = {partition.id: partition for partition in second.partitions}
    # By id: a partition's name identifies its owner, and several tenants share a domain.
    differences = [
        f"partition {number} {_describe_difference(in_first.get(number), in_second.get(number))}"
        for number in sorted(in_first.keys() | in_second.keys())
        if _name_and_members(in_first.get(number)) != _name_and_members(in_second.get(number))
    ]
    more = len(differences) - MAX_LISTED_PARTITIONS
    if more > 0:
        return [*differences[:MAX_LISTED_PARTITIONS], f"{more} more partitions differ"]
    return differences


def _name_and_members(partition: ObservedPartition | None) -> tuple[str, frozenset[int]] | None:
    return None if partition is None else (partition.name, partition.members)


def _describe_difference(first: ObservedPartition | None, second: ObservedPartition | None) -> str:
    sizes = [0 if partition is None else len(partition.members) for partition in (first, second)]
    text = f"has {sizes[0]} and {sizes[1]} members"
    if first is None or second is None or sizes[0] != sizes[1]:
        return text
    return f"{text}, of which some differ" if first.members != second.members else f"{text} and two names"


# The recorded conflict of a domain.


_FOREVER = 1e300

# Built once: every pass runs these.
_READINGS_WITH_FACTS = (
    sa.select(endpoint.c.url, endpoint.c.domain, observation)
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(
        endpoint.c.domain.in_(sa.bindparam("domains", expanding=True)),
        observation.c.facts.is_not(None),
        sa.or_(
            observation.c.unknown_since.is_(None),
            observation.c.observed_at >= sa.bindparam("lost_from", type_=sa.Double),
        ),
    )
    .order_by(endpoint.c.url)
)
_LAST_CHANGE = sa.select(
    sa.func.max(sa.case((operation.c.state == OperationState.PENDING, _FOREVER), else_=operation.c.finished))
).where(operation.c.domain == sa.bindparam("domain"))


class ControllerConflict(msgspec.Struct, frozen=True):
    """The contradiction between two controllers' readings, and its start (seconds since the epoch)."""

    domain: str
    reason: str
    since: float
    rival: str | None = None
    """The other domain if two list the same hardware, or None if controllers of one domain differ."""

    @property
    def domains(self) -> frozenset[str]:
        """The domains in which no operation may begin until the conflict ends."""
        return frozenset((self.domain,) if self.rival is None else (self.domain, self.rival))


class ConflictingControllers(Refused):
    """No operation begins in a domain while its controllers contradict one another."""

    def __init__(self, conflict: ControllerConflict) -> None:
        self.conflict = conflict
        super().__init__(
            f"domain {conflict.domain} is unknown since {latest.rfc3339(conflict.since)}: {conflict.reason}",
            nearest_fix="repair the controller that is wrong, or delete its endpoint",
        )


def conflict_of_domain(conn: sa.Connection, domain: str) -> ControllerConflict | None:
    """The recorded conflict of `domain`."""
    row = find_row(conn, domain_dispute, domain=domain)
    return None if row is None else _conflict_of_row(row)


def conflicts_by_domain(conn: sa.Connection) -> Mapping[str, ControllerConflict]:
    """All recorded conflicts, by domain."""
    return {row.domain: _conflict_of_row(row) for row in conn.execute(sa.select(domain_dispute))}


def update_conflict(
    conn: sa.Connection, domain: str, before: ControllerConflict | None, rivals: Collection[str] = ()
) -> ControllerConflict | None:
    """Compare the readings of `domain`, also with those of `rivals`, and record the outcome for `domain`.

    `before` is the recorded conflict. `rivals` are other domains that may list the same hardware.

    Invariant: a conflict ends only when all readings that were part of it agree, or when the endpoint of one
    is deleted. It does not end because a controller became unreadable, was read before the last change,
    or contradicts itself: none of these makes the other one right.
    """
    found = _conflict_within_domain(conn, domain, before) or _conflict_across_domains(
        conn, domain, rivals, before
    )
    if found is None and before is not None:
        if any(_reading_of_row(row).observation.uncertain for row in _valid_readings(conn, [domain], before)):
            return before
        delete_rows(conn, domain_dispute, domain=domain)
    if found is None:
        return None
    if before is None:
        insert_row(conn, domain_dispute, **msgspec.structs.asdict(found))
        # Earlier plans no longer hold, and the replicas that read the other controllers must do so now.
        journal.increment_revisions(conn, [domain])
        return found
    found = msgspec.structs.replace(found, since=before.since)
    if found != before:
        update_rows(conn, domain_dispute, {"domain": domain}, reason=found.reason, rival=found.rival)
    return found


def _conflict_within_domain(
    conn: sa.Connection, domain: str, before: ControllerConflict | None
) -> ControllerConflict | None:
    """Split brain: two controllers of one domain with different readings."""
    rows = _valid_readings(conn, [domain], before)
    differing = [
        (_reading_of_row(first), _reading_of_row(second))
        for first, second in combinations(rows, 2)
        if first.facts != second.facts
    ]
    reason = _first_difference(differing, 0.0)
    if reason is not None and before is None:
        # Only now are the operations of the domain searched for the last change: usually facts differ in
        # measurements only, and this costs nothing.
        changed_at = conn.execute(_LAST_CHANGE, {"domain": domain}).scalar_one()
        reason = reason if changed_at is None else _first_difference(differing, changed_at)
    return None if reason is None else ControllerConflict(domain, reason, _newest_time(rows))


def _first_difference(
    pairs: Iterable[tuple[ControllerReading, ControllerReading]], changed_at: float
) -> str | None:
    reasons = (compare_readings(first, second, changed_at) for first, second in pairs)
    return next((reason for reason in reasons if reason is not None), None)


def _conflict_across_domains(
    conn: sa.Connection, domain: str, rivals: Collection[str], before: ControllerConflict | None
) -> ControllerConflict | None:
    """Controllers of two domains that list the same hardware."""
    for rival in sorted(rivals):
        same_rival = before if before is not None and before.rival == rival else None
        rows = _valid_readings(conn, [domain, rival], same_rival)
        ours = [row for row in rows if row.domain == domain]
        theirs = [row for row in rows if row.domain == rival]
        for pair in product(ours, theirs):
            reason = shared_hardware(*map(_reading_of_row, pair))
            if reason is not None:
                return ControllerConflict(domain, reason, _newest_time(pair), rival)
    return None


def _valid_readings(
    conn: sa.Connection, domains: Collection[str], before: ControllerConflict | None
) -> list[Any]:
    """The readings of `domains` that are evidence of the present, by URL.

    Without a conflict these are the readings of controllers that can be read. During one they include the
    last reading of a controller that was lost after it took part in the conflict.
    """
    lost_from = _FOREVER if before is None else before.since
    rows = conn.execute(_READINGS_WITH_FACTS, {"domains": list(domains), "lost_from": lost_from}).all()
    newest = _newest_time(rows)
    # During a conflict only the reading of a lost controller grows too old. Any other controller is read
    # again, or becomes lost, within the next pass.
    return [
        row
        for row in rows
        if row.observed_at >= newest - READING_VALID_SECONDS
        or (before is not None and row.unknown_since is None)
    ]


def _newest_time(rows: Iterable[Any]) -> float:
    return max((row.observed_at for row in rows), default=0.0)


def _reading_of_row(row: Any) -> ControllerReading:
    return ControllerReading(row.url, latest.observation_of_row(row))


def _conflict_of_row(row: Any) -> ControllerConflict:
    return ControllerConflict(row.domain, row.reason, row.since, row.rival)


# The other domains to compare with.


_domain_param: sa.BindParameter[str] = sa.bindparam("domain")
_CONFLICTING_DOMAINS = sa.union(
    sa.select(domain_dispute.c.rival).where(
        domain_dispute.c.domain == _domain_param, domain_dispute.c.rival.is_not(None)
    ),
    sa.select(domain_dispute.c.domain).where(domain_dispute.c.rival == _domain_param),
)


def conflicting_domains(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Domains that have a recorded conflict with `domain` about hardware."""
    return frozenset(conn.execute(_CONFLICTING_DOMAINS, {"domain": domain}).scalars())
