"""What `rackloom doctor` examines: a home, a configured site, a cluster, this host.

`choose_sources` completes what the command line names. Without a name it takes the default home, and this
host where NVIDIA's kernel module is loaded. `read_snapshot` reads all of it once into one snapshot. A
source that does not exist is refused. A database that does not answer makes the switch and record layers
unknown, and a configured cluster that cannot be read from this machine makes the cluster layer unknown;
everything else is still read.

Nothing is changed, no program is run and no library is called on the host: its files below `sysroot` are
enough.

Each finding carries a command that mends it. `command_access` derives from the same sources with which
kubeconfig, address and credentials `kubectl` and `rackloom admin` reach this site, and what the
operator's environment still lacks for it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from shlex import quote

import msgspec
from sqlalchemy import make_url

from rackloom.app.config import AdminConfig, ClusterConfig, DatabaseConfig, load_config
from rackloom.app.home import Home, default_home
from rackloom.app.site.cluster import cluster_client
from rackloom.app.snapshot.assemble import DEFAULT_STALE_SECONDS, site_snapshot, stale_after
from rackloom.app.snapshot.fabric import Staleness
from rackloom.app.snapshot.readers import PostgresRecordReader, RecordReader, SqliteRecordReader, is_running
from rackloom.claim.kube.api import KubeError, NotFound
from rackloom.claim.kube.client import KubeClient, connect
from rackloom.core.diagnosis.checks.host_imex import check_host
from rackloom.core.diagnosis.checks.host_nics import check_host_links, check_host_nics, locate_host
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.report import SiteCommands, with_site_commands
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, SiteSnapshot
from rackloom.core.domains.names import COMPUTE_DOMAIN_LABEL
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.kubernetes.objects import NAMESPACE
from rackloom.errors import Refused, Retry
from rackloom.prove.collectors.host import collect_host
from rackloom.topology.discovery.discover import build_machine
from rackloom.topology.discovery.sysfs import OWN_ROOT, Sysroot, read_host

# One host with NVIDIA GPUs, below the directory where its file system is seen.


def has_nvidia_module(root: Path) -> bool:
    """Whether NVIDIA's kernel module is loaded."""
    return (root / "sys/module/nvidia").is_dir()


def host_name(root: Path) -> str:
    """What the host below `root` calls itself. Raises Refused where none is."""
    told = Sysroot(root).text("proc/sys/kernel/hostname")
    if told is None or not (root / "sys").is_dir():
        raise Refused(
            f"{root} holds no sys and proc of a host",
            nearest_fix="name where the host's own / is mounted, such as /host in a pod",
        )
    return told


def host_findings(root: Path, snapshot: SiteSnapshot) -> tuple[Finding, ...]:
    """Every check of the host, also what is well. No program is run, and no library asked.

    The cluster of `snapshot` tells what runs the host's containers, whether its IMEX daemon's pod has told of
    its mesh, and what its devices are called, if the host is one of its nodes.
    """
    host = read_host(Sysroot(root))
    machine = build_machine(host)
    here = locate_host(machine, host_name(root), snapshot)
    runtime = next((node.runtime for node in snapshot.nodes if node.name == here.node), None)
    meshed = any(mesh.node == here.node and mesh.complete is not None for mesh in snapshot.meshes)
    seen = msgspec.structs.replace(collect_host(here.name, root, runtime), meshed=meshed)
    links = check_host_links(host, machine, here)
    return (*check_host(seen), *check_host_nics(machine, here), *links)


# With which options commands reach the examined site.


_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 (what is listened on, not listening)
_ADMIN_VARIABLES = ("RACKLOOM_ADMIN_CA", "RACKLOOM_ADMIN_CERT", "RACKLOOM_ADMIN_KEY")


def command_access(
    home: Path | None,
    config: Path | None,
    kubeconfig: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> SiteCommands:
    """How `kubectl` and `rackloom admin` reach what was read from these."""
    if config is None:
        kubectl = _kubectl_options(kubeconfig, None)
        return SiteCommands(kubectl=kubectl) if home is None else _access_to_home(home, kubectl)
    found = load_config(config)
    cluster = found.kubernetes
    if kubeconfig is None and cluster is not None:
        kubectl = _kubectl_options(cluster.kubeconfig, cluster.context)
    else:
        kubectl = _kubectl_options(kubeconfig, None)
    if found.admin is None:
        lacks = f"{config} has no section [admin]: without it no admin interface is served"
        return SiteCommands(kubectl=kubectl, admin_lacks=lacks)
    return SiteCommands(
        kubectl=kubectl,
        admin=_admin_address(found.admin, environment),
        admin_lacks=_missing_variables(environment),
    )


def _access_to_home(home: Path, kubectl: str) -> SiteCommands:
    """The twin's own service has REST alone, where its operator is whoever has a token of its home."""
    return SiteCommands(
        kubectl=kubectl,
        instead=f"rackloom token --home {quote(str(home))} --org demo --role PROVIDER_ADMIN",
        then="rackloom up serves REST alone: with this token it does what elsewhere does",
    )


def _kubectl_options(kubeconfig: Path | None, context: str | None) -> str:
    file = "" if kubeconfig is None else f"--kubeconfig {quote(str(kubeconfig))}"
    return " ".join(one for one in (file, "" if context is None else f"--context {quote(context)}") if one)


def _admin_address(admin: AdminConfig, environment: Mapping[str, str]) -> str:
    if "RACKLOOM_ADMIN_SITE" in environment:
        return ""
    host, _, port = admin.listen.rpartition(":")
    return f"RACKLOOM_ADMIN_SITE={'localhost' if host in _WILDCARDS else host}:{port}"


def _missing_variables(environment: Mapping[str, str]) -> str:
    missing = [name for name in _ADMIN_VARIABLES if name not in environment]
    return f"as an operator, with {', '.join(missing)} set" if missing else ""


# Sources, snapshot and diagnosis.


_USER_AGENT = "rackloom-doctor"


class DoctorSources(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked to be examined; None is left to `chosen`."""

    home: Path | None = None
    config: Path | None = None
    kubeconfig: Path | None = None
    transfers: Path | None = None
    namespace: str | None = None
    """Where IMEX daemons run; None: where the configuration says, else `DEFAULT_DAEMON_NAMESPACE`."""
    sysroot: Path | None = None
    """Where the files of a host are seen."""


class DoctorResult(msgspec.Struct, frozen=True):
    """A snapshot and what is wrong in it."""

    snapshot: SiteSnapshot
    findings: tuple[Finding, ...]
    host: str | None = None
    """The host whose own files were read too."""


def choose_sources(sources: DoctorSources) -> DoctorSources:
    """What will be examined: also this host, where it has NVIDIA GPUs. Nothing named is the default home.

    Raises Refused when there is nothing.
    """
    if sources.home is not None and sources.config is not None:
        raise Refused("a home and a configuration are two sites", nearest_fix="give --home or --config")
    own = OWN_ROOT if sources.sysroot is None and has_nvidia_module(OWN_ROOT) else None
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


def _with_home(sources: DoctorSources, home: Path) -> DoctorSources:
    """A home, and what lies in it."""
    return msgspec.structs.replace(
        sources,
        home=home,
        kubeconfig=sources.kubeconfig or _existing(home / "kubeconfig"),
        transfers=sources.transfers or _existing(home / "transfers"),
    )


def diagnose(sources: DoctorSources) -> DoctorResult:
    """Read everything once and examine it. Raises Refused for sources that cannot be read at all."""
    sources = choose_sources(sources)
    snapshot = asyncio.run(read_snapshot(sources, time.time()))
    ways = command_access(sources.home, sources.config, sources.kubeconfig)
    if sources.sysroot is None:
        return DoctorResult(snapshot, with_site_commands(examine(snapshot), ways))
    own = host_findings(sources.sysroot, snapshot)
    return DoctorResult(
        snapshot, with_site_commands(examine(snapshot, host=own), ways), host_name(sources.sysroot)
    )


async def read_snapshot(sources: DoctorSources, now: float) -> SiteSnapshot:
    """The snapshot of what was chosen, at `now` (seconds since the epoch).

    A database server that does not answer makes its layers unknown; what else there is, is read. Raises
    Refused for sources that are none.
    """
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(_record_reader(sources))
        cluster = _cluster(sources, now)
        if isinstance(cluster, KubeClient):
            await stack.enter_async_context(cluster)
            await _check_namespace(cluster, sources.namespace)
        others = partial(
            site_snapshot,
            now,
            cluster=cluster if isinstance(cluster, KubeClient) else None,
            transfers=_checked_directory(_transfers(sources)),
            namespace=_namespace(sources),
        )
        try:
            snapshot = _mark_simulated(await others(records=records, stale=_staleness(sources, now)), sources)
        except Retry as silent:
            snapshot = _without_records(await others(), silent.reason, sources)
        return _with_layer(snapshot, cluster) if isinstance(cluster, LayerStatus) else snapshot


def _cluster(sources: DoctorSources, now: float) -> KubeClient | LayerStatus | None:
    """The cluster that was named, or else that of the site's configuration.

    That may be for another machine, from which the service runs: then it is unknown, and all else is read.
    """
    if sources.kubeconfig is not None:
        return connect(sources.kubeconfig, user_agent=_USER_AGENT)
    configured = _configured_cluster(sources)
    if configured is None:
        return None
    try:
        return cluster_client(configured, _USER_AGENT)
    except Refused as error:
        config = quote(str(sources.config))
        return LayerStatus(
            layer=Layer.CLUSTER,
            unknown_since=now,
            problem=f"the cluster cannot be read from here: {error.reason}",
            fix=f"rackloom doctor --config {config} --kubeconfig FILE  # one that serves on this machine",
        )


async def _check_namespace(api: KubeClient, named: str | None) -> None:
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


def _configured_cluster(sources: DoctorSources) -> ClusterConfig | None:
    return load_config(sources.config).kubernetes if sources.config else None


def _namespace(sources: DoctorSources) -> str:
    configured = _configured_cluster(sources)
    return sources.namespace or (DEFAULT_DAEMON_NAMESPACE if configured is None else configured.namespace)


def _with_layer(snapshot: SiteSnapshot, seen: LayerStatus) -> SiteSnapshot:
    return msgspec.structs.replace(snapshot, layers=(*snapshot.layers, seen))


def _transfers(sources: DoctorSources) -> Path | None:
    """The folder that was named, or else that of the site's configuration."""
    if sources.transfers is not None or sources.config is None:
        return sources.transfers
    return load_config(sources.config).map.transfers


def _mark_simulated(snapshot: SiteSnapshot, sources: DoctorSources) -> SiteSnapshot:
    """Say what is simulated: a home in which the twin keeps its switches has no others."""
    folder = sources.home or (load_config(sources.config).database.sqlite if sources.config else None)
    if folder is None or not Home(folder).twin.is_dir():
        return snapshot
    return msgspec.structs.replace(snapshot, simulated=(Layer.FABRIC, Layer.SITE, *snapshot.simulated))


def _without_records(snapshot: SiteSnapshot, problem: str, sources: DoctorSources) -> SiteSnapshot:
    """What the rest of a site shows while its database does not answer."""
    lost = tuple(
        LayerStatus(layer=one, unknown_since=snapshot.at, problem=problem, fix=_database_command(sources))
        for one in (Layer.FABRIC, Layer.SITE)
    )
    return msgspec.structs.replace(snapshot, layers=(*lost, *snapshot.layers))


def _database_command(sources: DoctorSources) -> str:
    """A command that says whether the database server is there. It holds no password."""
    url = make_url(load_config(sources.config).database.postgresql or "") if sources.config else None
    host = f" --host {quote(url.host)}" if url is not None and url.host else ""
    port = f" --port {url.port}" if url is not None and url.port else ""
    return f"pg_isready{host}{port}  # the server that [database] names in {sources.config}"


@asynccontextmanager
async def _record_reader(sources: DoctorSources) -> AsyncIterator[RecordReader | None]:
    if sources.home is not None:
        yield SqliteRecordReader(sources.home)
    elif sources.config is not None:
        async with _configured_reader(load_config(sources.config).database, sources.config) as reader:
            yield reader
    else:
        yield None


@asynccontextmanager
async def _configured_reader(database: DatabaseConfig, config: Path) -> AsyncIterator[RecordReader]:
    if database.sqlite is not None:
        yield _sqlite_reader(database.sqlite, config)
        return
    reader = PostgresRecordReader(database.postgresql or "")
    try:
        yield reader
    finally:
        await reader.close()


def _sqlite_reader(folder: Path, config: Path) -> SqliteRecordReader:
    try:
        return SqliteRecordReader(folder)
    except Refused as missing:
        raise Refused(
            f"{missing.reason}, which [database] of {config} names",
            nearest_fix=f"correct sqlite there, or start the site, which makes it: rackloom serve --config "
            f"{quote(str(config))}",
        ) from missing


def _staleness(sources: DoctorSources, now: float) -> Staleness:
    if sources.config is None:
        start = f"rackloom up --home {quote(str(sources.home))}"
        return _staleness_of(sources.home, now, DEFAULT_STALE_SECONDS, start)
    config = load_config(sources.config)
    seconds = stale_after(config.nvlink_config.monitor_run_interval)
    start = f"rackloom serve --config {quote(str(sources.config))}"
    return _staleness_of(config.database.sqlite, now, seconds, start)


def _staleness_of(home: Path | None, now: float, seconds: float, start: str) -> Staleness:
    """Whether anybody reads the switch controllers; of a database server only the age of readings tells."""
    if home is None or is_running(home):
        return Staleness(now, seconds)
    return Staleness(now, 0.0, "the site service, which reads the switch controllers, is not running", start)


def _checked_directory(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise Refused(f"{folder} is no directory", nearest_fix="name the one that transfers were saved in")
    return folder


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
