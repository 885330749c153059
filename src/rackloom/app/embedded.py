"""The embedded site: simulated switch controllers, store, reconciler and REST, in one process on loopback.

Only the switch controllers are simulated, and they are reached over a real socket; everything above them is
what runs on real racks.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import alembic.util
import msgspec
import sqlalchemy.exc
from fastapi import FastAPI

from rackloom.app.home import Home
from rackloom.app.listeners import listening
from rackloom.app.logs import log_to
from rackloom.app.rack_map import SiteSource, with_map
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
    store: Store
    deps: ApiDeps
    """What REST was made from: the clock, and what wakes the reconciler."""
    app: FastAPI
    """REST, as it answers at `url`."""
    source: SiteSource
    """What the rack map at `url` is drawn from; it draws a cluster as soon as it is given one."""
    reconciling: "asyncio.Task[None]"
    """Ends only when something is wrong."""


@asynccontextmanager
async def embedded_site(home: Home, *, port: int, racks: int, profile: str) -> AsyncIterator[Embedded]:
    """A site that answers while the context is entered. What cannot be is refused before a file is made."""
    grounded = ground(home, racks=racks, profile=profile)
    async with grounded as (store, twin), service(home, store, twin, port) as running:
        yield running


@asynccontextmanager
async def ground(home: Home, *, racks: int, profile: str) -> AsyncIterator[tuple[Store, TwinSite]]:
    """What outlives a service: the records of `home`, and its racks behind their switch controllers."""
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
            yield store, twin
    finally:
        await store.close()


def _open(home: Home) -> Store:
    try:
        return Store.open(home.path)
    except (OSError, sqlalchemy.exc.DatabaseError, alembic.util.CommandError) as error:
        cause = getattr(error, "orig", None) or error
        raise Refused(
            f"the store in {home.path} cannot be opened: {cause}",
            nearest_fix="make room if its disk is full, else restore the home or give another --home",
        ) from error


@asynccontextmanager
async def service(home: Home, store: Store, twin: TwinSite, port: int) -> AsyncIterator[Embedded]:
    """The site service alone, over racks that are served and a store that is open."""
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
        app = create_app(deps)
        source = SiteSource(store, clock, home.path / "transfers")
        whole = with_map(app, source, deps.verifier, clock, switch_trays=twin.profile.switch_trays_per_domain)
        async with listening(whole, f"{LOOPBACK}:{port}") as bound:
            yield Embedded(f"http://{LOOPBACK}:{bound}", twin, issuer, store, deps, app, source, reconciling)
    finally:
        reconciling.cancel()
        with suppress(asyncio.CancelledError):
            await reconciling


def _new_id() -> str:
    return str(uuid.uuid4())
