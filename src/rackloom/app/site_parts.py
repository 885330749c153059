"""What a site service is made of, before anything of it runs or listens."""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import sqlalchemy as sa

from rackloom.app import site_nmxm
from rackloom.app.config import Config
from rackloom.app.issuers import Issuers
from rackloom.app.metrics import SiteMetrics
from rackloom.app.metrics_page import MetricsPage
from rackloom.app.secrets.choose import provider_of
from rackloom.app.secrets.values import SecretProvider
from rackloom.app.switches import Switches
from rackloom.carve.admin import machine_book
from rackloom.carve.admin.site_book import ensure_site
from rackloom.carve.fabric.ports import FabricDriver
from rackloom.carve.plan.values import Observation
from rackloom.carve.reconcile.clock import SteadyClock, newest_moment
from rackloom.carve.reconcile.hooks import Hooks
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.reconcile.slots import Slots
from rackloom.carve.site import fabric_book
from rackloom.carve.site.controllers import ControllerKind, kind_of
from rackloom.carve.site.disputes import Dispute
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.knowledge import STANDS_SECONDS
from rackloom.carve.site.store import Store
from rackloom.carve.site.values import Status
from rackloom.errors import Refused


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one site service, which share its records and its clock."""

    config: Config
    store: Store
    clock: Callable[[], float]
    secrets: SecretProvider
    switches: Switches
    metrics: SiteMetrics
    nmxm: str | None
    """URL of the site's own NMX-M, whose chassis are not registered one by one."""
    reconciler: Reconciler
    issuers: Issuers
    page: MetricsPage


@asynccontextmanager
async def assembled(config: Config) -> AsyncIterator[Parts]:
    """The parts as configured; their store is closed at the end. Raises Refused for what cannot be."""
    _check_interval(config.nvlink_config.monitor_run_interval.total_seconds())
    store = await _open_store(config)
    try:
        yield await _on(store, config)
    finally:
        await store.close()


async def _on(store: Store, config: Config) -> Parts:
    clock = SteadyClock(time.time, time.monotonic, await store.read(newest_moment))
    secrets = provider_of(config.secrets)
    switches = Switches(config.nvlink_config, secrets, clock)
    metrics = SiteMetrics(config.metrics.prefix)
    nmxm = _own_nmxm(config, switches, metrics)
    site_id = await _recorded(config, store, clock)
    reconciler = _reconciler(config, store, switches, metrics, site_id, clock)
    issuers = Issuers(config.auth.issuers, clock)
    await issuers.load()
    page = MetricsPage(metrics, store, clock)
    await page.begin()
    return Parts(
        config=config,
        store=store,
        clock=clock,
        secrets=secrets,
        switches=switches,
        metrics=metrics,
        nmxm=nmxm,
        reconciler=reconciler,
        issuers=issuers,
        page=page,
    )


def _check_interval(seconds: float) -> None:
    # Two looks at one domain are compared while both say something of the present.
    if seconds > STANDS_SECONDS / 2:
        raise Refused(
            f"[nvlink_config]: monitor_run_interval is {seconds:g} s: controllers of one domain that"
            " contradict one another would never be seen to",
            nearest_fix=f"read domains at least every {STANDS_SECONDS / 2:g} s",
        )


async def _open_store(config: Config) -> Store:
    """The records, on the database of the configuration."""
    if config.database.postgresql is not None:
        return await Store.connect(config.database.postgresql)
    assert config.database.sqlite is not None  # noqa: S101 - one of them is there, by validation
    try:
        return Store.open(config.database.sqlite)
    except OSError as error:
        raise Refused(
            f"cannot use {config.database.sqlite}: {error.strerror}",
            nearest_fix="name a directory that this process may write in",
        ) from error


async def _recorded(config: Config, store: Store, clock: Callable[[], float]) -> str:
    """The id of the site, which is made at the first start."""
    site = config.site
    return await store.run(ensure_site, site.name, site.provider_org, site.default_partition, clock(), new_id)


def _own_nmxm(config: Config, switches: Switches, metrics: SiteMetrics) -> str | None:
    url = site_nmxm.url_of(config.nvlink_config)
    if url is not None:
        switches.check(url)
        metrics.speaks(site_nmxm.SUBJECT, ControllerKind.NMX_M)
    return url


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
            machine_book.enrol_known(conn, site_id, seen.domain, new_status(config), now)
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


def new_status(config: Config) -> str:
    """Of a host that nobody was asked about yet."""
    return Status.READY if config.site.host_state.provider == "none" else Status.UNKNOWN


def new_id() -> str:
    """A fresh uuid."""
    return str(uuid.uuid4())
