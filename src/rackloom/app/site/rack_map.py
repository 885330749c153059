"""The rack map beside REST: one address, the same tokens, and the snapshot of the doctor.

`SiteSource` reads the site for the map: records, and cluster and transfer records if there are any. A
reading joins the layers in a thread and takes the newest findings of the examiner, which pauses while a
snapshot is made. A change is noticed within 0.1 s by polling small versions from indexes: SQLite does not
notify of another process's commit. Readings go through the store's survey connections, so that REST does
not wait for them.

The timeline holds the newest 50 operations of each organisation, so that one organisation cannot displace
the entries of another. Operations are never deleted, so only the newest 100,000 are searched.

`authenticator_of` admits the callers that REST admits. A provider role shows the whole site only to the
organisation that provides it. `mount_rack_map` routes `/` and `/map/` to the map, and every other path to
REST.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import sqlalchemy as sa
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.app.site.cluster import ClusterFollower
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.background_examiner import Examiner
from rackloom.app.snapshot.cache import ReadCache
from rackloom.app.snapshot.cluster import ClusterFreshness, Lister
from rackloom.app.snapshot.fabric import Staleness
from rackloom.app.snapshot.records import newest_entries
from rackloom.carve.api.auth import Role, TokenVerifier, UnauthenticatedCaller
from rackloom.carve.partitions.ownership import ASKED_BY_SITE
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import domain_revision, operation, provider, site
from rackloom.carve.store.values import Rejected
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.index import at_domain, at_partition
from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.errors import Retry
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteReading, TimelineEntry
from rackloom.web.pages import create_pages
from rackloom.web.provider_sign_in import ProviderSignIn, SignInProvider
from rackloom.web.sign_in_codes import SignInCodes
from rackloom.web.viewers import Authenticator, Viewer

T = TypeVar("T")
POLL_SECONDS = 0.1
"""The interval at which the map looks for changes in the records."""
TIMELINE_PER_ORG = 50
"""Operations of each organisation, so that one cannot displace the entries of another."""
_OPERATOR_ROLES = frozenset({Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER})
OPERATIONS_SEARCHED = 100_000
"""The newest operations that a reading searches for them: operations are never deleted."""
_NEWEST = sa.select(sa.func.max(operation.c.id)).scalar_subquery()
_IN_ORG = sa.func.row_number().over(partition_by=operation.c.asked_by, order_by=operation.c.id.desc())
_RANKED_OPERATIONS = (
    sa.select(operation.c.id, _IN_ORG.label("rank"))
    .where(operation.c.id > _NEWEST - OPERATIONS_SEARCHED)
    .subquery()
)
_LATEST_OPERATIONS = (
    sa.select(
        operation.c.started,
        operation.c.finished,
        operation.c.kind,
        operation.c.partition_name,
        operation.c.domain,
        operation.c.asked_by,
        operation.c.reason,
        operation.c.state,
    )
    .join(_RANKED_OPERATIONS, _RANKED_OPERATIONS.c.id == operation.c.id)
    .where(_RANKED_OPERATIONS.c.rank <= TIMELINE_PER_ORG)
    .order_by(operation.c.id.desc())
)


class _SurveyStore:
    """A store with surveys as reads, so that REST does not wait for them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        return await self._store.survey(fn)


class SiteSource:
    """The site as its records show it, with its cluster and its transfers, if any.

    A cluster may be set later: one that is followed (`follow`), or an API server that is listed again for
    each reading, with `cluster_version`, a cheap value that differs after a change.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        transfers: Path | None = None,
        stale_seconds: float = DEFAULT_VALID_SECONDS,
        issuer_doubts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`issuer_doubts` gives the issuers of tokens with unreadable keys, each with the reason."""
        self._store = store
        self._clock = clock
        self._transfers = transfers
        self._stale_seconds = stale_seconds
        self._issuer_doubts = issuer_doubts
        self.cluster: Lister | None = None
        self.cluster_version: Callable[[], object] | None = None
        self._reach: Callable[[], ClusterFreshness] | None = None
        self._namespace = DEFAULT_DAEMON_NAMESPACE
        self._read_version: object = None
        self._known = ReadCache()
        self._joined = JoinedShares()
        self._examiner = Examiner()

    def follow(self, cluster: ClusterFollower, namespace: str = DEFAULT_DAEMON_NAMESPACE) -> None:
        """Show the cluster of this follower. IMEX daemons run in `namespace`."""
        self._namespace = namespace
        self.cluster, self.cluster_version, self._reach = cluster, cluster.version, cluster.reach

    async def read(self) -> SiteReading:
        """The whole site now."""
        version = await self._version()
        with self._examiner.halted():
            snapshot = await self._snapshot()
            self._joined = joined = await asyncio.to_thread(join_shares, snapshot, self._joined)
            happenings = await self._store.survey(_timeline)
        examined = await self._examiner.newest(snapshot, joined)
        # The findings that this reading shows are no news.
        self._read_version = version, self._examiner.news
        return SiteReading(
            snapshot=snapshot,
            joined=joined,
            findings=examined.findings,
            examined_at=examined.at,
            happenings=happenings,
        )

    async def _snapshot(self) -> SiteSnapshot:
        now = self._clock()
        snapshot = await site_snapshot(
            now,
            records=_SurveyStore(self._store),
            stale=Staleness(now, self._stale_seconds),
            cluster=self.cluster,
            reach=self._reach,
            transfers=self._transfers,
            known=self._known,
            namespace=self._namespace,
        )
        return msgspec.structs.replace(snapshot, issuers=self._issuer_doubts())

    async def changed(self) -> None:
        """Return when the records, the cluster or the findings have changed since the last reading."""
        # Other processes may write the records too, and SQLite does not notify of their commits.
        while (await self._version(), self._examiner.news) == self._read_version:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def is_operated_by(self, org: str) -> bool:
        """Whether the organisation provides every site that is read here."""
        return set(await self._store.read(_provider_orgs)) == {org}

    async def _version(self) -> object:
        cluster = self.cluster_version() if self.cluster_version is not None else None
        return cluster, self.cluster is None, self._issuer_doubts(), await self._store.read(_records_version)


def _records_version(conn: sa.Connection) -> tuple[object, ...]:
    """A value that differs after every change that the map shows, from indexes alone."""
    last = conn.execute(sa.select(operation.c.id, operation.c.state).order_by(operation.c.id.desc()).limit(1))
    return (
        conn.execute(sa.select(sa.func.sum(domain_revision.c.revision))).scalar_one(),
        newest_entries(conn),
        *(tuple(row) for row in last),
    )


def _provider_orgs(conn: sa.Connection) -> list[str]:
    rows = conn.execute(sa.select(provider.c.org).join(site, site.c.provider_id == provider.c.id).distinct())
    return list(rows.scalars())


def _timeline(conn: sa.Connection) -> tuple[TimelineEntry, ...]:
    return tuple(
        TimelineEntry(
            at=row.finished or row.started,
            seconds=None if row.finished is None else row.finished - row.started,
            tenant=None if row.asked_by == ASKED_BY_SITE else row.asked_by,
            what=f"{row.kind.replace('-', ' ')} {row.partition_name}: {row.reason}",
            where=at_domain(row.domain),
            places=(at_partition(row.domain, row.partition_name), at_domain(row.domain)),
            outcome=row.state,
        )
        for row in conn.execute(_LATEST_OPERATIONS)
    )


def authenticator_of(
    verifier: TokenVerifier, is_operated_by: Callable[[str], Awaitable[bool]]
) -> Authenticator:
    """Admits the callers that REST admits. A provider role counts only in the organisation that provides."""

    async def admit(token: str, org: str) -> Viewer | None:
        try:
            caller = verifier.verify(f"Bearer {token}", org)
        except (UnauthenticatedCaller, Rejected, Retry):
            return None
        if not caller.roles:
            return None
        operator = not caller.roles.isdisjoint(_OPERATOR_ROLES) and await is_operated_by(caller.org)
        return Viewer(caller.org, caller.subject, operator, caller.expires)

    return admit


def mount_rack_map(
    api: ASGIApp,
    live: LiveMap,
    source: SiteSource,
    verifier: TokenVerifier,
    clock: Callable[[], float],
    *,
    switch_trays: int = 0,
    codes: SignInCodes | None = None,
    providers: Sequence[SignInProvider] = (),
    address: str = "",
    grafana: str | None = None,
) -> ASGIApp:
    """The map at `/` and below `/map/`, and REST at every other path. `codes` sign browsers in by a link.

    `live` has the readings of `source`. Its `record` should run beside the listener, for the history. The
    forms of tenants on the map act by `api`. Browsers may sign in at `providers`, which send them back to
    `address`. `grafana` is where operators find dashboards.
    """
    authenticate = authenticator_of(verifier, source.is_operated_by)
    pages = create_pages(
        live,
        authenticate,
        clock,
        switch_trays=switch_trays,
        codes=codes,
        rest=api,
        providers=ProviderSignIn(providers, address, authenticate) if providers else None,
        grafana=grafana,
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_map = scope["type"] == "http" and (path == "/" or path.startswith("/map/"))
        await (pages if is_map else api)(scope, receive, send)

    return answer
