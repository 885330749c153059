"""`rackloom serve`: store, reconciler, REST, rack map, admin gRPC and metrics of one site, in one process.

The embedded site of `rackloom up` is the same parts over simulated switches; here they are real, and nothing
is made up: machines come from what the switch controllers show or from what an operator wrote down.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rackloom.app import site_doors
from rackloom.app.cluster_follower import ClusterFollower
from rackloom.app.collecting import spare_what_is_loaded
from rackloom.app.config import Config, load
from rackloom.app.host_state import HostStates
from rackloom.app.listeners import listening
from rackloom.app.logs import log_to
from rackloom.app.picture.look import stale_after
from rackloom.app.rack_map import SiteSource
from rackloom.app.site_cluster import site_cluster
from rackloom.app.site_nmxm import SiteNmxm
from rackloom.app.site_parts import Parts, assembled, new_id
from rackloom.app.stopping import stopped_or_ended, told_to_stop
from rackloom.app.taking_turns import take_short_turns
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.site.store import Store
from rackloom.errors import Refused

Job = Coroutine[Any, Any, None]


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

    take_short_turns()
    uvloop.run(until_stopped())


@asynccontextmanager
async def service(config: Config) -> AsyncIterator[Service]:
    """A service that answers while the context is entered. Raises Refused when it cannot be as configured."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(assembled(config))
        cluster = await stack.enter_async_context(_cluster(parts))
        drawn = _drawn(parts, cluster)
        spare_what_is_loaded()
        background = await stack.enter_async_context(_running(_jobs(parts, cluster)))
        yield Service(
            rest_port=await stack.enter_async_context(site_doors.rest(parts, drawn)),
            metrics_port=await stack.enter_async_context(listening(parts.page, config.metrics.listen)),
            admin_port=await stack.enter_async_context(site_doors.admin(parts)),
            store=parts.store,
            reconciler=parts.reconciler,
            background=background,
        )


@asynccontextmanager
async def _cluster(parts: Parts) -> AsyncIterator[ClusterFollower | None]:
    """Who follows the cluster of `[kubernetes]`."""
    config = parts.config.kubernetes
    if config is None:
        yield None
        return
    async with site_cluster(config, parts.clock) as follower:
        yield follower


def _drawn(parts: Parts, cluster: ClusterFollower | None) -> SiteSource:
    """What the map is drawn from."""
    folder = parts.config.map.transfers
    if folder is not None and not folder.is_dir():
        raise Refused(
            f"[map]: transfers: {folder} is no directory",
            nearest_fix="make it, or name the one in which `rackloom transfer run --save` keeps records",
        )
    stale = stale_after(parts.config.nvlink_config.monitor_run_interval)
    source = SiteSource(parts.store, parts.clock, folder, stale_seconds=stale)
    config = parts.config.kubernetes
    if cluster is not None and config is not None:
        source.follow(cluster, config.namespace)
    return source


def _jobs(parts: Parts, cluster: ClusterFollower | None) -> Iterator[Job]:
    """All that goes on by itself."""
    yield parts.issuers.refresh()
    nvlink = parts.config.nvlink_config
    if nvlink.enabled or nvlink.domain_discovery_enabled:
        yield parts.reconciler.run()
        yield from _own_nmxm(parts)
    host_state = parts.config.site.host_state
    if host_state.url is not None:
        seconds = host_state.interval.total_seconds()
        hosts = HostStates(host_state.url, seconds, parts.store, parts.clock)
        yield hosts.run(parts.reconciler.wake)
    if cluster is not None:
        yield cluster.run()


def _own_nmxm(parts: Parts) -> Iterator[Job]:
    if parts.nmxm is not None:
        seconds = parts.config.nvlink_config.monitor_run_interval.total_seconds()
        found = SiteNmxm(parts.nmxm, parts.switches, parts.store, parts.clock, new_id, seconds, parts.metrics)
        yield found.run(parts.reconciler.endpoints_changed)


@asynccontextmanager
async def _running(jobs: Iterable[Job]) -> "AsyncIterator[tuple[asyncio.Task[None], ...]]":
    """Run `jobs` until the context ends."""
    tasks = tuple(asyncio.create_task(job) for job in jobs)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(stopped: asyncio.Event, background: "Iterable[asyncio.Task[None]]") -> None:
    """Return when the service was told to stop. Raises what a part of it has failed with."""
    tasks = tuple(background)
    await stopped_or_ended(stopped, *tasks)
    for task in tasks:
        if task.done():
            task.result()
