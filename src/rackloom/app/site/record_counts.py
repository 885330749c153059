"""Counts of the site's records at the moment of a Prometheus scrape.

Counted are logical and physical partitions, endpoints by state, domains in conflict, and for each domain
its partitions, GPUs and compute nodes by health. A domain is counted from its newest valid observation.
For a domain that cannot be read now only the time of its last observation is reported, because its present
content is unknown.

The time from a change of intent to Ready is counted once per instance: each call counts the status
history after the entry that the previous call returned. A change of intent after that Ready waits for the
next Ready.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.fabric import controller
from rackloom.carve.fabric.controller import ControllerKind
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.store.schema import (
    domain_dispute,
    instance,
    logical_partition,
    owned_partition,
)
from rackloom.carve.store.schema import status_history as history
from rackloom.carve.store.values import Status
from rackloom.core.partitions.domain import DomainLimits, DomainObservation, GpuHealth, as_known


class DomainCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the latest observation of a domain, by health. Empty while the domain cannot be read."""

    uuid: str
    kind: ControllerKind
    """The kind of the observed controller."""
    observed_at: float
    partitions: Mapping[str, int]
    gpus: Mapping[str, int]
    nodes: Mapping[str, int]
    """Compute nodes, by the health of their GPUs."""
    multicast_groups: Mapping[str, int]
    """The limit of the domain, and the used ones. A number that is unknown is left out."""


def newest_history_entry(conn: sa.Connection) -> int:
    """Number of the newest entry in the status history. Older entries were counted before."""
    return conn.execute(sa.select(sa.func.max(history.c.id))).scalar_one() or 0


class SiteCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of records. `newest_history` goes into the next call of `count_site_records`."""

    logical_partitions: int
    physical_partitions: int
    """Created by the site and observed. A partition that was only requested does not count yet."""
    endpoints: Mapping[str, int]
    """Endpoints by state: known, unknown, never (read)."""
    disputed_domains: int = 0
    """Domains with conflicting controllers."""
    domains: tuple[DomainCounts, ...]
    ready_seconds: tuple[float, ...]
    """Seconds from change of intent to Ready, for each instance that became Ready since the last count."""
    newest_history: int


class _ControllerReading(msgspec.Struct, frozen=True):
    """The newest reading of one controller of a domain."""

    row: Any
    kind: ControllerKind


def count_site_records(conn: sa.Connection, since: int, valid_from: float = 0.0) -> SiteCounts:
    """Count everything now. Transitions to Ready are those after history entry `since`.

    Readings from before `valid_from` count as lost.
    """
    states = Counter({"known": 0, "unknown": 0, "never": 0})
    readings: defaultdict[str, list[_ControllerReading]] = defaultdict(list)
    recorded = conn.execute(sa.select(*latest.READING_COLUMNS), {"valid_from": valid_from})
    rows = {row.endpoint_id: row for row in recorded}
    for endpoint in endpoints.all_endpoints(conn):
        row = rows.get(endpoint.id)
        states[_endpoint_state(row)] += 1
        if row is not None and row.facts is not None and endpoint.domain is not None:
            readings[endpoint.domain].append(
                _ControllerReading(row, controller.controller_kind(endpoint.url))
            )
    return SiteCounts(
        logical_partitions=_count_rows(conn, logical_partition),
        physical_partitions=_count_rows(conn, owned_partition, owned_partition.c.partition_id.is_not(None)),
        endpoints=states,
        disputed_domains=_count_rows(conn, domain_dispute),
        domains=tuple(_domain_counts(uuid, readings[uuid]) for uuid in sorted(readings)),
        ready_seconds=_ready_since(conn, since),
        newest_history=newest_history_entry(conn),
    )


def _count_rows(conn: sa.Connection, table: sa.Table, *which: sa.ColumnElement[bool]) -> int:
    return conn.execute(sa.select(sa.func.count()).select_from(table).where(*which)).scalar_one()


def _endpoint_state(row: "sa.Row[tuple[object, ...]] | None") -> str:
    if row is None or row.observed_at is None:
        return "never"
    return "known" if row.unknown_since is None else "unknown"


def _domain_counts(uuid: str, readings: list[_ControllerReading]) -> DomainCounts:
    counts = latest.newest_valid_row([reading.row for reading in readings])
    observed = latest.observation_of_row(counts)
    if counts.unknown_since is not None:
        # The last reading is no evidence of the present.
        observed = msgspec.structs.replace(observed, gpus=(), partitions=(), limits=DomainLimits())
    groups = {"limit": observed.limits.max_multicast_groups, "used": observed.used_multicast_groups}
    return DomainCounts(
        uuid=uuid,
        kind=next(reading.kind for reading in readings if reading.row is counts),
        observed_at=observed.observed_at,
        partitions=Counter(
            as_known(partition, observed.uncertain).health.name.lower() for partition in observed.partitions
        ),
        gpus=Counter(gpu.health.name.lower() for gpu in observed.gpus),
        nodes=_node_counts(observed),
        multicast_groups={name: number for name, number in groups.items() if number is not None},
    )


def _node_counts(observed: DomainObservation) -> Mapping[str, int]:
    healths: dict[tuple[str, int], set[GpuHealth]] = {}
    for gpu in observed.gpus:
        healths.setdefault((gpu.chassis_serial, gpu.slot), set()).add(gpu.health)
    return Counter(node_health(of_gpus) for of_gpus in healths.values())


def node_health(of_gpus: set[GpuHealth]) -> str:
    """Health as NMX-C defines it: one unhealthy GPU degrades its node, and no NVLink makes it unhealthy."""
    names = {GpuHealth.HEALTHY: "healthy", GpuHealth.UNKNOWN: "unknown", GpuHealth.NO_NVLINK: "unhealthy"}
    return names.get(next(iter(of_gpus)), "degraded") if len(of_gpus) == 1 else "degraded"


def _ready_since(conn: sa.Connection, since: int) -> tuple[float, ...]:
    turned = (
        sa.select(history.c.created - instance.c.intent_at)
        .join(instance, instance.c.id == history.c.object_id)
        .where(history.c.id > since, history.c.status == Status.READY)
        # An intent that is newer than this Ready waits for the next Ready.
        .where(history.c.created >= instance.c.intent_at)
    )
    return tuple(conn.execute(turned).scalars())
