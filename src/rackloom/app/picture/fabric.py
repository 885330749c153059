"""Switch fabrics as the site service last read them: the newest observation of each domain, and its age."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.app.picture.known import Known
from rackloom.carve.plan.values import (
    DefaultPartition,
    GpuHealth,
    Observation,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.carve.site import disputes, endpoints, holdings, knowledge, physical_partitions
from rackloom.carve.site.tables import domain_pause, endpoint, observation, owned_partition
from rackloom.prove.picture.values import (
    DomainSeen,
    FabricGpu,
    LostPartition,
    PartitionSeen,
    SilentController,
)
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
    chassis: tuple[str, ...]
    row: Any


class _Doubt(NamedTuple):
    """Why the newest reading of a domain does not say how things are."""

    since: float | None = None
    reason: str = ""
    disputed: bool = False


_NO_DOUBT = _Doubt()


def read_fabrics(conn: sa.Connection, stale: Staleness, known: Known | None = None) -> Fabrics:
    """What the records know of every domain. Readings that are old or lost keep what they showed.

    `known` remembers what readings showed.
    """
    known = known or Known()
    readings = _readings(conn)
    paused = set(conn.execute(sa.select(domain_pause.c.domain)).scalars())
    owners, disputed, policies = _owners(conn), disputes.every(conn), holdings.default_partitions(conn)
    seen: list[DomainSeen] = []
    shown: dict[str, _Shown] = {}
    for domain in sorted(readings):
        newest = _newest(readings[domain])
        doubt = _doubt(readings[domain], newest, stale, disputed.get(domain))
        one = _domain(domain, readings[domain], newest, doubt)
        policy = policies.get(domain, DefaultPartition.KEEP).value
        seen.append(msgspec.structs.replace(one, paused=domain in paused, default_policy=policy))
        if newest is not None:
            shown[domain] = _Shown(newest.facts, owners.get(domain, {}))
    told = known.again(shown, _told)
    return Fabrics(
        domains=tuple(seen),
        gpus=tuple(gpu for gpus, _ in told for gpu in gpus),
        partitions=tuple(partition for _, partitions in told for partition in partitions),
        lost=tuple(_lost(conn)),
    )


class _Shown(msgspec.Struct, frozen=True):
    """What a domain's newest reading shows, and the site's own records of its partitions."""

    facts: str
    owners: Mapping[str, str]


def _told(shown: _Shown) -> tuple[tuple[FabricGpu, ...], tuple[PartitionSeen, ...]]:
    observed = knowledge.decoded(shown.facts)
    return tuple(_gpus(observed)), tuple(_partitions(observed, shown.owners))


def _readings(conn: sa.Connection) -> Mapping[str, list[_Reading]]:
    """By domain. A controller that never answered is a domain of its own, named by its address."""
    spoken_to = {one.id: one.chassis_serials for one in endpoints.every(conn)}
    rows = conn.execute(
        sa.select(endpoint.c.id, endpoint.c.url, endpoint.c.domain.label("domain"), observation)
        .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
        .order_by(endpoint.c.url)
    )
    found: defaultdict[str, list[_Reading]] = defaultdict(list)
    for row in rows:
        if row.id in spoken_to:
            found[row.domain or row.url].append(_Reading(row.url, spoken_to[row.id], row))
    return found


def _newest(readings: Iterable[_Reading]) -> Any | None:
    """The row that counts, though it be lost; None where nothing was ever read."""
    rows = [one.row for one in readings if one.row.facts is not None]
    return knowledge.that_counts(rows) if rows else None


def _domain(uuid: str, readings: list[_Reading], newest: Any | None, doubt: _Doubt) -> DomainSeen:
    return DomainSeen(
        uuid=uuid,
        endpoints=tuple(one.url for one in readings),
        observed_at=None if newest is None else newest.observed_at,
        unknown_since=doubt.since,
        problem=doubt.reason,
        disputed=doubt.disputed,
        silent=tuple(
            SilentController(one.url, one.row.unknown_since, one.chassis)
            for one in readings
            if one.row.unknown_since is not None
        ),
        chassis=frozenset(serial for one in readings for serial in one.chassis),
    )


def _doubt(
    readings: list[_Reading], newest: Any | None, stale: Staleness, dispute: disputes.Dispute | None
) -> _Doubt:
    """One controller that can be read is enough, and only a recent reading says how things are."""
    if newest is None or newest.unknown_since is not None:
        return _silence(readings, stale.now)
    if stale.now - newest.observed_at > stale.seconds:
        return _Doubt(newest.observed_at, stale.reason)
    return _NO_DOUBT if dispute is None else _Doubt(dispute.since, dispute.reason, disputed=True)


def _silence(readings: list[_Reading], now: float) -> _Doubt:
    last = knowledge.last_lost(one.row for one in readings)
    if last is None:
        return _Doubt(now, "no switch controller of it has answered yet")
    return _Doubt(last.unknown_since, last.unknown_reason or "")


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


def _partitions(observed: Observation, owners: Mapping[str, str]) -> Iterator[PartitionSeen]:
    for one in sorted(observed.partitions, key=lambda one: one.id):
        yield _partition(observed.domain, one, owners.get(one.name))


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


def _owners(conn: sa.Connection) -> Mapping[str, dict[str, str]]:
    """The logical partition of each of our partitions, by domain and name."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for row in conn.execute(sa.select(owned_partition)):
        found[row.domain][row.name] = row.logical_partition_id
    return found


def _lost(conn: sa.Connection) -> Iterator[LostPartition]:
    missing = owned_partition.c.seen_at.is_not(None) & owned_partition.c.partition_id.is_(None)
    order = (owned_partition.c.domain, owned_partition.c.name)
    for row in conn.execute(sa.select(owned_partition).where(missing).order_by(*order)):
        yield LostPartition(
            domain=row.domain, name=row.name, logical=row.logical_partition_id, seen_at=row.seen_at
        )
