"""Switch fabrics as the site service last read them, and whether each reading still counts.

A domain may have several controllers; one that can be read is enough. The domain is unknown if its newest
reading is lost, older than `Staleness` allows, or in dispute between controllers. Old and lost readings
keep what they showed, marked with the time since when it is unknown. A controller that never answered
stands as a domain named by its address. A partition that the site made and saw, and that the newest
reading omits, is reported as lost.

Observations are decoded again only where their stored facts, or the owners of the domain's partitions,
changed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.app.snapshot.cache import ReadCache
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.partitions import found, intent
from rackloom.carve.store.schema import domain_pause, endpoint, observation, owned_partition
from rackloom.core.diagnosis.snapshot import (
    FabricGpuRecord,
    LostPartition,
    NvlinkDomainRecord,
    PartitionRecord,
    SilentController,
)
from rackloom.core.partitions.domain import (
    DefaultPartitionPolicy,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.topology.join_key import SlotKey


class Staleness(msgspec.Struct, frozen=True):
    """When a reading is too old to tell how things are."""

    now: float
    seconds: float
    """Age from which a reading counts for no more than what was once seen."""
    reason: str = "the switch controller has not been read since"
    start: str = ""
    """How to start the service that reads the fabrics, when it is not running; empty while it is."""


class FabricSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All domains."""

    domains: tuple[NvlinkDomainRecord, ...]
    gpus: tuple[FabricGpuRecord, ...]
    partitions: tuple[PartitionRecord, ...]
    lost: tuple[LostPartition, ...]


class _EndpointReading(msgspec.Struct, frozen=True):
    url: str
    chassis: tuple[str, ...]
    row: Any


class _Unknown(NamedTuple):
    """Why the newest reading of a domain does not say how things are."""

    since: float | None = None
    reason: str = ""
    disputed: bool = False


_CURRENT = _Unknown()


def read_fabrics(conn: sa.Connection, stale: Staleness, known: ReadCache | None = None) -> FabricSnapshot:
    """What the records know of every domain. Readings that are old or lost keep what they showed.

    `known` remembers what readings showed.
    """
    known = known or ReadCache()
    readings = _readings(conn)
    paused = set(conn.execute(sa.select(domain_pause.c.domain)).scalars())
    owners, disputed, policies = (
        _logical_by_partition(conn),
        conflicts.conflicts_by_domain(conn),
        intent.default_partition_policies(conn),
    )
    seen: list[NvlinkDomainRecord] = []
    shown: dict[str, _DomainFacts] = {}
    for domain in sorted(readings):
        newest = _newest(readings[domain])
        doubt = _unknown(readings[domain], newest, stale, disputed.get(domain))
        one = _domain(domain, readings[domain], newest, doubt)
        policy = policies.get(domain, DefaultPartitionPolicy.KEEP).value
        seen.append(msgspec.structs.replace(one, paused=domain in paused, default_policy=policy))
        if newest is not None:
            shown[domain] = _DomainFacts(newest.facts, owners.get(domain, {}))
    told = known.again(shown, _told)
    return FabricSnapshot(
        domains=tuple(seen),
        gpus=tuple(gpu for gpus, _ in told for gpu in gpus),
        partitions=tuple(partition for _, partitions in told for partition in partitions),
        lost=tuple(_lost_partitions(conn)),
    )


class _DomainFacts(msgspec.Struct, frozen=True):
    """What a domain's newest reading shows, and the site's own records of its partitions."""

    facts: str
    owners: Mapping[str, str]


def _told(shown: _DomainFacts) -> tuple[tuple[FabricGpuRecord, ...], tuple[PartitionRecord, ...]]:
    observed = latest.decode_facts(shown.facts)
    return tuple(_gpus(observed)), tuple(_partitions(observed, shown.owners))


def _readings(conn: sa.Connection) -> Mapping[str, list[_EndpointReading]]:
    """By domain. A controller that never answered is a domain of its own, named by its address."""
    spoken_to = {
        all_endpoint.id: all_endpoint.chassis_serials for all_endpoint in endpoints.all_endpoints(conn)
    }
    rows = conn.execute(
        sa.select(endpoint.c.id, endpoint.c.url, endpoint.c.domain.label("domain"), observation)
        .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
        .order_by(endpoint.c.url)
    )
    found: defaultdict[str, list[_EndpointReading]] = defaultdict(list)
    for row in rows:
        if row.id in spoken_to:
            found[row.domain or row.url].append(_EndpointReading(row.url, spoken_to[row.id], row))
    return found


def _newest(readings: Iterable[_EndpointReading]) -> Any | None:
    """The row that counts, though it be lost; None where nothing was ever read."""
    rows = [reading.row for reading in readings if reading.row.facts is not None]
    return latest.newest_valid_row(rows) if rows else None


def _domain(
    uuid: str, readings: list[_EndpointReading], newest: Any | None, doubt: _Unknown
) -> NvlinkDomainRecord:
    return NvlinkDomainRecord(
        uuid=uuid,
        endpoints=tuple(reading.url for reading in readings),
        observed_at=None if newest is None else newest.observed_at,
        unknown_since=doubt.since,
        problem=doubt.reason,
        disputed=doubt.disputed,
        silent=tuple(
            SilentController(reading.url, reading.row.unknown_since, reading.chassis)
            for reading in readings
            if reading.row.unknown_since is not None
        ),
        chassis=frozenset(serial for reading in readings for serial in reading.chassis),
    )


def _unknown(
    readings: list[_EndpointReading],
    newest: Any | None,
    stale: Staleness,
    dispute: conflicts.ControllerConflict | None,
) -> _Unknown:
    """One controller that can be read is enough, and only a recent reading says how things are."""
    if newest is None or newest.unknown_since is not None:
        return _unknown_by_silence(readings, stale.now)
    if stale.now - newest.observed_at > stale.seconds:
        return _Unknown(newest.observed_at, stale.reason)
    return _CURRENT if dispute is None else _Unknown(dispute.since, dispute.reason, disputed=True)


def _unknown_by_silence(readings: list[_EndpointReading], now: float) -> _Unknown:
    last = latest.last_lost_row(reading.row for reading in readings)
    if last is None:
        return _Unknown(now, "no switch controller of it has answered yet")
    return _Unknown(last.unknown_since, last.unknown_reason or "")


def _gpus(observed: DomainObservation) -> Iterator[FabricGpuRecord]:
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for partition in sorted(observed.partitions, key=lambda one: one.id):
        for guid in partition.members:
            holders[guid].append(partition.id)
    for gpu in sorted(observed.gpus, key=lambda one: (one.tray_index, one.module_id)):
        yield _gpu(observed.domain, gpu, holders.get(gpu.guid, []))


def _gpu(domain: str, gpu: ObservedGpu, holders: list[int]) -> FabricGpuRecord:
    known = gpu.health is not GpuHealth.UNKNOWN
    return FabricGpuRecord(
        domain=domain,
        place=SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id),
        guid=gpu.guid,
        tray_index=gpu.tray_index,
        healthy=gpu.health is GpuHealth.HEALTHY if known else None,
        problem="" if gpu.health is GpuHealth.HEALTHY else gpu.health.name,
        partition=holders[0] if holders else None,
        also=tuple(holders[1:]),
    )


def _partitions(observed: DomainObservation, owners: Mapping[str, str]) -> Iterator[PartitionRecord]:
    for partition in sorted(observed.partitions, key=lambda one: one.id):
        yield _partition(observed.domain, partition, owners.get(partition.name))


def _partition(domain: str, observed_partition: ObservedPartition, recorded: str | None) -> PartitionRecord:
    owner = found.classify_owner(observed_partition, recorded)
    known = observed_partition.health is not PartitionHealth.UNKNOWN
    return PartitionRecord(
        domain=domain,
        id=observed_partition.id,
        name=observed_partition.name,
        healthy=observed_partition.health is PartitionHealth.HEALTHY if known else None,
        problem=""
        if observed_partition.health is PartitionHealth.HEALTHY
        else observed_partition.health.name,
        logical=recorded if owner is found.Owner.SITE else None,
        default=owner is found.Owner.DEFAULT,
        owner=owner.value,
    )


def _logical_by_partition(conn: sa.Connection) -> Mapping[str, dict[str, str]]:
    """The logical partition of each of our partitions, by domain and name."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for row in conn.execute(sa.select(owned_partition)):
        found[row.domain][row.name] = row.logical_partition_id
    return found


def _lost_partitions(conn: sa.Connection) -> Iterator[LostPartition]:
    missing = owned_partition.c.seen_at.is_not(None) & owned_partition.c.partition_id.is_(None)
    order = (owned_partition.c.domain, owned_partition.c.name)
    for row in conn.execute(sa.select(owned_partition).where(missing).order_by(*order)):
        yield LostPartition(
            domain=row.domain, name=row.name, logical=row.logical_partition_id, seen_at=row.seen_at
        )
