"""What `rackloom doctor` examines: a home, a configured site, a cluster, this host; and how each is read."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.config import DatabaseConfig, load
from rackloom.app.home import default_home
from rackloom.app.picture.fabric import Staleness
from rackloom.app.picture.look import STALE_SECONDS, site_picture, stale_after
from rackloom.app.picture.read_only import PostgresReader, Reader, SqliteReader, is_running
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.lightkube_api import connect
from rackloom.errors import Refused
from rackloom.prove.doctor.checks.hosts import check_host
from rackloom.prove.doctor.collectors.host import collect_host
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Finding, State, badness
from rackloom.prove.picture.values import Picture


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked to be examined; None is left to `chosen`."""

    home: Path | None = None
    config: Path | None = None
    kubeconfig: Path | None = None
    transfers: Path | None = None
    namespace: str = DEFAULT_NAMESPACE
    """Where IMEX daemons run."""


class Examined(msgspec.Struct, frozen=True):
    """A picture and what is wrong in it."""

    picture: Picture
    findings: tuple[Finding, ...]


def chosen(sources: Sources) -> Sources:
    """What will be examined. Nothing named is the default home, with what lies in it.

    Raises Refused when there is nothing.
    """
    if sources.home is not None and sources.config is not None:
        raise Refused("a home and a configuration are two sites", nearest_fix="give --home or --config")
    named = sources.home or sources.config or sources.kubeconfig or sources.transfers
    home = sources.home if named else default_home()
    if not named and home is not None and not (home / "site.db").is_file():
        raise Refused(
            f"there is nothing to examine: no site in {home}",
            nearest_fix="give --home of a `rackloom up`, --config of a `rackloom serve`, or --kubeconfig",
        )
    if home is None:
        return sources
    return msgspec.structs.replace(
        sources,
        home=home,
        kubeconfig=sources.kubeconfig or _existing(home / "kubeconfig"),
        transfers=sources.transfers or _existing(home / "transfers"),
    )


def diagnose(sources: Sources) -> Examined:
    """Read everything once and examine it. Raises Refused for sources that cannot be read at all."""
    picture = asyncio.run(look(chosen(sources), time.time()))
    found = (*examine(picture), *_this_host(Path("/")))
    return Examined(picture, tuple(sorted(found, key=badness)))


async def look(sources: Sources, now: float) -> Picture:
    """The picture of what was chosen, at `now` (seconds since the epoch)."""
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(_records(sources))
        cluster: KubeApi | None = None
        if sources.kubeconfig is not None:
            cluster = await stack.enter_async_context(
                connect(sources.kubeconfig, user_agent="rackloom-doctor")
            )
        return await site_picture(
            now,
            records=records,
            stale=_staleness(sources, now),
            cluster=cluster,
            transfers=_folder(sources.transfers),
            namespace=sources.namespace,
        )


@asynccontextmanager
async def _records(sources: Sources) -> AsyncIterator[Reader | None]:
    if sources.home is not None:
        yield SqliteReader(sources.home)
    elif sources.config is not None:
        async with _configured(load(sources.config).database) as reader:
            yield reader
    else:
        yield None


@asynccontextmanager
async def _configured(database: DatabaseConfig) -> AsyncIterator[Reader]:
    if database.sqlite is not None:
        yield SqliteReader(database.sqlite)
        return
    reader = PostgresReader(database.postgresql or "")
    try:
        yield reader
    finally:
        await reader.close()


def _staleness(sources: Sources, now: float) -> Staleness:
    if sources.config is None:
        return _running_or_not(sources.home, now, STALE_SECONDS, f"rackloom up --home {sources.home}")
    config = load(sources.config)
    seconds = stale_after(config.nvlink_config.monitor_run_interval)
    start = f"rackloom serve --config {sources.config}"
    return _running_or_not(config.database.sqlite, now, seconds, start)


def _running_or_not(home: Path | None, now: float, seconds: float, start: str) -> Staleness:
    """Whether anybody reads the switch controllers; of a database server only the age of readings tells."""
    if home is None or is_running(home):
        return Staleness(now, seconds)
    return Staleness(now, 0.0, "the site service, which reads the switch controllers, is not running", start)


def _folder(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise Refused(f"{folder} is no directory", nearest_fix="name the one that transfers were saved in")
    return folder


def _this_host(root: Path) -> tuple[Finding, ...]:
    """What is wrong with this host, if it is one with NVIDIA GPUs."""
    if not (root / "sys/module/nvidia").is_dir():
        return ()
    found = check_host(collect_host(socket.gethostname(), root, None))
    return tuple(one for one in found if one.state is not State.HOLDS)


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
