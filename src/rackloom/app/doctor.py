"""What `rackloom doctor` examines: a home, a configured site, a cluster, this host; and how each is read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from shlex import quote

import msgspec
from sqlalchemy import make_url

from rackloom.app.config import load
from rackloom.app.config_sections import ClusterConfig, DatabaseConfig
from rackloom.app.doctor_host import findings_on, has_gpus, name_of
from rackloom.app.doctor_ways import ways_to
from rackloom.app.home import Home, default_home
from rackloom.app.picture.fabric import Staleness
from rackloom.app.picture.look import STALE_SECONDS, site_picture, stale_after
from rackloom.app.picture.read_only import PostgresReader, Reader, SqliteReader, is_running
from rackloom.app.site_cluster import connected
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL
from rackloom.claim.kube.api import KubeError, NotFound
from rackloom.claim.kube.kinds import NAMESPACE
from rackloom.claim.kube.lightkube_api import LightkubeApi, connect
from rackloom.errors import Refused, Retry
from rackloom.prove.doctor.commands import runnable
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.values import Layer, LayerSeen, Picture
from rackloom.topology.discovery.sysroot import OWN

_AGENT = "rackloom-doctor"


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked to be examined; None is left to `chosen`."""

    home: Path | None = None
    config: Path | None = None
    kubeconfig: Path | None = None
    transfers: Path | None = None
    namespace: str | None = None
    """Where IMEX daemons run; None: where the configuration says, else `DEFAULT_DAEMON_NAMESPACE`."""
    sysroot: Path | None = None
    """Where the files of a host are seen."""


class Examined(msgspec.Struct, frozen=True):
    """A picture and what is wrong in it."""

    picture: Picture
    findings: tuple[Finding, ...]
    host: str | None = None
    """The host whose own files were read too."""


def chosen(sources: Sources) -> Sources:
    """What will be examined: also this host, where it has NVIDIA GPUs. Nothing named is the default home.

    Raises Refused when there is nothing.
    """
    if sources.home is not None and sources.config is not None:
        raise Refused("a home and a configuration are two sites", nearest_fix="give --home or --config")
    own = OWN if sources.sysroot is None and has_gpus(OWN) else None
    found = msgspec.structs.replace(sources, sysroot=sources.sysroot or own)
    if any((sources.home, sources.config, sources.kubeconfig, sources.transfers, sources.sysroot)):
        return found if sources.home is None else _with_home(found, sources.home)
    home = default_home()
    if (home / "site.db").is_file():
        return _with_home(found, home)
    if own is None:
        raise Refused(
            f"there is nothing to examine: no site in {home}",
            nearest_fix="give --home of a `rackloom up`, --config of a `rackloom serve`, --kubeconfig, or "
            "--sysroot",
        )
    return found


def _with_home(sources: Sources, home: Path) -> Sources:
    """A home, and what lies in it."""
    return msgspec.structs.replace(
        sources,
        home=home,
        kubeconfig=sources.kubeconfig or _existing(home / "kubeconfig"),
        transfers=sources.transfers or _existing(home / "transfers"),
    )


def diagnose(sources: Sources) -> Examined:
    """Read everything once and examine it. Raises Refused for sources that cannot be read at all."""
    sources = chosen(sources)
    picture = asyncio.run(look(sources, time.time()))
    ways = ways_to(sources.home, sources.config, sources.kubeconfig)
    if sources.sysroot is None:
        return Examined(picture, runnable(examine(picture), ways))
    own = findings_on(sources.sysroot, picture)
    return Examined(picture, runnable(examine(picture, host=own), ways), name_of(sources.sysroot))


async def look(sources: Sources, now: float) -> Picture:
    """The picture of what was chosen, at `now` (seconds since the epoch).

    A database server that does not answer makes its layers unknown; what else there is, is read. Raises
    Refused for sources that are none.
    """
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(_records(sources))
        cluster = _cluster(sources, now)
        if isinstance(cluster, LightkubeApi):
            await stack.enter_async_context(cluster)
            await _known_namespace(cluster, sources.namespace)
        others = partial(
            site_picture,
            now,
            cluster=cluster if isinstance(cluster, LightkubeApi) else None,
            transfers=_folder(_transfers(sources)),
            namespace=_namespace(sources),
        )
        try:
            picture = _marked(await others(records=records, stale=_staleness(sources, now)), sources)
        except Retry as silent:
            picture = _without_records(await others(), silent.reason, sources)
        return _with_layer(picture, cluster) if isinstance(cluster, LayerSeen) else picture


def _cluster(sources: Sources, now: float) -> LightkubeApi | LayerSeen | None:
    """The cluster that was named, or else that of the site's configuration.

    That may be for another machine, from which the service runs: then it is unknown, and all else is read.
    """
    if sources.kubeconfig is not None:
        return connect(sources.kubeconfig, user_agent=_AGENT)
    configured = _configured_cluster(sources)
    if configured is None:
        return None
    try:
        return connected(configured, _AGENT)
    except Refused as error:
        config = quote(str(sources.config))
        return LayerSeen(
            layer=Layer.CLUSTER,
            unknown_since=now,
            problem=f"the cluster cannot be read from here: {error.reason}",
            fix=f"rackloom doctor --config {config} --kubeconfig FILE  # one that serves on this machine",
        )


async def _known_namespace(api: LightkubeApi, named: str | None) -> None:
    """Raises Refused for one that the cluster has not: in it nobody would be heard of."""
    if named is None:
        return
    try:
        await api.get(NAMESPACE, named)
    except NotFound as missing:
        raise Refused(
            f"the cluster has no namespace {named}",
            nearest_fix="give --namespace the one of the IMEX daemons: kubectl get pods -A -l "
            f"{COMPUTE_DOMAIN_LABEL}",
        ) from missing
    except KubeError:
        return  # Whoever may not ask, or is not answered, is told so of the whole layer.


def _configured_cluster(sources: Sources) -> ClusterConfig | None:
    return load(sources.config).kubernetes if sources.config else None


def _namespace(sources: Sources) -> str:
    configured = _configured_cluster(sources)
    return sources.namespace or (DEFAULT_DAEMON_NAMESPACE if configured is None else configured.namespace)


def _with_layer(picture: Picture, seen: LayerSeen) -> Picture:
    return msgspec.structs.replace(picture, layers=(*picture.layers, seen))


def _transfers(sources: Sources) -> Path | None:
    """The folder that was named, or else that of the site's configuration."""
    if sources.transfers is not None or sources.config is None:
        return sources.transfers
    return load(sources.config).map.transfers


def _marked(picture: Picture, sources: Sources) -> Picture:
    """Say what is simulated: a home in which the twin keeps its switches has no others."""
    folder = sources.home or (load(sources.config).database.sqlite if sources.config else None)
    if folder is None or not Home(folder).twin.is_dir():
        return picture
    return msgspec.structs.replace(picture, simulated=(Layer.FABRIC, Layer.SITE, *picture.simulated))


def _without_records(picture: Picture, problem: str, sources: Sources) -> Picture:
    """What the rest of a site shows while its database does not answer."""
    lost = tuple(
        LayerSeen(layer=one, unknown_since=picture.at, problem=problem, fix=_ask_database(sources))
        for one in (Layer.FABRIC, Layer.SITE)
    )
    return msgspec.structs.replace(picture, layers=(*lost, *picture.layers))


def _ask_database(sources: Sources) -> str:
    """A command that says whether the database server is there. It holds no password."""
    url = make_url(load(sources.config).database.postgresql or "") if sources.config else None
    host = f" --host {quote(url.host)}" if url is not None and url.host else ""
    port = f" --port {url.port}" if url is not None and url.port else ""
    return f"pg_isready{host}{port}  # the server that [database] names in {sources.config}"


@asynccontextmanager
async def _records(sources: Sources) -> AsyncIterator[Reader | None]:
    if sources.home is not None:
        yield SqliteReader(sources.home)
    elif sources.config is not None:
        async with _configured(load(sources.config).database, sources.config) as reader:
            yield reader
    else:
        yield None


@asynccontextmanager
async def _configured(database: DatabaseConfig, config: Path) -> AsyncIterator[Reader]:
    if database.sqlite is not None:
        yield _sqlite(database.sqlite, config)
        return
    reader = PostgresReader(database.postgresql or "")
    try:
        yield reader
    finally:
        await reader.close()


def _sqlite(folder: Path, config: Path) -> SqliteReader:
    try:
        return SqliteReader(folder)
    except Refused as missing:
        raise Refused(
            f"{missing.reason}, which [database] of {config} names",
            nearest_fix=f"correct sqlite there, or start the site, which makes it: rackloom serve --config "
            f"{quote(str(config))}",
        ) from missing


def _staleness(sources: Sources, now: float) -> Staleness:
    if sources.config is None:
        start = f"rackloom up --home {quote(str(sources.home))}"
        return _running_or_not(sources.home, now, STALE_SECONDS, start)
    config = load(sources.config)
    seconds = stale_after(config.nvlink_config.monitor_run_interval)
    start = f"rackloom serve --config {quote(str(sources.config))}"
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


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
