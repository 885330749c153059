"""Switch fabrics as the site service last read them, and whether each reading still counts.

A domain may have several controllers. One that can be read is enough. The domain is unknown if its newest
reading is lost, older than `Staleness` allows, or in dispute between controllers. Old and lost readings
keep their content, marked with the time since when it is unknown. A controller that never answered
stands as a domain named by its address. A partition that the site made and saw, and that the newest
reading omits, is reported as lost.

Observations are decoded again only if their stored facts, or the owners of the domain's partitions,
changed.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
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
    grouped,
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
    """The age at which a reading no longer shows the present state."""

    now: float
    seconds: float
    """Age from which a reading shows only a former state."""
    reason: str = "the switch controller has not been read since"
    start: str = ""
    """A command that starts the service that reads the fabrics, or empty while it runs."""


class FabricSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All domains. The fields are those of `SiteSnapshot`."""

    domains: tuple[NvlinkDomainRecord, ...]
    fabric_gpus: tuple[FabricGpuRecord, ...]
    partitions: tuple[PartitionRecord, ...]
    lost_partitions: tuple[LostPartition, ...]


class _EndpointReading(msgspec.Struct, frozen=True):
    url: str
    chassis: tuple[str, ...]
    row: Any


class _Unknown(NamedTuple):
    """The reason why the newest reading of a domain does not show the present state."""

    since: float | None = None
    reason: str = ""
    disputed: bool = False


_CURRENT = _Unknown()


class _DomainFacts(msgspec.Struct, frozen=True):
    """The content of a domain's newest reading, and the site's records of its partitions."""

    facts: str
    owners: Mapping[str, str]


def read_fabrics(conn: sa.Connection, stale: Staleness, cache: ReadCache | None = None) -> FabricSnapshot:
    """Every domain as the records have it. Readings that are old or lost keep their content."""
    cache = cache or ReadCache()
    readings = _readings(conn)
    paused = set(conn.execute(sa.select(domain_pause.c.domain)).scalars())
    owners = _logical_by_partition(conn)
    disputed, policies = conflicts.conflicts_by_domain(conn), intent.default_partition_policies(conn)
    domains: list[NvlinkDomainRecord] = []
    shown: dict[str, _DomainFacts] = {}
    for uuid in sorted(readings):
        rows = [reading.row for reading in readings[uuid] if reading.row.facts is not None]
        newest = latest.newest_valid_row(rows) if rows else None
        doubt = _unknown(readings[uuid], newest, stale, disputed.get(uuid))
        domain = _domain(uuid, readings[uuid], newest, doubt)
        policy = policies.get(uuid, DefaultPartitionPolicy.KEEP).value
        domains.append(msgspec.structs.replace(domain, paused=uuid in paused, default_policy=policy))
        # Also a lost reading is shown: the map draws the last known state as unknown.
        if newest is not None:
            shown[uuid] = _DomainFacts(newest.facts, owners.get(uuid, {}))
    before, cache.shown = cache.shown, dict(zip(shown, cache.again(shown, _decoded), strict=True))
    decoded = cache.shown
    cache.observed |= {uuid for uuid in decoded if decoded[uuid] is not before.get(uuid)}
    return FabricSnapshot(
        domains=tuple(_with_reading(domain, decoded.get(domain.uuid)) for domain in domains),
        fabric_gpus=tuple(chain.from_iterable([reading.gpus for reading in decoded.values()])),
        partitions=tuple(chain.from_iterable([reading.partitions for reading in decoded.values()])),
        lost_partitions=tuple(_lost_partitions(conn)),
    )


class _DecodedReading(NamedTuple):
    gpus: tuple[FabricGpuRecord, ...]
    partitions: tuple[PartitionRecord, ...]
    uncertain: int
    """The number of GPUs about which the controller's lists contradict each other."""
    multicast_limit: int | None
    multicast_used: int | None


def _decoded(shown: _DomainFacts) -> _DecodedReading:
    observed = latest.decode_facts(shown.facts)
    partitions = sorted(observed.partitions, key=lambda partition: partition.id)
    owners = (shown.owners.get(partition.name) for partition in partitions)
    holders = grouped((guid, partition.id) for partition in partitions for guid in partition.members)
    gpus = sorted(observed.gpus, key=lambda gpu: (gpu.tray_index, gpu.module_id))
    return _DecodedReading(
        tuple(_gpu(observed, gpu, holders[gpu.guid]) for gpu in gpus),
        tuple(map(partial(_partition, observed), partitions, owners)),
        len(observed.uncertain),
        observed.limits.max_multicast_groups,
        observed.used_multicast_groups,
    )


def _with_reading(domain: NvlinkDomainRecord, reading: _DecodedReading | None) -> NvlinkDomainRecord:
    if reading is None:
        return domain
    return msgspec.structs.replace(
        domain,
        uncertain=reading.uncertain,
        multicast_limit=reading.multicast_limit,
        multicast_used=reading.multicast_used,
    )


def _readings(conn: sa.Connection) -> Mapping[str, list[_EndpointReading]]:
    """Readings by domain. A controller that never answered counts as a domain named by its address."""
    chassis = {known.id: known.chassis_serials for known in endpoints.all_endpoints(conn)}
    named = (endpoint.c.id, endpoint.c.url, endpoint.c.domain.label("domain"))
    rows = conn.execute(
        sa.select(*named, observation, latest.LISTS_GPUS)
        .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
        .order_by(endpoint.c.url)
    ).all()
    return grouped(
        (row.domain or row.url, _EndpointReading(row.url, chassis[row.id], row))
        for row in rows
        if row.id in chassis
    )


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
    """One readable controller is enough, and only a recent reading shows the present state."""
    if newest is None or newest.unknown_since is not None:
        last = latest.last_lost_row(reading.row for reading in readings)
        if last is None:
            return _Unknown(stale.now, "no switch controller of it has answered yet")
        return _Unknown(last.unknown_since, last.unknown_reason or "")
    if stale.now - newest.observed_at > stale.seconds:
        return _Unknown(newest.observed_at, stale.reason)
    return _CURRENT if dispute is None else _Unknown(dispute.since, dispute.reason, disputed=True)


def _gpu(observed: DomainObservation, gpu: ObservedGpu, holders: list[int]) -> FabricGpuRecord:
    known = gpu.health is not GpuHealth.UNKNOWN
    return FabricGpuRecord(
        domain=observed.domain,
        place=SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id),
        guid=gpu.guid,
        tray_index=gpu.tray_index,
        healthy=gpu.health is GpuHealth.HEALTHY if known else None,
        problem="" if gpu.health is GpuHealth.HEALTHY else gpu.health.name,
        partition=holders[0] if holders else None,
        also=tuple(holders[1:]),
        uncertain=gpu.guid in observed.uncertain,
    )


def _partition(
    observed: DomainObservation, partition: ObservedPartition, recorded: str | None
) -> PartitionRecord:
    doubtful = observed.uncertain
    owner, health = found.classify_owner(partition, recorded), partition.health
    return PartitionRecord(
        domain=observed.domain,
        id=partition.id,
        name=partition.name,
        healthy=health is PartitionHealth.HEALTHY if health is not PartitionHealth.UNKNOWN else None,
        problem="" if health is PartitionHealth.HEALTHY else health.name,
        logical=recorded if owner is found.Owner.SITE else None,
        default=owner is found.Owner.DEFAULT,
        owner=owner.value,
        uncertain=bool(doubtful) and (not partition.members or not partition.members.isdisjoint(doubtful)),
    )


def _logical_by_partition(conn: sa.Connection) -> Mapping[str, dict[str, str]]:
    """The logical partition of each of the site's partitions, by domain and name."""
    rows = conn.execute(sa.select(owned_partition)).all()
    names = grouped((row.domain, (row.name, row.logical_partition_id)) for row in rows)
    return {domain: dict(pairs) for domain, pairs in names.items()}


def _lost_partitions(conn: sa.Connection) -> Iterator[LostPartition]:
    missing = owned_partition.c.seen_at.is_not(None) & owned_partition.c.partition_id.is_(None)
    order = (owned_partition.c.domain, owned_partition.c.name)
    for row in conn.execute(sa.select(owned_partition).where(missing).order_by(*order)):
        yield LostPartition(
            domain=row.domain, name=row.name, logical=row.logical_partition_id, seen_at=row.seen_at
        )
