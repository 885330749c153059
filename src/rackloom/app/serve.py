"""`rackloom serve`: store, reconciler, REST, admin gRPC and metrics of one site, in one process.

The embedded site of `rackloom up` is the same parts over simulated switches; here they are real, and nothing
is made up: machines come from what the switch controllers show or from what an operator wrote down.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
import structlog

from rackloom.app import site_nmxm
from rackloom.app.collecting import spare_what_is_loaded
from rackloom.app.config import Config, load
from rackloom.app.host_state import HostStates
from rackloom.app.issuers import Issuers
from rackloom.app.listeners import listening
from rackloom.app.logs import log_to
from rackloom.app.metrics import SiteMetrics
from rackloom.app.metrics_page import MetricsPage
from rackloom.app.picture.look import stale_after
from rackloom.app.rack_map import SiteSource, with_map
from rackloom.app.secrets.choose import provider_of
from rackloom.app.secrets.values import Secret, SecretProvider
from rackloom.app.stopping import told_to_stop
from rackloom.app.switches import Switches
from rackloom.carve.admin import machine_book
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.identity import Identities
from rackloom.carve.admin.server import AdminServer, AdminTls
from rackloom.carve.admin.site_book import ensure_site
from rackloom.carve.api.app import ApiDeps, create_app
from rackloom.carve.fabric.ports import FabricDriver
from rackloom.carve.plan.values import Observation
from rackloom.carve.reconcile.clock import SteadyClock, newest_moment
from rackloom.carve.reconcile.hooks import Hooks
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.reconcile.slots import Slots
from rackloom.carve.site import fabric_book
from rackloom.carve.site.controllers import ControllerKind, kind_of
from rackloom.carve.site.disputes import STANDS_SECONDS, Dispute
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.store import Store
from rackloom.carve.site.values import Status
from rackloom.errors import Refused

log = structlog.get_logger(__name__)


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running service listens; `admin_port` is None without `[admin]`."""

    rest_port: int
    metrics_port: int
    admin_port: int | None
    store: Store
    reconciler: Reconciler
    background: "tuple[asyncio.Task[None], ...]"
    """One of them ends only when it has failed."""


def run_serve(path: Path, announce: Callable[[str], None]) -> None:
    """Serve the site of the configuration file until SIGTERM or SIGINT."""
    import uvloop

    config = load(path)
    if config.log.file is not None:
        log_to(config.log.file)

    async def until_stopped() -> None:
        stopped = told_to_stop()
        async with service(config) as running:
            admin = f", admin on port {running.admin_port}" if running.admin_port else ""
            announce(
                f"rackloom: site {config.site.name}: REST on port {running.rest_port}{admin},"
                f" metrics on port {running.metrics_port}"
            )
            await _first(stopped, running.background)

    uvloop.run(until_stopped())


@asynccontextmanager
async def service(config: Config) -> AsyncIterator[Service]:
    """A service that answers while the context is entered. Raises Refused when it cannot be as configured."""
    _check_interval(config.nvlink_config.monitor_run_interval.total_seconds())
    async with AsyncExitStack() as stack:
        store = await open_store(config)
        stack.push_async_callback(store.close)
        clock = SteadyClock(time.time, time.monotonic, await store.read(newest_moment))
        site = config.site
        site_id = await store.run(
            ensure_site, site.name, site.provider_org, site.default_partition, clock(), new_id
        )
        nvlink = config.nvlink_config
        secrets = provider_of(config.secrets)
        switches = Switches(nvlink, secrets, clock)
        metrics = SiteMetrics(config.metrics.prefix)
        nmxm = site_nmxm.url_of(nvlink)
        if nmxm is not None:
            switches.check(nmxm)
            metrics.speaks(site_nmxm.SUBJECT, ControllerKind.NMX_M)
        reconciler = _reconciler(config, store, switches, metrics, site_id, clock)
        issuers = Issuers(config.auth.issuers, clock)
        await issuers.load()
        page = MetricsPage(metrics, store, clock, reconciler.started)
        await page.begin()
        jobs = [issuers.refresh()]
        if nvlink.enabled or nvlink.domain_discovery_enabled:
            jobs.append(reconciler.run())
            if nmxm is not None:
                interval = nvlink.monitor_run_interval.total_seconds()
                found = site_nmxm.SiteNmxm(nmxm, switches, store, clock, new_id, interval, metrics)
                jobs.append(found.run(reconciler.endpoints_changed))
        if site.host_state.url is not None:
            hosts = HostStates(site.host_state.url, site.host_state.interval.total_seconds(), store, clock)
            jobs.append(hosts.run(reconciler.wake))
        spare_what_is_loaded()
        background = await stack.enter_async_context(_running(jobs))
        api = create_app(
            ApiDeps(
                store=store,
                clock=clock,
                ids=new_id,
                wake=reconciler.wake,
                verifier=issuers,
                auto_tenant=config.auth.auto_tenant,
            )
        )
        server = config.server
        stale = stale_after(nvlink.monitor_run_interval)
        site_page = with_map(api, SiteSource(store, clock, stale_seconds=stale), issuers, clock)
        rest = await stack.enter_async_context(
            listening(site_page, server.listen, cert=server.tls_cert, key=server.tls_key)
        )
        scrape = await stack.enter_async_context(listening(page, config.metrics.listen))
        admin = await _admin(stack, config, store, reconciler, switches, secrets, clock)
        yield Service(
            rest_port=rest,
            metrics_port=scrape,
            admin_port=admin,
            store=store,
            reconciler=reconciler,
            background=background,
        )


def _check_interval(seconds: float) -> None:
    # Two looks at one domain are compared while both say something of the present.
    if seconds > STANDS_SECONDS / 2:
        raise Refused(
            f"[nvlink_config]: monitor_run_interval is {seconds:g} s: controllers of one domain that"
            " contradict one another would never be seen to",
            nearest_fix=f"read domains at least every {STANDS_SECONDS / 2:g} s",
        )


@asynccontextmanager
async def _running(
    jobs: Sequence[Coroutine[Any, Any, None]],
) -> "AsyncIterator[tuple[asyncio.Task[None], ...]]":
    """Run `jobs` until the context ends."""
    tasks = tuple(asyncio.create_task(job) for job in jobs)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(stopped: asyncio.Event, background: "Sequence[asyncio.Task[None]]") -> None:
    """Return when the service was told to stop. Raises what a part of it has failed with."""
    waiting = asyncio.create_task(_wait(stopped))
    await asyncio.wait({waiting, *background}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in background:
        if task.done():
            task.result()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def open_store(config: Config) -> Store:
    """The records, on the database of the configuration."""
    if config.database.postgresql is not None:
        return await Store.connect(config.database.postgresql)
    assert config.database.sqlite is not None  # noqa: S101 - one of them is there, by validation
    try:
        return Store.open(config.database.sqlite)
    except OSError as error:
        raise Refused(f"cannot use {config.database.sqlite}: {error.strerror}") from error


def new_id() -> str:
    """A fresh uuid."""
    return str(uuid.uuid4())


def _reconciler(
    config: Config,
    store: Store,
    switches: Switches,
    metrics: SiteMetrics,
    site_id: str,
    clock: Callable[[], float],
) -> Reconciler:
    nvlink = config.nvlink_config
    kinds: dict[str, ControllerKind] = {}

    def record(conn: sa.Connection, endpoint_id: str, seen: Observation, now: float) -> Dispute | None:
        dispute = fabric_book.record_observation(conn, endpoint_id, seen, now)
        if kinds[endpoint_id] in config.site.machine_sources:
            machine_book.enrol_known(conn, site_id, seen.domain, _new_status(config), now)
        return dispute

    def driver_for(endpoint: Endpoint) -> FabricDriver:
        kinds[endpoint.id] = kind_of(endpoint.url)
        metrics.speaks(endpoint.id, kinds[endpoint.id])
        return switches.driver_for(endpoint)

    hooks = Hooks(
        record=record,
        meter=metrics,
        acts=nvlink.enabled,
        slots=Slots(nvlink.partition_monitor_max_concurrent_groups),
    )
    return Reconciler(
        store,
        driver_for,
        clock,
        nvlink.monitor_run_interval.total_seconds(),
        holder=new_id(),
        hooks=hooks,
    )


def _new_status(config: Config) -> str:
    """Of a host that nobody was asked about yet."""
    return Status.READY if config.site.host_state.provider == "none" else Status.UNKNOWN


async def _admin(
    stack: AsyncExitStack,
    config: Config,
    store: Store,
    reconciler: Reconciler,
    switches: Switches,
    secrets: SecretProvider,
    clock: Callable[[], float],
) -> int | None:
    admin = config.admin
    if admin is None:
        return None
    deps = AdminDeps(
        store=store,
        clock=clock,
        ids=new_id,
        wake=reconciler.wake,
        endpoints_changed=reconciler.endpoints_changed,
        browse=switches.browse,
        apply=reconciler.apply,
        credentials=_Keeper(secrets),
        check_endpoint=switches.check,
        new_machine_status=_new_status(config),
        imports="import" in config.site.machine_sources,
    )
    identities = Identities(frozenset(admin.admin_names), frozenset(admin.reader_names))
    try:
        tls = AdminTls(
            certificate=admin.tls_cert.read_bytes(),
            key=admin.tls_key.read_bytes(),
            client_ca=admin.client_ca.read_bytes(),
        )
    except OSError as error:
        raise Refused(f"[admin]: cannot read {error.filename}: {error.strerror}") from error
    return (await stack.enter_async_context(AdminServer(deps, identities, tls, admin.listen))).port


class _Keeper:
    """Credentials in the site's secret provider."""

    def __init__(self, secrets: SecretProvider) -> None:
        self._secrets = secrets

    async def keep(self, path: str, fields: Mapping[str, str]) -> None:
        """Keep a credential."""
        await self._secrets.write(path, {name: Secret(value) for name, value in fields.items()})

    async def forget(self, path: str) -> None:
        """Remove a credential."""
        await self._secrets.delete(path)
