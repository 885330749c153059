"""The sources of `rackloom doctor`: a home, a configured site, a cluster, this host.

`choose_sources` completes the sources named on the command line. Without a name it takes the default home,
and this host if NVIDIA's kernel module is loaded. `read_snapshot` reads all of it once into one snapshot. A
source that does not exist is refused. A database that does not answer makes the switch and record layers
unknown, and a configured cluster that cannot be read from this machine makes the cluster layer unknown.
Everything else is still read.

Nothing is changed, no program is run and no library is called on the host: its files below `sysroot` are
enough.

Each finding carries a command that mends it. `command_access` derives from the same sources the
kubeconfig, address and credentials with which `kubectl` and `rackloom admin` reach this site, and the
settings that the operator's environment still lacks.

Each source imports its own reader: a folder without a site loads no database, no API client and no settings.
"""

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Protocol

import msgspec

from rackloom.app.home import Home, default_home, existing_database
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.report import SiteCommands, with_site_commands
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, SiteSnapshot
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysfs import OWN_ROOT, Sysroot, read_host

if TYPE_CHECKING:
    from rackloom.app.config import AdminConfig, Config
    from rackloom.app.snapshot.fabric import Staleness
    from rackloom.app.snapshot.readers import RecordReader
    from rackloom.claim.kube.client import KubeClient

# One host with NVIDIA GPUs, below the directory of its file system.


def has_nvidia_module(root: Path) -> bool:
    """Whether NVIDIA's kernel module is loaded."""
    return (root / "sys/module/nvidia").is_dir()


def host_name(root: Path) -> str:
    """The host name of the host below `root`. Raises Refused if there is no host."""
    name = Sysroot(root).text("proc/sys/kernel/hostname")
    if name is None or not (root / "sys").is_dir():
        raise Refused(
            f"{root} holds no sys and proc of a host",
            nearest_fix="name where the host's own / is mounted, such as /host in a pod",
        )
    return name


def host_findings(root: Path, snapshot: SiteSnapshot) -> tuple[Finding, ...]:
    """Every check of the host, findings that hold included. No program is run and no library called.

    If the host is a node of the cluster in `snapshot`, the cluster adds the container runtime, whether its
    IMEX daemon has reported its mesh, and the names of its devices.
    """
    from rackloom.core.diagnosis.checks.host_imex import check_host
    from rackloom.core.diagnosis.checks.host_nics import check_host_links, check_host_nics, locate_host
    from rackloom.prove.collectors.host import collect_host
    from rackloom.topology.discovery.discover import build_machine

    host = read_host(Sysroot(root))
    machine = build_machine(host)
    here = locate_host(machine, host_name(root), snapshot)
    runtime = next((node.runtime for node in snapshot.nodes if node.name == here.node), None)
    meshed = any(mesh.node == here.node and mesh.complete is not None for mesh in snapshot.meshes)
    evidence = msgspec.structs.replace(collect_host(here.name, root, runtime), meshed=meshed)
    links = check_host_links(host, machine, here)
    return (*check_host(evidence), *check_host_nics(machine, here), *links)


# The options with which commands reach the examined site.


_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 (compared, not listened on)
_ADMIN_VARIABLES = ("RACKLOOM_ADMIN_CA", "RACKLOOM_ADMIN_CERT", "RACKLOOM_ADMIN_KEY")


def command_access(
    home: Path | None,
    config: Path | None,
    kubeconfig: Path | None,
    environment: Mapping[str, str] = os.environ,
    *,
    context: str | None = None,
    cluster: bool = False,
) -> SiteCommands:
    """The access of `kubectl` and `rackloom admin` to the site that was read from these sources."""
    if config is None:
        kubectl = _kubectl_options(kubeconfig, context)
        if home is None:
            return SiteCommands(kubectl=kubectl)
        # A twin serves REST alone, and a token of its home gives the rights of an operator.
        return SiteCommands(
            kubectl=kubectl,
            instead=f"rackloom token --home {quote(str(home))} --org demo --role PROVIDER_ADMIN",
            then="rackloom up serves REST alone: with this token it does what elsewhere does",
        )
    from rackloom.app.config import load_config

    site = load_config(config)
    if not cluster and kubeconfig is None and context is None and site.kubernetes is not None:
        kubectl = _kubectl_options(site.kubernetes.kubeconfig, site.kubernetes.context)
    else:
        kubectl = _kubectl_options(kubeconfig, context)
    if site.admin is None:
        lacks = f"{config} has no section [admin]: without it no admin interface is served"
        return SiteCommands(kubectl=kubectl, admin_lacks=lacks)
    missing = [name for name in _ADMIN_VARIABLES if name not in environment]
    return SiteCommands(
        kubectl=kubectl,
        admin=_admin_address(site.admin, environment),
        admin_lacks=f"as an operator, with {', '.join(missing)} set" if missing else "",
    )


def _kubectl_options(kubeconfig: Path | None, context: str | None) -> str:
    file = "" if kubeconfig is None else f"--kubeconfig {quote(str(kubeconfig))}"
    return f"{file} {'' if context is None else f'--context {quote(context)}'}".strip()


def _admin_address(admin: "AdminConfig", environment: Mapping[str, str]) -> str:
    if "RACKLOOM_ADMIN_SITE" in environment:
        return ""
    host, _, port = admin.listen.rpartition(":")
    return f"RACKLOOM_ADMIN_SITE={'localhost' if host in _WILDCARDS else host}:{port}"


# Sources, snapshot and diagnosis.


_USER_AGENT = "rackloom-doctor"


class DoctorSources(msgspec.Struct, frozen=True, kw_only=True):
    """The sources to examine. `choose_sources` completes them."""

    home: Path | None = None
    config: Path | None = None
    cluster: bool = False
    """The cluster of the current kubeconfig."""
    kubeconfig: Path | None = None
    context: str | None = None
    """The context of the kubeconfig. None stands for its current one."""
    transfers: Path | None = None
    namespace: str | None = None
    """Namespace of IMEX daemons, or None for that of the configuration, else `DEFAULT_DAEMON_NAMESPACE`."""
    sysroot: Path | None = None
    """The mount point of a host's root directory."""


class DoctorResult(msgspec.Struct, frozen=True):
    """A snapshot and its findings."""

    snapshot: SiteSnapshot
    findings: tuple[Finding, ...]
    host: str | None = None
    """The host if its files were read too."""


def choose_sources(sources: DoctorSources) -> DoctorSources:
    """The sources with this host added if it has NVIDIA GPUs, and the default home if nothing was named.

    Raises Refused if there is nothing to examine.
    """
    if sources.home is not None and sources.config is not None:
        raise Refused("a home and a configuration are two sites", nearest_fix="give --home or --config")
    own = OWN_ROOT if sources.sysroot is None and has_nvidia_module(OWN_ROOT) else None
    found = msgspec.structs.replace(sources, sysroot=sources.sysroot or own)
    cluster = (sources.cluster, sources.kubeconfig, sources.context)
    if any((sources.home, sources.config, *cluster, sources.transfers, sources.sysroot)):
        return found if sources.home is None else _with_home(found, sources.home)
    home = default_home()
    if Home(home).database.is_file():
        return _with_home(found, home)
    if own is None:
        raise Refused(
            f"there is nothing to examine: no site in {home}",
            nearest_fix="give --home of a `rackloom up`, --config of a `rackloom serve`, --cluster, "
            "--kubeconfig, or --sysroot",
        )
    return found


def _with_home(sources: DoctorSources, home: Path) -> DoctorSources:
    """A home, and the kubeconfig and transfers in it."""
    kubeconfig, transfers = (
        path if path.exists() else None for path in (home / "kubeconfig", home / "transfers")
    )
    return msgspec.structs.replace(
        sources,
        home=home,
        kubeconfig=sources.kubeconfig or (None if sources.cluster else kubeconfig),
        transfers=sources.transfers or transfers,
    )


class Stage(Protocol):
    """Tells how far a stage is: the context gives a function that is called for each of `total` steps."""

    def __call__(self, what: str, total: int | None = None) -> AbstractContextManager[Callable[[], object]]:
        """The stage. `what` names the steps when they are done."""
        ...


@contextmanager
def _untold(what: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    yield lambda: None


def diagnose(sources: DoctorSources, stage: Stage = _untold) -> DoctorResult:
    """Read everything once and examine it. Raises Refused for sources that do not exist."""
    sources = choose_sources(sources)
    # Only now is there something to examine.
    import asyncio

    from rackloom.core.diagnosis.examination import examine, steps_of

    root = sources.sysroot
    with stage("reading the site"):
        read: list[SiteSnapshot] = []

        async def keep() -> None:
            # Not as the result of the task: `asyncio.run` writes that out as text, twice, when it ends.
            read.append(await read_snapshot(sources, time.time()))

        asyncio.run(keep())
        snapshot = read[0]
        host = () if root is None else host_findings(root, snapshot)
    with stage("checks done", steps_of(snapshot)) as step:
        findings = examine(snapshot, host=host, between=step)
    commands = command_access(
        sources.home,
        sources.config,
        sources.kubeconfig,
        context=sources.context,
        cluster=sources.cluster,
    )
    name = None if root is None else host_name(root)
    return DoctorResult(snapshot, with_site_commands(findings, commands), name)


async def read_snapshot(sources: DoctorSources, now: float) -> SiteSnapshot:
    """The snapshot of the sources at `now` (seconds since the epoch).

    A database server that does not answer makes its layers unknown. Everything else is read. Raises Refused
    for sources that do not exist.
    """
    from rackloom.app.snapshot.assemble import site_snapshot

    config = None
    if sources.config is not None:
        from rackloom.app.config import load_config

        config = load_config(sources.config)
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(_record_reader(sources, config))
        cluster = _cluster(sources, config, now)
        lost_cluster = (cluster,) if isinstance(cluster, LayerStatus) else ()
        api = None if isinstance(cluster, LayerStatus) else cluster
        if api is not None:
            await stack.enter_async_context(api)
            await _check_namespace(api, sources.namespace)
        configured = None if config is None else config.kubernetes
        read = partial(
            site_snapshot,
            now,
            cluster=api,
            transfers=_checked_directory(sources.transfers or (config.map.transfers if config else None)),
            namespace=sources.namespace or (configured.namespace if configured else DEFAULT_DAEMON_NAMESPACE),
        )
        try:
            stale = None if records is None else _staleness(sources, config, now)
            snapshot = await read(records=records, stale=stale)
        except Retry as unanswered:
            # The database server does not answer: read the other layers without it.
            snapshot, fix = await read(), _database_command(sources, config)
            lost = [
                LayerStatus(layer=layer, unknown_since=now, problem=unanswered.reason, fix=fix)
                for layer in (Layer.FABRIC, Layer.SITE)
            ]
            snapshot = msgspec.structs.replace(snapshot, layers=(*lost, *snapshot.layers))
        else:
            snapshot = _mark_simulated(snapshot, sources, config)
        return msgspec.structs.replace(snapshot, layers=(*snapshot.layers, *lost_cluster))


def _cluster(
    sources: DoctorSources, config: "Config | None", now: float
) -> "KubeClient | LayerStatus | None":
    """The cluster that was named, else that of the site's configuration.

    The configured kubeconfig may be for the machine of the service. If it cannot be used here, the cluster
    layer is unknown, and everything else is read.
    """
    if sources.cluster or sources.kubeconfig is not None or sources.context is not None:
        from rackloom.claim.kube.client import connect

        return connect(sources.kubeconfig, sources.context, user_agent=_USER_AGENT)
    if config is None or config.kubernetes is None:
        return None
    from rackloom.app.site.cluster import cluster_client

    try:
        return cluster_client(config.kubernetes, _USER_AGENT)
    except Refused as error:
        file = quote(str(sources.config))
        return LayerStatus(
            layer=Layer.CLUSTER,
            unknown_since=now,
            problem=f"the cluster cannot be read from here: {error.reason}",
            fix=f"rackloom doctor --config {file} --kubeconfig FILE  # one that serves on this machine",
        )


async def _check_namespace(api: "KubeClient", named: str | None) -> None:
    """Raises Refused for a namespace that does not exist: no daemon could be found in it."""
    if named is None:
        return
    from rackloom.claim.kube.api import KubeError, NotFound
    from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL
    from rackloom.core.cluster.objects import NAMESPACE

    try:
        await api.get(NAMESPACE, named)
    except NotFound as missing:
        raise Refused(
            f"the cluster has no namespace {named}",
            nearest_fix="give --namespace the one of the IMEX daemons: kubectl get pods -A -l "
            f"{COMPUTE_DOMAIN_LABEL}",
        ) from missing
    except KubeError:
        return  # A refusal or a missing answer becomes the status of the whole layer.


def _mark_simulated(snapshot: SiteSnapshot, sources: DoctorSources, config: "Config | None") -> SiteSnapshot:
    """Mark fabric and site as simulated if the home holds a twin: then it has no other switches."""
    folder = sources.home or (config.database.sqlite if config else None)
    if folder is None or not Home(folder).twin.is_dir():
        return snapshot
    return msgspec.structs.replace(snapshot, simulated=(Layer.FABRIC, Layer.SITE, *snapshot.simulated))


def _database_command(sources: DoctorSources, config: "Config | None") -> str:
    """A command that tests whether the database server answers. It contains no password."""
    from sqlalchemy import make_url

    url = None if config is None else make_url(config.database.postgresql or "")
    host = f" --host {quote(url.host)}" if url is not None and url.host else ""
    port = f" --port {url.port}" if url is not None and url.port else ""
    return f"pg_isready{host}{port}  # the server that [database] names in {sources.config}"


@asynccontextmanager
async def _record_reader(
    sources: DoctorSources, config: "Config | None"
) -> AsyncIterator["RecordReader | None"]:
    folder = sources.home or (config.database.sqlite if config else None)
    if folder is not None:
        _check_database(folder, sources.config)
        from rackloom.app.snapshot.readers import SqliteRecordReader

        yield SqliteRecordReader(folder)
    elif config is None:
        yield None
    else:
        from rackloom.app.snapshot.readers import PostgresRecordReader

        reader = PostgresRecordReader(config.database.postgresql or "")
        try:
            yield reader
        finally:
            await reader.close()


def _check_database(folder: Path, config: Path | None) -> None:
    try:
        existing_database(folder)
    except Refused as missing:
        if config is None:
            raise
        raise Refused(
            f"{missing.reason}, which [database] of {config} names",
            nearest_fix=f"correct sqlite there, or start the site, which makes it: rackloom serve --config "
            f"{quote(str(config))}",
        ) from missing


def _staleness(sources: DoctorSources, config: "Config | None", now: float) -> "Staleness":
    """The age up to which readings count. With SQLite, also whether the reading service runs."""
    from rackloom.app.snapshot.fabric import Staleness
    from rackloom.app.snapshot.readers import is_running

    if config is None:
        home, seconds = sources.home, DEFAULT_VALID_SECONDS
        start = f"rackloom up --home {quote(str(home))}"
    else:
        home, seconds = config.database.sqlite, config.nvlink_config.reading_valid_seconds
        start = f"rackloom serve --config {quote(str(sources.config))}"
    if home is None or is_running(home):
        return Staleness(now, seconds)
    return Staleness(now, 0.0, "the site service, which reads the switch controllers, is not running", start)


def _checked_directory(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise Refused(f"{folder} is no directory", nearest_fix="name the one that transfers were saved in")
    return folder
