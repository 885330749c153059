"""The rack map beside REST: one address, one set of tokens, and the same picture that the doctor examines."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.app.picture.devices import KnownDevices
from rackloom.app.picture.look import site_picture
from rackloom.carve.api.auth import Role, TokenVerifier, Unauthenticated
from rackloom.carve.site.operations import SITE
from rackloom.carve.site.problems import Rejected
from rackloom.carve.site.store import Store
from rackloom.carve.site.tables import domain_revision, operation, status_history
from rackloom.claim.kube.api import KubeApi
from rackloom.prove.doctor.examine import examine
from rackloom.prove.picture.transfers import read_transfers
from rackloom.prove.picture.values import TransferSeen
from rackloom.web.door import Doorman, Viewer
from rackloom.web.pages import create_pages
from rackloom.web.reading import Happening, Reading, Source

POLL_SECONDS = 0.3
"""How long a change may lie in the records before the map looks: it is there within a second."""
HAPPENINGS = 50
_SEES_ALL = frozenset({Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER})
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
    .order_by(operation.c.id.desc())
    .limit(HAPPENINGS)
)


class SiteSource:
    """The site as its records and, where there are any, its cluster and its transfers tell of it.

    `cluster` may be given later; `cluster_version` says cheaply whether the cluster changed. Without it a
    change there is seen with the next reading that has another reason.
    """

    def __init__(self, store: Store, clock: Callable[[], float], transfers: Path | None = None) -> None:
        self._store = store
        self._clock = clock
        self._transfers = transfers
        self.cluster: KubeApi | None = None
        self.cluster_version: Callable[[], object] | None = None
        self._seen: object = None
        self._devices = KnownDevices()

    async def read(self) -> Reading:
        """The whole site now."""
        self._seen = await self._version()
        picture = await site_picture(
            self._clock(),
            records=self._store,
            cluster=self.cluster,
            transfers=await asyncio.to_thread(self._measured),
            known=self._devices,
        )
        findings = await asyncio.to_thread(examine, picture)
        happenings = await self._store.read(_happenings)
        return Reading(picture=picture, findings=findings, happenings=happenings)

    async def changed(self) -> None:
        """Return when the records, or the cluster, are other than at the last reading."""
        # The records are other processes' too, and SQLite tells nobody of a commit.
        while await self._version() == self._seen:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _measured(self) -> tuple[TransferSeen, ...] | None:
        if self._transfers is None or not self._transfers.is_dir():
            return None
        return read_transfers(self._transfers)

    async def _version(self) -> object:
        cluster = self.cluster_version() if self.cluster_version is not None else None
        return cluster, self.cluster is None, await self._store.read(_records_version)


def _records_version(conn: sa.Connection) -> tuple[object, ...]:
    """Something that differs after every change worth drawing, from indexes alone."""
    last = conn.execute(sa.select(operation.c.id, operation.c.state).order_by(operation.c.id.desc()).limit(1))
    return (
        conn.execute(sa.select(sa.func.sum(domain_revision.c.revision))).scalar_one(),
        conn.execute(sa.select(sa.func.max(status_history.c.id))).scalar_one(),
        *(tuple(row) for row in last),
    )


def _happenings(conn: sa.Connection) -> tuple[Happening, ...]:
    return tuple(
        Happening(
            at=row.finished or row.started,
            tenant=None if row.asked_by == SITE else row.asked_by,
            what=f"{row.kind.replace('-', ' ')} {row.partition_name}: {row.reason}",
            where=f"domain {row.domain}",
            outcome=row.state,
        )
        for row in conn.execute(_LAST)
    )


def doorman_of(verifier: TokenVerifier) -> Doorman:
    """Admits whom REST admits."""

    def admit(token: str, org: str) -> Viewer | None:
        try:
            caller = verifier.verify(f"Bearer {token}", org)
        except (Unauthenticated, Rejected):
            return None
        if not caller.roles:
            return None
        return Viewer(caller.org, not caller.roles.isdisjoint(_SEES_ALL), caller.expires)

    return admit


def with_map(
    api: ASGIApp,
    source: Source,
    verifier: TokenVerifier,
    clock: Callable[[], float],
    *,
    switch_trays: int = 0,
) -> ASGIApp:
    """REST with the map beside it: `/` and `/map/` are the map's, everything else is REST's."""
    pages = create_pages(source, doorman_of(verifier), clock, switch_trays=switch_trays)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = scope["type"] == "http" and (path == "/" or path.startswith("/map/"))
        await (pages if ours else api)(scope, receive, send)

    return answer
