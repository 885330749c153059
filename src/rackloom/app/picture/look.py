"""One picture of a site from its records, its cluster and its transfers, for the doctor and the map."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from rackloom.app.picture.cluster import Lister, Reach, read_cluster
from rackloom.app.picture.fabric import Fabrics, Staleness, read_fabrics
from rackloom.app.picture.known import Known
from rackloom.app.picture.read_only import Reader
from rackloom.app.picture.site import Records, read_records
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.kube.api import KubeError
from rackloom.errors import Refused
from rackloom.prove.picture.transfers import read_transfers
from rackloom.prove.picture.values import Layer, LayerSeen, Picture

MISSED_READINGS = 3
"""Intervals without a reading after which what was read is old."""


def stale_after(interval: timedelta) -> float:
    """Age in seconds from which a reading is not how things are, where one is made every `interval`."""
    return MISSED_READINGS * interval.total_seconds()


STALE_SECONDS = stale_after(timedelta(seconds=60))
"""With the reconciler's default interval."""


async def site_picture(
    now: float,
    *,
    records: Reader | None = None,
    stale: Staleness | None = None,
    cluster: Lister | None = None,
    reach: Callable[[], Reach] | None = None,
    transfers: Path | None = None,
    known: Known | None = None,
    namespace: str = DEFAULT_DAEMON_NAMESPACE,
) -> Picture:
    """What each layer says at `now` (seconds since the epoch); a layer that is None was not asked.

    `records` is a `Store` or a reader of one; `stale` says when its readings no longer count (default: after
    `STALE_SECONDS`); `reach` is how far `cluster` follows its API server (default: it asks now); `transfers`
    is the folder of their records; `known` is for who looks often; `namespace` is that of the IMEX daemons.
    An API server that does not answer, or a record that cannot be read, makes its layer unknown. What
    `records` raises passes through.
    """
    picture = Picture(at=now, layers=())
    if records is not None:
        picture = await _with_records(picture, records, stale or Staleness(now, STALE_SECONDS), known)
    if cluster is not None:
        picture = await _with_cluster(picture, cluster, reach, known, namespace)
    if transfers is not None:
        picture = await asyncio.to_thread(_with_transfers, picture, transfers)
    return picture


async def _with_records(picture: Picture, records: Reader, stale: Staleness, known: Known | None) -> Picture:
    fabrics, told = await records.read(
        lambda conn: (read_fabrics(conn, stale, known), read_records(conn, known))
    )
    return _with_site(_with_fabrics(picture, fabrics, stale), told)


def _with_fabrics(picture: Picture, fabrics: Fabrics, stale: Staleness) -> Picture:
    """The layer is as old as its oldest reading; what a single domain lacks is said of that domain."""
    at = min((one.observed_at for one in fabrics.domains if one.observed_at is not None), default=None)
    seen = LayerSeen(layer=Layer.FABRIC, at=at)
    if stale.start:
        since = picture.at if at is None else at
        seen = msgspec.structs.replace(seen, unknown_since=since, problem=stale.reason, fix=stale.start)
    return _with(
        picture,
        seen,
        domains=fabrics.domains,
        fabric_gpus=fabrics.gpus,
        partitions=fabrics.partitions,
        lost_partitions=fabrics.lost,
    )


def _with_site(picture: Picture, told: Records) -> Picture:
    return _with(picture, LayerSeen(layer=Layer.SITE, at=picture.at), **msgspec.structs.asdict(told))


async def _with_cluster(
    picture: Picture,
    api: Lister,
    reach: Callable[[], Reach] | None,
    known: Known | None,
    namespace: str,
) -> Picture:
    seen = Reach(picture.at, None) if reach is None else reach()
    try:
        cluster = await read_cluster(api, known, namespace)
    except KubeError as error:
        lost = LayerSeen(
            layer=Layer.CLUSTER,
            unknown_since=picture.at if seen.unknown_since is None else seen.unknown_since,
            problem=f"the cluster cannot be read: {error.message}",
            fix="kubectl get --raw /readyz",
        )
        return _with(picture, lost)
    return _with(
        picture,
        LayerSeen(layer=Layer.CLUSTER, at=seen.at, problem=cluster.problem),
        nodes=cluster.nodes,
        pools=cluster.pools,
        devices=cluster.devices,
        uses=cluster.uses,
        meshes=cluster.meshes,
        daemons_in=namespace,
        compute_domains=cluster.seen.domains,
        templates=cluster.seen.templates,
        claims=cluster.seen.claims,
        pods=cluster.seen.pods,
        namespaces=cluster.namespaces,
        simulated=(Layer.CLUSTER,) if any(one.simulated for one in cluster.nodes) else (),
    )


def _with_transfers(picture: Picture, folder: Path) -> Picture:
    try:
        found = read_transfers(folder)
    except Refused as error:
        lost = LayerSeen(
            layer=Layer.TRANSFER,
            unknown_since=picture.at,
            problem=error.reason,
            fix=error.nearest_fix or "",
        )
        return _with(picture, lost)
    return _with(picture, LayerSeen(layer=Layer.TRANSFER, at=picture.at), transfers=found)


def _with(picture: Picture, seen: LayerSeen, **told: object) -> Picture:
    return msgspec.structs.replace(picture, layers=(*picture.layers, seen), **told)
