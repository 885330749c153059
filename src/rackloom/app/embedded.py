"""The embedded site: simulated switch controllers, store, reconciler and REST, in one process on loopback.

Only the switch controllers are simulated, and they are reached over a real socket; everything above them is
what runs on real racks.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog
import uvicorn

from rackloom.app.home import Home
from rackloom.app.logs import log_to
from rackloom.app.twin_site import TwinSite, run_twin
from rackloom.carve.api.app import ApiDeps, create_app
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.site.seed import seed_embedded_site
from rackloom.carve.site.store import Store
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"


class Embedded(msgspec.Struct, frozen=True):
    """A running embedded site."""

    url: str
    twin: TwinSite
    issuer: LocalIssuer


def run_up(home: Home, *, port: int, racks: int, profile: str, announce: Callable[[str], None]) -> None:
    """Run a site in `home` until interrupted; `announce` hears where it listens once it answers."""
    import uvloop

    async def until_stopped() -> None:
        async with embedded_site(home, port=port, racks=racks, profile=profile) as (site, served):
            announce(f"rackloom: {racks} x {profile} (simulated) at {site.url}, home {home.path}")
            announce(f"rackloom: log {home.log}; for a token: rackloom token --home {home.path} --org demo")
            await served

    with suppress(KeyboardInterrupt):
        uvloop.run(until_stopped())


@asynccontextmanager
async def embedded_site(
    home: Home, *, port: int, racks: int, profile: str
) -> AsyncIterator[tuple[Embedded, "asyncio.Task[None]"]]:
    """A site that answers when the context is entered, and the task that ends when it is told to stop."""
    home.create()
    store = Store.open(home.path)
    try:
        log_to(home.log)
        with _listen(port) as listener:
            async with (
                run_twin(home, racks, profile) as twin,
                _running(home, store, twin, listener) as running,
            ):
                yield running
    finally:
        await store.close()


@asynccontextmanager
async def _running(
    home: Home, store: Store, twin: TwinSite, listener: socket.socket
) -> AsyncIterator[tuple[Embedded, "asyncio.Task[None]"]]:
    await store.run(seed_embedded_site, twin.site, twin.profile, twin.endpoints, now=time.time(), ids=_new_id)
    reconciler = Reconciler(store, lambda endpoint: NmxcDriver(endpoint.url, clock=time.time), time.time)
    issuer = LocalIssuer(home.keys)
    deps = ApiDeps(
        store=store,
        clock=time.time,
        ids=_new_id,
        wake=reconciler.wake,
        verifier=issuer.verifier(),
        auto_tenant=True,
    )
    server = _Server(uvicorn.Config(create_app(deps), log_config=None, access_log=False, lifespan="off"))
    looping = asyncio.create_task(reconciler.run())
    # A batch that wants one domain needs to know the domains: REST opens when each was asked once.
    await reconciler.first_passes()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.answering.wait()
        yield Embedded(f"http://{LOOPBACK}:{listener.getsockname()[1]}", twin, issuer), serving
    finally:
        server.should_exit = True
        await serving
        looping.cancel()
        with suppress(asyncio.CancelledError):
            await looping


class _Server(uvicorn.Server):
    """Says when it has begun to accept connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise Refused(
            f"cannot listen on {LOOPBACK}:{port}: {error.strerror}",
            nearest_fix="stop the program that uses the port, or give another with --port",
        ) from error
    return listener


def _new_id() -> str:
    return str(uuid.uuid4())
