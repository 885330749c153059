"""The rack map beside REST: one address, one set of tokens, and the same picture that the doctor examines."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.app.cluster_follower import ClusterFollower
from rackloom.app.picture.cluster import Lister, Reach
from rackloom.app.picture.examined import Examiner
from rackloom.app.picture.fabric import Staleness
from rackloom.app.picture.known import Known
from rackloom.app.picture.look import STALE_SECONDS, site_picture
from rackloom.carve.api.auth import Role, TokenVerifier, Unauthenticated
from rackloom.carve.site.operations import SITE
from rackloom.carve.site.problems import Rejected
from rackloom.carve.site.store import Store
from rackloom.carve.site.tables import domain_revision, operation, provider, site, status_history
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.prove.doctor.checks.view import at_domain, at_partition
from rackloom.prove.picture.join import JoinedShares, join
from rackloom.prove.picture.values import Picture
from rackloom.web.door import Doorman, Viewer
from rackloom.web.pages import create_pages
from rackloom.web.reading import Happening, Reading

T = TypeVar("T")
POLL_SECONDS = 0.1
"""How long a change may lie in the records before the map looks: it is there within a second."""
HAPPENINGS = 50
"""Of each organisation: nobody's timeline is emptied by what others do."""
_OPERATES = frozenset({Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER})
RECENT = 100_000
"""How many operations of a site a reading looks through for them: they are never deleted."""
_NEWEST = sa.select(sa.func.max(operation.c.id)).scalar_subquery()
_IN_ORG = sa.func.row_number().over(partition_by=operation.c.asked_by, order_by=operation.c.id.desc())
_RANKED = sa.select(operation.c.id, _IN_ORG.label("rank")).where(operation.c.id > _NEWEST - RECENT).subquery()
_LAST = (
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
    .join(_RANKED, _RANKED.c.id == operation.c.id)
    .where(_RANKED.c.rank <= HAPPENINGS)
    .order_by(operation.c.id.desc())
)


class _Survey:
    """A store as those read it who read all of it: REST does not wait for them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        return await self._store.survey(fn)


class SiteSource:
    """The site as its records and, where there are any, its cluster and its transfers tell of it.

    A cluster may be given later: one that is followed (`follow`), or an API server that is asked anew at each
    reading, with `cluster_version`, which says cheaply whether it changed.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        transfers: Path | None = None,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._transfers = transfers
        self._stale_seconds = stale_seconds
        self.cluster: Lister | None = None
        self.cluster_version: Callable[[], object] | None = None
        self._reach: Callable[[], Reach] | None = None
        self._namespace = DEFAULT_DAEMON_NAMESPACE
        self._seen: object = None
        self._known = Known()
        self._joined = JoinedShares()
        self._examiner = Examiner()

    def follow(self, cluster: ClusterFollower, namespace: str = DEFAULT_DAEMON_NAMESPACE) -> None:
        """Draw what this one has been told; IMEX daemons run in `namespace`."""
        self._namespace = namespace
        self.cluster, self.cluster_version, self._reach = cluster, cluster.version, cluster.reach

    async def read(self) -> Reading:
        """The whole site now."""
        self._seen = await self._version()
        with self._examiner.halted():
            picture = await self._picture()
            self._joined = joined = await asyncio.to_thread(join, picture, self._joined)
            happenings = await self._store.survey(_happenings)
        examined = await self._examiner.newest(picture, joined)
        return Reading(
            picture=picture,
            joined=joined,
            findings=examined.findings,
            examined_at=examined.at,
            happenings=happenings,
        )

    async def _picture(self) -> Picture:
        now, folder = self._clock(), self._transfers
        return await site_picture(
            now,
            records=_Survey(self._store),
            stale=Staleness(now, self._stale_seconds),
            cluster=self.cluster,
            reach=self._reach,
            transfers=folder if folder is not None and folder.is_dir() else None,
            known=self._known,
            namespace=self._namespace,
        )

    async def changed(self) -> None:
        """Return when the records, the cluster or the findings are other than at the last reading."""
        # The records are other processes' too, and SQLite tells nobody of a commit.
        while await self._version() == self._seen:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def is_operated_by(self, org: str) -> bool:
        """Whether all that is read here is of sites that the organisation provides."""
        return set(await self._store.read(_providers)) == {org}

    async def _version(self) -> object:
        cluster = self.cluster_version() if self.cluster_version is not None else None
        return cluster, self.cluster is None, self._examiner.news, await self._store.read(_records_version)


def _records_version(conn: sa.Connection) -> tuple[object, ...]:
    """Something that differs after every change worth drawing, from indexes alone."""
    last = conn.execute(sa.select(operation.c.id, operation.c.state).order_by(operation.c.id.desc()).limit(1))
    return (
        conn.execute(sa.select(sa.func.sum(domain_revision.c.revision))).scalar_one(),
        conn.execute(sa.select(sa.func.max(status_history.c.id))).scalar_one(),
        *(tuple(row) for row in last),
    )


def _providers(conn: sa.Connection) -> list[str]:
    rows = conn.execute(sa.select(provider.c.org).join(site, site.c.provider_id == provider.c.id).distinct())
    return list(rows.scalars())


def _happenings(conn: sa.Connection) -> tuple[Happening, ...]:
    return tuple(
        Happening(
            at=row.finished or row.started,
            seconds=None if row.finished is None else row.finished - row.started,
            tenant=None if row.asked_by == SITE else row.asked_by,
            what=f"{row.kind.replace('-', ' ')} {row.partition_name}: {row.reason}",
            where=at_domain(row.domain),
            places=(at_partition(row.domain, row.partition_name), at_domain(row.domain)),
            outcome=row.state,
        )
        for row in conn.execute(_LAST)
    )


def doorman_of(verifier: TokenVerifier, is_operated_by: Callable[[str], Awaitable[bool]]) -> Doorman:
    """Admits whom REST admits. As there, a provider's role counts only in the organisation that provides."""

    async def admit(token: str, org: str) -> Viewer | None:
        try:
            caller = verifier.verify(f"Bearer {token}", org)
        except (Unauthenticated, Rejected):
            return None
        if not caller.roles:
            return None
        operator = not caller.roles.isdisjoint(_OPERATES) and await is_operated_by(caller.org)
        return Viewer(caller.org, operator, caller.expires)

    return admit


def with_map(
    api: ASGIApp,
    source: SiteSource,
    verifier: TokenVerifier,
    clock: Callable[[], float],
    *,
    switch_trays: int = 0,
) -> ASGIApp:
    """REST with the map beside it: `/` and `/map/` are the map's, everything else is REST's."""
    doorman = doorman_of(verifier, source.is_operated_by)
    pages = create_pages(source, doorman, clock, switch_trays=switch_trays)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = scope["type"] == "http" and (path == "/" or path.startswith("/map/"))
        await (pages if ours else api)(scope, receive, send)

    return answer
