"""The parts of a site service, built from its configuration. None of them runs or listens yet.

`assemble` opens the store, records the site at the first start, and builds reconciler, switch access,
token verification and metrics. All parts share one store and one monotonic clock, which starts after the
newest time in the records: whether an observation answers an intent is decided by their times.

The reconciler records each observation, and enrols machines from it where the configuration takes
machines from that kind of controller. The monitor interval may be at most half of the time for which an
observation is valid. Otherwise controllers of one domain that contradict one another would never be
compared.

A site may have one NMX-M for all its chassis (`nmx_m_endpoint`). `NmxmDiscovery` reads it at each
interval, and registers an endpoint for every chassis that it lists and that has none. A chassis with an
NMX-C endpoint keeps it, so that a site can move from one protocol to the other rack by rack.
"""

import asyncio
import errno
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import sqlalchemy as sa
import structlog

from rackloom.app.config import Config, NvlinkConfig, SecretsConfig, VaultConfig
from rackloom.app.process import elapsed_seconds
from rackloom.app.site.issuers import IssuerVerifier
from rackloom.app.site.metrics import MetricsEndpoints, SiteMetrics
from rackloom.app.site.secrets import EnvironmentSecrets, FileSecrets, SecretProvider
from rackloom.app.site.switches import Switches
from rackloom.carve.fabric.controller import (
    ControllerKind,
    FabricDriver,
    FabricRefused,
    FabricUnavailable,
    controller_kind,
    url_of_kind,
)
from rackloom.carve.fabric.nmxm import protocol
from rackloom.carve.fabric.nmxm.reading import NmxmLists, domains_of
from rackloom.carve.inventory import endpoints, enrolment
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.inventory.enrolment import ensure_site
from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.reconcile import records
from rackloom.carve.reconcile.domain_pass import ReconcileHooks, ReconcileMetrics
from rackloom.carve.reconcile.loop import ConcurrencySlots, Reconciler
from rackloom.carve.store.audit import SITE, AuditRecord, append_entries
from rackloom.carve.store.audit_trail import RequestAudit
from rackloom.carve.store.database import Store
from rackloom.carve.store.failures import StoreUnavailable
from rackloom.carve.store.journal import MonotonicSiteClock, OperatorOrder, newest_recorded_time
from rackloom.carve.store.values import IdFactory, Status
from rackloom.core.partitions.domain import DomainObservation
from rackloom.core.partitions.status_rules import READING_VALID_SECONDS
from rackloom.errors import Refused, Retry, Unknown
from rackloom.runtime.traces import NO_TRACES, Traces

# Endpoints that the site's own NMX-M names.


log = structlog.get_logger(__name__)

NO_NMXM = "localhost"
"""Default of upstream's key. It means that the site has no NMX-M."""
NMXM_SUBJECT = "nvlink_config.nmx_m_endpoint"


def configured_nmxm_url(config: NvlinkConfig) -> str | None:
    """URL of the site's NMX-M, or None without one. Raises Refused for an invalid address."""
    endpoint = config.nmx_m_endpoint
    return None if endpoint == NO_NMXM else url_of_kind(endpoint, ControllerKind.NMX_M)


class NmxmDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Reads which chassis the NMX-M at `url` names, now and every `interval` seconds."""

    url: str
    switches: Switches
    store: Store
    clock: Callable[[], float]
    ids: IdFactory
    interval: float
    metrics: ReconcileMetrics

    async def run(self, endpoints_changed: Callable[[], None]) -> None:
        """Read until cancelled. `endpoints_changed` is called after new endpoints."""
        while True:
            try:
                if await self.enrol():
                    endpoints_changed()
            except (FabricRefused, FabricUnavailable) as error:
                self.metrics.unreachable(NMXM_SUBJECT, str(error))
                log.warning("nmxm.unreachable", url=self.url, reason=str(error))
            except (Retry, Unknown):
                pass  # the store has logged it
            except Exception:
                log.exception("nmxm.failed", url=self.url)
            await asyncio.sleep(self.interval)

    async def enrol(self) -> tuple[str, ...]:
        """Read once. Return the chassis that have an endpoint now and had none.

        Raises FabricUnavailable and FabricRefused when NMX-M does not answer.
        """
        session = await self.switches.nmxm_session(
            Endpoint(id=NMXM_SUBJECT, url=self.url, chassis_serials=(), domain=None)
        )
        try:
            chassis = await session.hello()
            gpus = await session.get_all("GetGpus", "gpus", protocol.NmxmGpu)
        finally:
            await session.close()
        domains = domains_of(NmxmLists(chassis=chassis, nodes=(), gpus=gpus, partitions=()))
        return await self.store.run(self._register, domains)

    def _register(self, conn: sa.Connection, domains: dict[str, set[str]]) -> tuple[str, ...]:
        known = {serial for endpoint in endpoints.all_endpoints(conn) for serial in endpoint.chassis_serials}
        order = OperatorOrder(NMXM_SUBJECT, "named by the site's NMX-M", self.clock())
        new = [(serial, domain) for domain, theirs in domains.items() for serial in theirs - known]
        for serial, domain in sorted(new):
            endpoints.create_chassis_endpoint(conn, serial, f"{self.url}?domain={domain}", order, self.ids)
            append_entries(conn, [_entry_of_discovery(serial, order)])
        return tuple(sorted(serial for serial, _ in new))


def _entry_of_discovery(serial: str, order: OperatorOrder) -> AuditRecord:
    return AuditRecord(
        created=order.now,
        channel=SITE,
        subject=order.by,
        by_operator=True,
        operation="register-nmx-m-chassis",
        object_kind="nvlink-nmxc-endpoint",
        object_id=serial,
        reason=order.reason,
    )


# The parts, from the configuration.


class ServiceParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one site service, which share its records and its clock."""

    config: Config
    store: Store
    clock: Callable[[], float]
    secrets: SecretProvider
    switches: Switches
    metrics: SiteMetrics
    nmxm: str | None
    """URL of the site's own NMX-M, with chassis that are not registered one by one."""
    reconciler: Reconciler
    issuers: IssuerVerifier
    page: MetricsEndpoints
    audit: RequestAudit
    traces: Traces


@asynccontextmanager
async def assemble(config: Config, traces: Traces = NO_TRACES) -> AsyncIterator[ServiceParts]:
    """The parts as configured. Their store is closed at the end. Their work opens spans in `traces`.

    Raises Refused for invalid ones, and for a database that cannot be opened or takes no writes.
    """
    _check_interval(config.nvlink_config.monitor_run_interval.total_seconds())
    async with AsyncExitStack() as stack:
        try:
            store = await _open_store(config)
            stack.push_async_callback(store.close)
            parts = await _assemble_on(store, config, traces)
        except StoreUnavailable as failure:
            raise Refused(
                f"the site cannot start: {failure.problem} ({failure.detail})", nearest_fix=failure.fix
            ) from failure
        yield parts


async def _assemble_on(store: Store, config: Config, traces: Traces) -> ServiceParts:
    clock = MonotonicSiteClock(time.time, elapsed_seconds, await store.read(newest_recorded_time))
    secrets = secret_provider(config.secrets)
    switches = Switches(config.nvlink_config, secrets, clock)
    metrics = SiteMetrics(config.metrics.prefix)
    nmxm = _register_nmxm(config, switches, metrics)
    site = config.site
    site_id = await store.run(
        ensure_site, site.name, site.provider_org, site.default_partition, clock(), new_id
    )
    reconciler = _reconciler(config, store, switches, metrics, traces, site_id, clock)
    issuers = IssuerVerifier(config.auth.issuers, clock)
    await issuers.load()
    for issuer in config.auth.issuers:
        metrics.watch_issuer(issuer.issuer, partial(issuers.key_age, issuer.issuer))
    page = MetricsEndpoints(metrics, store, clock, config.nvlink_config.reading_valid_seconds)
    await page.begin()
    return ServiceParts(
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
        audit=RequestAudit(
            request_ids=new_id,
            trusted_proxies=config.audit.trusted_proxies,
            counted=metrics.audited_refusal,
            unauthenticated=metrics.unauthenticated_request,
        ),
        traces=traces,
    )


def _check_interval(seconds: float) -> None:
    # Two readings of one domain are compared only while both are valid.
    if seconds > READING_VALID_SECONDS / 2:
        raise Refused(
            f"[nvlink_config]: monitor_run_interval is {seconds:g} s: controllers of one domain that"
            " contradict one another would never be seen to",
            nearest_fix=f"read domains at least every {READING_VALID_SECONDS / 2:g} s",
        )


def secret_provider(config: SecretsConfig) -> SecretProvider:
    """The provider of this site. A client library is imported only if it is used."""
    if config.provider == "file" and config.directory is not None:
        return FileSecrets(config.directory)
    if config.kubernetes is not None and config.provider == "kubernetes":
        from rackloom.app.site.secret_stores import KubernetesSecrets

        there = config.kubernetes
        return KubernetesSecrets(there.url, there.namespace, there.service_account)
    if config.vault is not None and config.provider == "vault":
        return _vault_provider(config.vault)
    return EnvironmentSecrets(os.environ)


def _vault_provider(config: VaultConfig) -> SecretProvider:
    from rackloom.app.site import secret_stores

    login = (
        secret_stores.login_with_token(config.token_file)
        if config.token_file is not None
        else secret_stores.login_with_service_account(
            config.kubernetes_role or "", config.service_account_token
        )
    )
    return secret_stores.VaultSecrets(config.url, config.mount, login, config.ca)


async def _open_store(config: Config) -> Store:
    """The records, on the database of the configuration."""
    if config.database.postgresql is not None:
        return await Store.connect(config.database.postgresql)
    assert config.database.sqlite is not None  # noqa: S101 - the configuration has one of the two
    return open_home_store(config.database.sqlite)


def open_home_store(home: Path) -> Store:
    """The records in a home directory. Raises Refused when they cannot be opened, or take no writes."""
    try:
        return Store.open(home)
    except (OSError, StoreUnavailable, sa.exc.DatabaseError, sqlite3.Error) as error:
        raise _unopened_store(home, error) from error


def _unopened_store(home: Path, error: Exception) -> Refused:
    reason = f"the store in {home} cannot be opened"
    match error:
        case StoreUnavailable():
            return Refused(f"{reason}: {error.problem} ({error.detail})", nearest_fix=error.fix)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Refused(f"{reason}: {error.strerror}", nearest_fix="make room on its disk")
        case OSError():
            fix = "name a directory that this process may write in"
            return Refused(f"{reason}: {error.strerror}", nearest_fix=fix)
    cause = getattr(error, "orig", None) or error
    return Refused(f"{reason}: {cause}", nearest_fix="restore the home, or name another")


def _register_nmxm(config: Config, switches: Switches, metrics: SiteMetrics) -> str | None:
    url = configured_nmxm_url(config.nvlink_config)
    if url is not None:
        switches.check(url)
        metrics.set_kind(NMXM_SUBJECT, ControllerKind.NMX_M)
    return url


def _reconciler(
    config: Config,
    store: Store,
    switches: Switches,
    metrics: SiteMetrics,
    traces: Traces,
    site_id: str,
    clock: Callable[[], float],
) -> Reconciler:
    nvlink = config.nvlink_config
    kinds: dict[str, ControllerKind] = {}

    def record(
        conn: sa.Connection, endpoint_id: str, observation: DomainObservation, now: float
    ) -> ControllerConflict | None:
        conflict = records.record_observation(
            conn, endpoint_id, observation, now, nvlink.reading_valid_seconds
        )
        if kinds[endpoint_id] in config.site.machine_sources:
            status = initial_machine_status(config)
            enrolment.enrol_machines_of_domain(conn, site_id, observation.domain, status, now)
        return conflict

    def driver_for(endpoint: Endpoint) -> FabricDriver:
        kinds[endpoint.id] = controller_kind(endpoint.url)
        metrics.set_kind(endpoint.id, kinds[endpoint.id])
        return switches.driver_for(endpoint)

    return Reconciler(
        store,
        driver_for,
        clock,
        nvlink.monitor_run_interval.total_seconds(),
        holder=new_id(),
        hooks=ReconcileHooks(record=record, metrics=metrics, traces=traces, read_only=not nvlink.enabled),
        slots=ConcurrencySlots(nvlink.partition_monitor_max_concurrent_groups),
        elapsed=elapsed_seconds,
    )


def initial_machine_status(config: Config) -> str:
    """Status of a host before its state is first read."""
    return Status.READY if config.site.host_state.provider == "none" else Status.UNKNOWN


def new_id() -> str:
    """A fresh uuid."""
    return str(uuid.uuid4())
