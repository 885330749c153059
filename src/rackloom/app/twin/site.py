"""The embedded site: simulated switch controllers, store, reconciler and REST, on loopback.

Only the switch controllers are simulated, and they are reached over a real socket. Everything above them
is the software of real racks.

A switch keeps its partitions when the control plane dies. The simulated switches live in the same
process, so each of them writes its state to the home directory on every change and restores it at the
next start. A home remembers the profile, the number of racks and the seed that all names derive from.
They cannot change later, because the records name the machines. A home whose store and switch state do
not belong together is refused as damaged.

`open_embedded_home` holds the parts that outlive a restart of the service (store and switches).
`embedded_service` is the service alone, which a scenario may stop and start. REST opens after each domain was
observed once, because a batch that wants one domain needs to know the domains. `/metrics` shows the
same as under `serve`, on the same loopback address.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.app.config import AuditConfig, MetricsConfig
from rackloom.app.home import Home
from rackloom.app.listeners import serve_http
from rackloom.app.process import LogSetup, background_task, elapsed_seconds, log_to_file
from rackloom.app.site.audit_log import AuditKeeper
from rackloom.app.site.metrics import MetricsEndpoints, SiteMetrics
from rackloom.app.site.parts import open_home_store
from rackloom.app.site.rack_map import SiteSource, mount_rack_map
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile.domain_pass import ReconcileHooks
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import MonotonicSiteClock, newest_recorded_time
from rackloom.carve.tenancy import catalog
from rackloom.core.partitions.status_rules import valid_seconds
from rackloom.errors import Refused, Undecodable
from rackloom.lab.scenario.stage import SimulatedRacks
from rackloom.lab.switches.fabric import MOST_RACKS, FabricSnapshot, SeededNames, SimulatedFabric, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.runtime.durable_files import write_durably
from rackloom.runtime.foreign_text import decode_json
from rackloom.runtime.traces import NO_TRACES, Traces
from rackloom.serving.limits import SITE_REST
from rackloom.topology import profiles
from rackloom.topology.rack import RackSite, build_site
from rackloom.web.history_file import HistoryFile
from rackloom.web.history_keeper import HistoryKeeper
from rackloom.web.live import LiveMap
from rackloom.web.sign_in_codes import SignInCodes

# The racks of a home, and the switch controllers that serve them.


T = TypeVar("T")


class RackSetup(msgspec.Struct, frozen=True):
    """The setup with which a home was made. It cannot change later, as the records name its machines."""

    profile: str
    racks: int
    seed: str
    recorded: bool = False
    """Whether the store was given the machines: from then on neither may be there without the other."""


class TwinSite(SimulatedRacks, frozen=True, kw_only=True):
    """The simulated site and its switch controllers' addresses. All its names are drawn from the seed."""

    endpoints: dict[str, str]
    """Domain uuid to the URL of its NMX-C server."""
    servers: dict[str, NmxcServer]
    """Domain uuid to its NMX-C server, which has the fabric."""


def simulated_site(racks: int, profile_name: str, seed: str = "") -> RackSite:
    """The site of a number of racks. Refused when there is no such profile, or they make no whole domains."""
    if racks > MOST_RACKS:
        raise Refused(f"{racks} racks are too many for one process", nearest_fix=f"use up to {MOST_RACKS}")
    return build_site(profiles.load_rack(profile_name), racks, SeededNames(seed))


def rack_setup_of(
    home: Home, racks: int, profile_name: str, *, recorded: bool, seed: str | None = None
) -> RackSetup:
    """The racks of `home`, made now if it is new. `recorded`: whether its store knows any machine.

    Refused when the home was made with others, or when its store and its racks do not belong together.
    Without a `seed` a new home draws one, and an old one keeps its own.
    """
    file = home.twin / "racks.json"
    if not file.exists():
        if recorded:
            raise _torn_home(home, f"{file} is missing, though the store has machines")
        made = RackSetup(profile_name, racks, secrets.token_hex(16) if seed is None else seed)
        write_durably(file, msgspec.json.encode(made))
        return made
    kept = _read_json(file, RackSetup)
    if kept.recorded and not recorded:
        raise _torn_home(home, f"{home.path / 'site.db'} has lost its records")
    if (kept.profile, kept.racks) != (profile_name, racks):
        raise Refused(
            f"{home.path} was made with {kept.racks} racks of {kept.profile}",
            nearest_fix=f"use --racks {kept.racks} --profile {kept.profile}, or another --home",
        )
    if seed not in (None, kept.seed):
        raise Refused(
            f"{home.path} was made with another seed", nearest_fix="leave --seed out, or use another --home"
        )
    return kept


def mark_recorded(home: Home, racks: RackSetup) -> None:
    """Remember that the store was given the machines."""
    if not racks.recorded:
        kept = msgspec.structs.replace(racks, recorded=True)
        write_durably(home.twin / "racks.json", msgspec.json.encode(kept))


@asynccontextmanager
async def run_switches(home: Home, racks: RackSetup) -> AsyncIterator[TwinSite]:
    """Serve the racks of `home` on loopback until the context ends."""
    site = simulated_site(racks.racks, racks.profile, racks.seed)
    async with AsyncExitStack() as stack:
        servers = {}
        for fabric in fabrics_of(site, racks.seed):
            _persist_fabric(fabric, home.twin / f"{fabric.domain}.json")
            servers[fabric.domain] = await stack.enter_async_context(NmxcServer(fabric))
        endpoints = {domain: server.url for domain, server in servers.items()}
        yield TwinSite(
            site=site,
            profile=profiles.load_rack(racks.profile),
            seed=racks.seed,
            fabrics=tuple(server.fabric for server in servers.values()),
            endpoints=endpoints,
            servers=servers,
        )


def _persist_fabric(fabric: SimulatedFabric, file: Path) -> None:
    """Restore the fabric from its file, and write every later change to it."""
    if file.exists():
        fabric.restore(_read_json(file, FabricSnapshot))
    fabric.on_change(lambda snapshot: write_durably(file, msgspec.json.encode(snapshot)))


def _read_json(file: Path, kind: type[T]) -> T:
    try:
        return decode_json(file.read_bytes(), str(file), kind)
    except Undecodable as error:
        raise Refused(f"{file} is damaged: {error.reason}", nearest_fix=_RESTORE_FIX) from error


_RESTORE_FIX = "restore the home from a backup, or start with another --home"


def _torn_home(home: Home, what: str) -> Refused:
    return Refused(f"{home.path} is not whole: {what}", nearest_fix=_RESTORE_FIX)


# The service on them.


LOOPBACK = "127.0.0.1"
SIGNED_IN_SECONDS = 86400.0


class EmbeddedSite(msgspec.Struct, frozen=True):
    """A running embedded site."""

    url: str
    twin: TwinSite
    issuer: LocalIssuer
    store: Store
    deps: ApiDeps
    """The dependencies of REST, such as the clock and the wake-up of the reconciler."""
    app: FastAPI
    """REST, as it answers at `url`."""
    source: SiteSource
    """The data of the rack map at `url`. The map shows a cluster once `source.cluster` is set."""
    reconciling: "asyncio.Task[None]"
    """Ends only when something is wrong."""
    codes: SignInCodes
    """The codes of the links that sign a browser in."""

    def sign_in_link(self, org: str, roles: Sequence[str]) -> str:
        """A link, valid for a quarter of an hour, that signs a browser in to the rack map for a day."""
        token = self.issuer.mint(org, roles, now=time.time(), ttl=SIGNED_IN_SECONDS)
        return self.url + self.codes.offer(org, token)


@asynccontextmanager
async def open_embedded_home(
    home: Home, *, racks: int, profile: str, seed: str | None = None, log: LogSetup = log_to_file
) -> AsyncIterator[tuple[Store, TwinSite]]:
    """The parts that outlive a service: the records of `home`, and its racks behind their switch controllers.

    All names of a new home are drawn from `seed`, or without it, from chance.
    """
    simulated_site(racks, profile)
    home.create()
    store = open_home_store(home.path)
    try:
        log(home.log)
        recorded = await store.read(catalog.has_machines)
        chosen = rack_setup_of(home, racks, profile, recorded=recorded, seed=seed)
        async with run_switches(home, chosen) as twin:
            await store.run(
                seed_embedded_site, twin.site, twin.profile, twin.endpoints, now=time.time(), ids=_new_uuid
            )
            mark_recorded(home, chosen)
            yield store, twin
    finally:
        await store.close()


@asynccontextmanager
async def embedded_service(
    home: Home, store: Store, twin: TwinSite, port: int, traces: Traces = NO_TRACES
) -> AsyncIterator[EmbeddedSite]:
    """The site service alone, over racks that are served and a store that is open."""
    clock = MonotonicSiteClock(time.time, elapsed_seconds, await store.read(newest_recorded_time))
    metrics = SiteMetrics(MetricsConfig().prefix)
    reconciler = Reconciler(
        store,
        lambda endpoint: NmxcDriver(endpoint.url, clock=clock),
        clock,
        hooks=ReconcileHooks(metrics=metrics, traces=traces),
    )
    page = MetricsEndpoints(metrics, store, clock, valid_seconds(reconciler.interval))
    await page.begin()
    issuer = LocalIssuer(home.keys)
    deps = ApiDeps(
        store=store,
        clock=clock,
        ids=_new_uuid,
        wake=reconciler.wake,
        verifier=issuer.verifier(),
        auto_tenant=True,
        traces=traces,
    )
    keeper = AuditKeeper(
        audit=deps.audit,
        store=store,
        clock=clock,
        keep_seconds=timedelta(days=AuditConfig().retention_days).total_seconds(),
        keep_entries=AuditConfig().max_entries,
    )
    async with background_task(keeper.run()), background_task(reconciler.run()) as reconciling:
        # A batch that wants one domain needs to know the domains: REST opens when each was read once.
        await reconciler.first_passes()
        app = create_app(deps)
        source = SiteSource(store, clock, home.path / "transfers")
        live = LiveMap(source, clock)
        page.site = lambda: live.newest.whole
        history = HistoryKeeper(HistoryFile(home.map_history), clock)
        codes = SignInCodes(clock)
        mapped = mount_rack_map(
            app,
            live,
            source,
            deps.verifier,
            clock,
            switch_trays=twin.profile.switch_trays_per_domain,
            codes=codes,
        )
        ended = metrics.connections_ended("rest")
        answering = serve_http(
            _with_metrics(mapped, page), f"{LOOPBACK}:{port}", limits=SITE_REST, ended=ended
        )
        async with background_task(live.record(history)), answering as bound:
            url = f"http://{LOOPBACK}:{bound}"
            write_durably(home.address, url.encode())
            try:
                yield EmbeddedSite(url, twin, issuer, store, deps, app, source, reconciling, codes)
            finally:
                home.address.unlink(missing_ok=True)


def _with_metrics(site: ASGIApp, page: ASGIApp) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_metrics = scope["type"] == "http" and scope["path"] == "/metrics"
        await (page if is_metrics else site)(scope, receive, send)

    return answer


def _new_uuid() -> str:
    return str(uuid.uuid4())
