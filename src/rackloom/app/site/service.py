"""`rackloom serve` as a process: how a site service starts, listens and stops.

The embedded site of `rackloom up` has the same parts over simulated switches. Here the switches are real:
machines come from the observations of the switch controllers, or from a file that an operator imports.

`site_service` enters the parts in this order: records and reconciler, the cluster that the map follows,
background jobs, the first reading of each controller (for a few seconds at most), then the listeners
(REST with the map, metrics, admin). Background jobs are the refresh of signing keys, the audit log, the
reconciler, the discovery of an NMX-M's chassis, the history of the map, the poll of host states and
the cluster follower. Each of them ends only by failing, and the process then ends with that error. On
SIGTERM or SIGINT the listeners close first.

The admin gRPC is served over mTLS only, and only if the configuration has a section `[admin]`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from rackloom.app.config import AdminConfig, Config, LimitsConfig, TenantLimitsConfig, load_config
from rackloom.app.home import Home
from rackloom.app.listeners import serve_http
from rackloom.app.process import (
    allow_open_files,
    freeze_loaded_objects,
    log_to_file,
    log_to_output,
    shorten_switch_interval,
    stop_on_signals,
    wait_stopped_or_ended,
)
from rackloom.app.site.audit_log import AuditKeeper
from rackloom.app.site.cluster import ClusterFollower, follow_cluster
from rackloom.app.site.host_state import HostStatePoller
from rackloom.app.site.parts import NmxmDiscovery, ServiceParts, assemble, initial_machine_status, new_id
from rackloom.app.site.rack_map import SiteSource, mount_rack_map
from rackloom.app.site.secrets import Secret, SecretProvider
from rackloom.app.site.sign_in_providers import HttpSignInProvider
from rackloom.app.tracing import TraceSettings, open_traces
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.server import AdminServer, AdminTls, ClientIdentities
from rackloom.carve.api.app import create_app
from rackloom.carve.api.limits import CallerClass, CallerLimits, RequestLimits
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.database import Store
from rackloom.errors import Refused
from rackloom.serving.limits import PROBES, SITE_REST, Process, files_needed
from rackloom.web.history_file import HistoryFile
from rackloom.web.history_keeper import HistoryKeeper
from rackloom.web.live import LiveMap

# Listeners: REST with the rack map, and the operators' gRPC.


def serve_rest(parts: ServiceParts, live: LiveMap, source: SiteSource) -> AbstractAsyncContextManager[int]:
    """Serve REST, with the map of `source`. Yields the port."""
    server = parts.config.server
    api = create_app(
        ApiDeps(
            store=parts.store,
            clock=parts.clock,
            ids=new_id,
            wake=parts.reconciler.wake,
            verifier=parts.issuers,
            auto_tenant=parts.config.auth.auto_tenant,
            valid_seconds=parts.config.nvlink_config.reading_valid_seconds,
            audit=parts.audit,
            traces=parts.traces,
        ),
        caller_limits(parts.config.limits, parts.metrics.refused_request),
    )
    providers = [
        HttpSignInProvider(issuer, issuer.sign_in, parts.clock)
        for issuer in parts.config.auth.issuers
        if issuer.sign_in is not None
    ]
    page = mount_rack_map(
        api,
        live,
        source,
        parts.issuers,
        parts.clock,
        providers=providers,
        address=parts.config.map.address or "",
        grafana=parts.config.map.grafana,
    )
    return serve_http(
        page,
        server.listen,
        cert=server.tls_cert,
        key=server.tls_key,
        limits=SITE_REST,
        ended=parts.metrics.connections_ended("rest"),
    )


def caller_limits(config: LimitsConfig, refused: Callable[[CallerClass], None]) -> CallerLimits:
    """The limits on requests as configured. `refused` is called for each request that they refuse."""
    tenant, provider = (_request_limits(limits) for limits in (config.tenant, config.provider))
    return CallerLimits(tenant=tenant, provider=provider, refused=refused)


def _request_limits(config: TenantLimitsConfig) -> RequestLimits:
    return RequestLimits(
        rate=config.requests_per_second,
        burst=config.burst,
        concurrent=config.concurrent,
        waiting=config.waiting,
    )


@asynccontextmanager
async def serve_admin(parts: ServiceParts) -> AsyncIterator[int | None]:
    """Serve the operators' gRPC. Yields the port, or None without `[admin]`."""
    config = parts.config.admin
    if config is None:
        yield None
        return
    identities = ClientIdentities(frozenset(config.admin_names), frozenset(config.reader_names))
    ended = parts.metrics.connections_ended("admin")
    async with AdminServer(
        _admin_deps(parts), identities, _admin_tls(config), config.listen, ended
    ) as server:
        yield server.port


def _admin_deps(parts: ServiceParts) -> AdminDeps:
    return AdminDeps(
        store=parts.store,
        clock=parts.clock,
        ids=new_id,
        wake=parts.reconciler.wake,
        endpoints_changed=parts.reconciler.endpoints_changed,
        browse=parts.switches.browse,
        apply=parts.reconciler.apply,
        credentials=_CredentialStore(parts.secrets),
        check_endpoint=parts.switches.check,
        new_machine_status=initial_machine_status(parts.config),
        imports="import" in parts.config.site.machine_sources,
        valid_seconds=parts.config.nvlink_config.reading_valid_seconds,
        audit=parts.audit,
    )


def _admin_tls(config: AdminConfig) -> AdminTls:
    try:
        return AdminTls(
            certificate=config.tls_cert.read_bytes(),
            key=config.tls_key.read_bytes(),
            client_ca=config.client_ca.read_bytes(),
        )
    except OSError as error:
        raise Refused(
            f"[admin]: cannot read {error.filename}: {error.strerror}",
            nearest_fix="name files that are there and that this process may read",
        ) from error


class _CredentialStore:
    """Credentials in the site's secret provider."""

    def __init__(self, secrets: SecretProvider) -> None:
        self._secrets = secrets

    async def keep(self, path: str, fields: Mapping[str, str]) -> None:
        """Keep a credential."""
        await self._secrets.write(path, {name: Secret(value) for name, value in fields.items()})

    async def forget(self, path: str) -> None:
        """Remove a credential."""
        await self._secrets.delete(path)


# The process.


Job = Coroutine[Any, Any, None]
FIRST_READINGS_SECONDS = 5.0
"""The longest wait of the listeners for controllers at the start. One that does not answer is left out."""


class SiteService(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a running service. `admin_port` is None without `[admin]`."""

    rest_port: int
    metrics_port: int
    admin_port: int | None
    store: Store
    reconciler: Reconciler
    background: "tuple[asyncio.Task[None], ...]"
    """Background jobs. Each of them ends only by failing."""


def run_serve(path: Path, announce: Callable[[str], None]) -> None:
    """Serve the site of the configuration file until SIGTERM or SIGINT."""
    import uvloop

    config = load_config(path)
    allow_open_files(files_needed(Process.SERVE))
    if config.log.file is None:
        log_to_output()
    else:
        log_to_file(config.log.file)

    async def until_stopped() -> None:
        stopped = stop_on_signals()
        async with site_service(config) as running:
            admin = f", admin on port {running.admin_port}" if running.admin_port else ""
            announce(
                f"rackloom: site {config.site.name}: REST on port {running.rest_port}{admin},"
                f" metrics on port {running.metrics_port}"
            )
            await _wait_stopped_or_failed(stopped, running.background)

    shorten_switch_interval()
    uvloop.run(until_stopped())


@asynccontextmanager
async def site_service(config: Config) -> AsyncIterator[SiteService]:
    """A service that answers while the context is entered. Raises Refused for an invalid configuration."""
    async with AsyncExitStack() as stack:
        traces = await stack.enter_async_context(open_traces(_trace_settings(config)))
        parts = await stack.enter_async_context(assemble(config, traces))
        cluster = await stack.enter_async_context(_followed_cluster(parts))
        source = _map_source(parts, cluster)
        live = LiveMap(source, parts.clock)
        parts.page.site = lambda: live.newest.whole
        freeze_loaded_objects()
        background = await stack.enter_async_context(_running_jobs(_background_jobs(parts, cluster, live)))
        if parts.config.nvlink_config.enabled or parts.config.nvlink_config.domain_discovery_enabled:
            await _first_readings(parts.reconciler)
        yield SiteService(
            rest_port=await stack.enter_async_context(serve_rest(parts, live, source)),
            metrics_port=await stack.enter_async_context(
                serve_http(
                    parts.page,
                    config.metrics.listen,
                    limits=PROBES,
                    ended=parts.metrics.connections_ended("metrics"),
                )
            ),
            admin_port=await stack.enter_async_context(serve_admin(parts)),
            store=parts.store,
            reconciler=parts.reconciler,
            background=background,
        )


async def _first_readings(reconciler: Reconciler) -> None:
    """Return when each controller of this share was read once, or after `FIRST_READINGS_SECONDS`.

    Until then the records show the earlier state of the racks, perhaps from an older backup: an instance
    could be placed on a tray that another program has put into a partition since.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_READINGS_SECONDS):
            await reconciler.first_passes()


def _trace_settings(config: Config) -> TraceSettings | None:
    tracing = config.tracing
    if tracing.endpoint is None:
        return None
    return TraceSettings(
        endpoint=tracing.endpoint,
        instance=new_id(),
        sample_ratio=tracing.sample_ratio,
        ca_file=tracing.ca_file,
    )


@asynccontextmanager
async def _followed_cluster(parts: ServiceParts) -> AsyncIterator[ClusterFollower | None]:
    """The follower of the cluster of `[kubernetes]`, or None without that section."""
    config = parts.config.kubernetes
    if config is None:
        yield None
        return
    async with follow_cluster(config, parts.clock) as follower:
        yield follower


def _map_source(parts: ServiceParts, cluster: ClusterFollower | None) -> SiteSource:
    """The source of the rack map."""
    folder = parts.config.map.transfers
    if folder is not None and not folder.is_dir():
        raise Refused(
            f"[map]: transfers: {folder} is no directory",
            nearest_fix="make it, or name the one in which `rackloom transfer run --save` keeps records",
        )
    valid_seconds = parts.config.nvlink_config.reading_valid_seconds
    source = SiteSource(parts.store, parts.clock, folder, valid_seconds, parts.issuers.doubts)
    config = parts.config.kubernetes
    if cluster is not None and config is not None:
        source.follow(cluster, config.namespace)
    return source


def _history_keeper(parts: ServiceParts) -> HistoryKeeper | None:
    """The keeper of the map's history, or None: with PostgreSQL the service has no directory."""
    folder = parts.config.database.sqlite
    if folder is None:
        return None
    return HistoryKeeper(HistoryFile(Home(folder).map_history), parts.clock)


def _background_jobs(parts: ServiceParts, cluster: ClusterFollower | None, live: LiveMap) -> Iterator[Job]:
    """The jobs that run beside the listeners."""
    yield live.record(_history_keeper(parts))
    if parts.config.auth.issuers:  # without any it would end at once, and a job that ends stops the service
        yield parts.issuers.refresh()
    yield AuditKeeper(
        audit=parts.audit,
        store=parts.store,
        clock=parts.clock,
        keep_seconds=timedelta(days=parts.config.audit.retention_days).total_seconds(),
        keep_entries=parts.config.audit.max_entries,
    ).run()
    nvlink = parts.config.nvlink_config
    if nvlink.enabled or nvlink.domain_discovery_enabled:
        yield parts.reconciler.run()
        yield from _nmxm_jobs(parts)
    host_state = parts.config.site.host_state
    if host_state.url is not None:
        seconds = host_state.interval.total_seconds()
        hosts = HostStatePoller(host_state.url, seconds, parts.store, parts.clock)
        yield hosts.run(parts.reconciler.wake)
    if cluster is not None:
        yield cluster.run()


def _nmxm_jobs(parts: ServiceParts) -> Iterator[Job]:
    if parts.nmxm is not None:
        discovery = NmxmDiscovery(
            url=parts.nmxm,
            switches=parts.switches,
            store=parts.store,
            clock=parts.clock,
            ids=new_id,
            interval=parts.config.nvlink_config.monitor_run_interval.total_seconds(),
            metrics=parts.metrics,
        )
        yield discovery.run(parts.reconciler.endpoints_changed)


@asynccontextmanager
async def _running_jobs(jobs: Iterable[Job]) -> "AsyncIterator[tuple[asyncio.Task[None], ...]]":
    """Run `jobs` until the context ends."""
    tasks = tuple(asyncio.create_task(job) for job in jobs)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_stopped_or_failed(stopped: asyncio.Event, background: "Iterable[asyncio.Task[None]]") -> None:
    """Return when the service shall stop. Raises the error of a background job that has failed."""
    tasks = tuple(background)
    await wait_stopped_or_ended(stopped, *tasks)
    for task in tasks:
        if task.done():
            task.result()
