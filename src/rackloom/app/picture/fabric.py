"""Switch fabrics as the site service last read them: the newest observation of each domain, and its age."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import (
    GpuHealth,
    Observation,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.carve.site import endpoints, holdings, knowledge, physical_partitions
from rackloom.carve.site.tables import domain_pause, endpoint, observation, operation, owned_partition
from rackloom.prove.picture.values import DomainSeen, FabricGpu, LostPartition, PartitionSeen
from rackloom.topology.identity import SlotKey


class Staleness(msgspec.Struct, frozen=True):
    """When a reading is too old to tell how things are."""

    now: float
    seconds: float
    """Age from which a reading counts for no more than what was once seen."""
    reason: str = "the switch controller has not been read since"
    start: str = ""
    """How to start the service that reads the fabrics, when it is not running; empty while it is."""


class Fabrics(msgspec.Struct, frozen=True, kw_only=True):
    """All domains."""

    domains: tuple[DomainSeen, ...]
    gpus: tuple[FabricGpu, ...]
    partitions: tuple[PartitionSeen, ...]
    lost: tuple[LostPartition, ...]


class _Reading(msgspec.Struct, frozen=True):
    url: str
    row: Any


def read_fabrics(conn: sa.Connection, stale: Staleness) -> Fabrics:
    """What the records know of every domain. Readings that are old or lost keep what they showed."""
    readings = _readings(conn)
    paused = set(conn.execute(sa.select(domain_pause.c.domain)).scalars())
    owners, changes = _owners(conn), _changes(conn)
    seen: list[DomainSeen] = []
    gpus: list[FabricGpu] = []
    partitions: list[PartitionSeen] = []
    for domain in sorted(readings):
        newest = _newest(readings[domain])
        doubt = _doubt(readings[domain], newest, stale, changes.get(domain, 0.0))
        one = _domain(domain, readings[domain], newest, doubt)
        policy = holdings.default_partition(conn, domain).value
        seen.append(msgspec.structs.replace(one, paused=domain in paused, default_policy=policy))
        if newest is not None:
            gpus += _gpus(newest)
            partitions += _partitions(newest, owners)
    return Fabrics(
        domains=tuple(seen), gpus=tuple(gpus), partitions=tuple(partitions), lost=tuple(_lost(conn))
    )


def _readings(conn: sa.Connection) -> Mapping[str, list[_Reading]]:
    """By domain. A controller that never answered is a domain of its own, named by its address."""
    spoken_to = {one.id for one in endpoints.every(conn)}
    rows = conn.execute(
        sa.select(endpoint.c.id, endpoint.c.url, endpoint.c.domain.label("domain"), observation)
        .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
        .order_by(endpoint.c.url)
    )
    found: defaultdict[str, list[_Reading]] = defaultdict(list)
    for row in rows:
        if row.id in spoken_to:
            found[row.domain or row.url].append(_Reading(row.url, row))
    return found


def _newest(readings: Iterable[_Reading]) -> Observation | None:
    rows = [one.row for one in readings if one.row.facts is not None]
    return knowledge.kept(max(rows, key=lambda row: row.observed_at)) if rows else None


def _domain(
    uuid: str, readings: list[_Reading], newest: Observation | None, doubt: tuple[float | None, str]
) -> DomainSeen:
    since, problem = doubt
    return DomainSeen(
        uuid=uuid,
        endpoints=tuple(one.url for one in readings),
        observed_at=None if newest is None else newest.observed_at,
        unknown_since=since,
        problem=problem,
    )


def _doubt(
    readings: list[_Reading], newest: Observation | None, stale: Staleness, changed: float
) -> tuple[float | None, str]:
    """One controller that can be read is enough, and only a recent reading says how things are."""
    told = [one for one in readings if one.row.facts is not None and one.row.unknown_since is None]
    if not told or newest is None:
        return _silence(readings, stale.now)
    if stale.now - newest.observed_at > stale.seconds:
        return newest.observed_at, stale.reason
    recent = [one for one in told if one.row.observed_at > max(changed, stale.now - stale.seconds)]
    if len({one.row.facts for one in recent}) > 1:
        return min(one.row.observed_at for one in recent), _contradiction(recent)
    return None, ""


def _silence(readings: list[_Reading], now: float) -> tuple[float, str]:
    lost = [one.row for one in readings if one.row.unknown_since is not None]
    if not lost:
        return now, "no switch controller of it has answered yet"
    last = max(lost, key=lambda row: row.unknown_since)
    return last.unknown_since, last.unknown_reason or ""


def _contradiction(recent: list[_Reading]) -> str:
    shown = [(one.url, knowledge.kept(one.row)) for one in recent]
    told = (f"{url} shows {len(seen.gpus)} GPUs in {_members(seen)}" for url, seen in shown)
    return f"its switch controllers contradict one another: {'; '.join(told)}"


def _members(seen: Observation) -> str:
    named = ", ".join(f"{one.name} with {len(one.members)}" for one in seen.partitions)
    return f"partitions {named}" if named else "no partition"


def _changes(conn: sa.Connection) -> Mapping[str, float]:
    """When the last operation of each domain was answered: readings from before it may show another state."""
    newest = sa.select(operation.c.domain, sa.func.max(operation.c.finished)).group_by(operation.c.domain)
    return {row[0]: row[1] for row in conn.execute(newest) if row[0] is not None and row[1] is not None}


def _gpus(observed: Observation) -> Iterator[FabricGpu]:
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for partition in sorted(observed.partitions, key=lambda one: one.id):
        for guid in partition.members:
            holders[guid].append(partition.id)
    for gpu in sorted(observed.gpus, key=lambda one: (one.tray_index, one.module_id)):
        yield _gpu(observed.domain, gpu, holders.get(gpu.guid, []))


def _gpu(domain: str, gpu: ObservedGpu, holders: list[int]) -> FabricGpu:
    known = gpu.health is not GpuHealth.UNKNOWN
    return FabricGpu(
        domain=domain,
        place=SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id),
        guid=gpu.guid,
        tray_index=gpu.tray_index,
        healthy=gpu.health is GpuHealth.HEALTHY if known else None,
        problem="" if gpu.health is GpuHealth.HEALTHY else gpu.health.name,
        partition=holders[0] if holders else None,
        also=tuple(holders[1:]),
    )


def _partitions(observed: Observation, owners: Mapping[tuple[str, str], str]) -> Iterator[PartitionSeen]:
    for one in sorted(observed.partitions, key=lambda one: one.id):
        yield _partition(observed.domain, one, owners.get((observed.domain, one.name)))


def _partition(domain: str, one: ObservedPartition, recorded: str | None) -> PartitionSeen:
    owner = physical_partitions.owner_of(one, recorded)
    known = one.health is not PartitionHealth.UNKNOWN
    return PartitionSeen(
        domain=domain,
        id=one.id,
        name=one.name,
        healthy=one.health is PartitionHealth.HEALTHY if known else None,
        problem="" if one.health is PartitionHealth.HEALTHY else one.health.name,
        logical=recorded if owner is physical_partitions.Owner.SITE else None,
        default=owner is physical_partitions.Owner.DEFAULT,
        owner=owner.value,
    )


def _owners(conn: sa.Connection) -> dict[tuple[str, str], str]:
    rows = conn.execute(sa.select(owned_partition))
    return {(row.domain, row.name): row.logical_partition_id for row in rows}


def _lost(conn: sa.Connection) -> Iterator[LostPartition]:
    missing = owned_partition.c.seen_at.is_not(None) & owned_partition.c.partition_id.is_(None)
    order = (owned_partition.c.domain, owned_partition.c.name)
    for row in conn.execute(sa.select(owned_partition).where(missing).order_by(*order)):
        yield LostPartition(
            domain=row.domain, name=row.name, logical=row.logical_partition_id, seen_at=row.seen_at
        )
