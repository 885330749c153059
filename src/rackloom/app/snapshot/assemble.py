"""One snapshot of a site from its records, its cluster and its saved transfers.

The doctor and the rack map read nothing else. `site_snapshot` reads each layer that it is given and leaves
out the others. An API server that does not answer, or a record that cannot be read, makes its layer
unknown with the reason and a command that helps. The other layers are read all the same. Errors of the
database pass through. The fabric layer is as old as its oldest reading. The status of a single domain is
part of that domain. Each layer's reader is imported when its layer is read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, SiteSnapshot
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.app.snapshot.cache import ReadCache
    from rackloom.app.snapshot.cluster import ClusterFreshness, Lister
    from rackloom.app.snapshot.fabric import Staleness
    from rackloom.app.snapshot.readers import RecordReader


async def site_snapshot(
    now: float,
    *,
    records: "RecordReader | None" = None,
    stale: "Staleness | None" = None,
    cluster: "Lister | None" = None,
    reach: "Callable[[], ClusterFreshness] | None" = None,
    transfers: Path | None = None,
    known: "ReadCache | None" = None,
    namespace: str = DEFAULT_DAEMON_NAMESPACE,
) -> SiteSnapshot:
    """The report of each layer at `now` (seconds since the epoch). A layer that is None is not read.

    `records` is a `Store` or a reader of one. `stale` defines when its readings are old (default: after
    `DEFAULT_VALID_SECONDS`). `reach` is how recent `cluster` is (default: it queries its API server now).
    `transfers` is the folder of transfer records, which need not exist yet, `known` the cache of a frequent
    reader, `namespace` that of the IMEX daemons. An API server that does not answer, or a transfer record
    that cannot be read, makes its layer unknown. Errors of `records` pass through.
    """
    snapshot = SiteSnapshot(at=now, layers=())
    if records is not None:
        snapshot = await _with_records(snapshot, records, stale, known)
    if cluster is not None:
        snapshot = await _with_cluster(snapshot, cluster, reach, known, namespace)
    if transfers is not None and transfers.is_dir():  # noqa: ASYNC240 (one look)
        import asyncio

        snapshot = await asyncio.to_thread(_with_transfers, snapshot, transfers)
    return snapshot


async def _with_records(
    snapshot: SiteSnapshot, records: "RecordReader", stale: "Staleness | None", known: "ReadCache | None"
) -> SiteSnapshot:
    from rackloom.app.snapshot.fabric import Staleness, read_fabrics
    from rackloom.app.snapshot.records import read_records, with_doubts
    from rackloom.carve.observation.latest import rfc3339

    stale = stale or Staleness(snapshot.at, DEFAULT_VALID_SECONDS)
    fabrics, site = await records.read(
        lambda conn: (read_fabrics(conn, stale, known), read_records(conn, snapshot.at, known))
    )
    # The layer is as old as its oldest reading. The status of a single domain is part of that domain.
    at = min(
        (domain.observed_at for domain in fabrics.domains if domain.observed_at is not None), default=None
    )
    status = LayerStatus(layer=Layer.FABRIC, at=at)
    if stale.start:
        since = snapshot.at if at is None else at
        status = msgspec.structs.replace(status, unknown_since=since, problem=stale.reason, fix=stale.start)
    else:
        # Tenants read this: a reason may hold a controller's answer.
        site = with_doubts(
            site,
            {
                domain.uuid: f"unknown since {rfc3339(domain.unknown_since)}"
                for domain in fabrics.domains
                if domain.unknown_since is not None
            },
        )
    with_fabric = _with_layer(snapshot, status, **msgspec.structs.asdict(fabrics))
    return _with_layer(
        with_fabric, LayerStatus(layer=Layer.SITE, at=snapshot.at), **msgspec.structs.asdict(site)
    )


async def _with_cluster(
    snapshot: SiteSnapshot,
    api: "Lister",
    reach: "Callable[[], ClusterFreshness] | None",
    known: "ReadCache | None",
    namespace: str,
) -> SiteSnapshot:
    from rackloom.app.snapshot.cluster import ClusterFreshness, read_cluster
    from rackloom.claim.kube.api import KubeError

    freshness = ClusterFreshness(snapshot.at, None) if reach is None else reach()
    try:
        cluster = await read_cluster(api, known, namespace)
    except KubeError as error:
        lost = LayerStatus(
            layer=Layer.CLUSTER,
            unknown_since=snapshot.at if freshness.unknown_since is None else freshness.unknown_since,
            problem=f"the cluster cannot be read: {error.message}",
            fix="kubectl get --raw /readyz",
        )
        return _with_layer(snapshot, lost)
    fields = msgspec.structs.asdict(cluster)
    status = LayerStatus(layer=Layer.CLUSTER, at=freshness.at, problem=fields.pop("problem"))
    simulated = (Layer.CLUSTER,) if any(node.simulated for node in cluster.nodes) else ()
    return _with_layer(snapshot, status, **fields, daemons_in=namespace, simulated=simulated)


def _with_transfers(snapshot: SiteSnapshot, folder: Path) -> SiteSnapshot:
    from rackloom.prove.collectors.transfers import read_transfers

    try:
        found = read_transfers(folder)
    except Refused as error:
        fix = error.nearest_fix or ""
        lost = LayerStatus(layer=Layer.TRANSFER, unknown_since=snapshot.at, problem=error.reason, fix=fix)
        return _with_layer(snapshot, lost)
    return _with_layer(snapshot, LayerStatus(layer=Layer.TRANSFER, at=snapshot.at), transfers=found)


def _with_layer(snapshot: SiteSnapshot, status: LayerStatus, **records: object) -> SiteSnapshot:
    return msgspec.structs.replace(snapshot, layers=(*snapshot.layers, status), **records)
