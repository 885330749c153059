"""The embedded site: simulated switch controllers, store, reconciler and REST, in one process on loopback.

Only the switch controllers are simulated, and they are reached over a real socket; everything above them is
what runs on real racks.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import alembic.util
import msgspec
import sqlalchemy.exc

from rackloom.app.home import Home
from rackloom.app.listeners import listening
from rackloom.app.logs import log_to
from rackloom.app.stopping import told_to_stop
from rackloom.app.twin_site import TwinSite, declare, note_recorded, racks_of, run_twin
from rackloom.carve.api.app import ApiDeps, create_app
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.reconcile.clock import SteadyClock, newest_moment
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.site import machines
from rackloom.carve.site.seed import seed_embedded_site
from rackloom.carve.site.store import Store
from rackloom.errors import Refused

LOOPBACK = "127.0.0.1"


class Embedded(msgspec.Struct, frozen=True):
    """A running embedded site."""

    url: str
    twin: TwinSite
    issuer: LocalIssuer
    reconciling: "asyncio.Task[None]"
    """Ends only when something is wrong."""


def run_up(home: Home, *, port: int, racks: int, profile: str, announce: Callable[[str], None]) -> None:
    """Run a site in `home` until SIGTERM or SIGINT; `announce` hears where it listens once it answers."""
    import uvloop

    async def until_stopped() -> None:
        stopped = told_to_stop()
        async with embedded_site(home, port=port, racks=racks, profile=profile) as site:
            announce(f"rackloom: {racks} x {profile} (simulated) at {site.url}, home {home.path}")
            announce(f"rackloom: log {home.log}; for a token: rackloom token --home {home.path} --org demo")
            waiting = asyncio.create_task(stopped.wait())
            await asyncio.wait((waiting, site.reconciling), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if site.reconciling.done():
                site.reconciling.result()

    uvloop.run(until_stopped())


@asynccontextmanager
async def embedded_site(home: Home, *, port: int, racks: int, profile: str) -> AsyncIterator[Embedded]:
    """A site that answers while the context is entered. What cannot be is refused before a file is made."""
    declare(racks, profile)
    home.create()
    store = _open(home)
    try:
        log_to(home.log)
        recorded = await store.read(machines.any_known)
        chosen = racks_of(home, racks, profile, recorded=recorded)
        async with run_twin(home, chosen) as twin:
            await store.run(
                seed_embedded_site, twin.site, twin.profile, twin.endpoints, now=time.time(), ids=_new_id
            )
            note_recorded(home, chosen)
            async with _running(home, store, twin, port) as running:
                yield running
    finally:
        await store.close()


def _open(home: Home) -> Store:
    try:
        return Store.open(home.path)
    except (OSError, sqlalchemy.exc.DatabaseError, alembic.util.CommandError) as error:
        cause = getattr(error, "orig", None) or error
        raise Refused(
            f"the store in {home.path} cannot be opened: {cause}",
            nearest_fix="restore the home from a backup, or start with another --home",
        ) from error


@asynccontextmanager
async def _running(home: Home, store: Store, twin: TwinSite, port: int) -> AsyncIterator[Embedded]:
    clock = SteadyClock(time.time, time.monotonic, await store.read(newest_moment))
    reconciler = Reconciler(store, lambda endpoint: NmxcDriver(endpoint.url, clock=clock), clock)
    issuer = LocalIssuer(home.keys)
    deps = ApiDeps(
        store=store,
        clock=clock,
        ids=_new_id,
        wake=reconciler.wake,
        verifier=issuer.verifier(),
        auto_tenant=True,
    )
    reconciling = asyncio.create_task(reconciler.run())
    try:
        # A batch that wants one domain needs to know the domains: REST opens when each was asked once.
        await reconciler.first_passes()
        async with listening(create_app(deps), f"{LOOPBACK}:{port}") as bound:
            yield Embedded(f"http://{LOOPBACK}:{bound}", twin, issuer, reconciling)
    finally:
        reconciling.cancel()
        with suppress(asyncio.CancelledError):
            await reconciling


def _new_id() -> str:
    return str(uuid.uuid4())
