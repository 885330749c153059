"""`rackloom up`: the whole twin in one process, for as long as it runs.

`running_twin` joins the embedded site, the cluster of its trays and an API server on loopback. A home
remembers the site. The cluster starts empty each time, and its nodes appear one after another. The rack
map reads the cluster in the same process.

The API server is served with TLS under its own authority, because client-go sends no token without
TLS. The kubeconfig (mode 0600) exists for as long as the server does.

`controlled_twin` also serves the control, over which steps of scenarios reach the running site
(`app/twin/control.py`). With a kubeconfig of a real cluster, the trays join that cluster as nodes in place
of a simulated one (`app/twin/guest.py`).

`freeze_after_start` takes the objects of a start out of later garbage collections: with 1,800 nodes each
full collection would stop REST for half a second and find nothing.
"""

import asyncio
import base64
import random
import secrets
import shlex
import ssl
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rackloom.app.home import Home
from rackloom.app.listeners import serve_http
from rackloom.app.process import (
    LogSetup,
    allow_open_files,
    background_task,
    freeze_loaded_objects,
    keep_files_private,
    log_to_file,
    shorten_switch_interval,
    stop_on_signals,
    wait_stopped_or_ended,
)
from rackloom.app.tracing import TraceSettings, open_traces
from rackloom.app.twin.cluster import ADMIN_USER, TwinCluster, twin_cluster
from rackloom.app.twin.control import ControlledSite, served_control, tray_reports
from rackloom.app.twin.control_messages import ControlAccess, SiteReport
from rackloom.app.twin.guest import GUEST_STEPS, GuestOptions, guest_control, guest_racks
from rackloom.app.twin.real_site import RealSite, real_site
from rackloom.app.twin.site import EmbeddedSite
from rackloom.app.webhook import load_identity
from rackloom.claim.cluster.certificates import issue_certificate, new_authority
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster.objects import LEASE, Object, ResourceKind
from rackloom.lab.kube.direct import DirectApi, SharedReadApi
from rackloom.lab.kube.kubectl.serving import KubeApplication
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.trays import TrayNodes
from rackloom.lab.scenario.controllers import ClockAndRandom
from rackloom.lab.scenario.stage import Stage
from rackloom.lab.switches.fabric import SimulatedFabric
from rackloom.runtime.durable_files import write_durably
from rackloom.runtime.traces import NO_TRACES, Traces
from rackloom.serving.limits import SIMULATED_API_SERVER, Process, files_needed
from rackloom.web.sign_in_codes import CODE_SECONDS

# Access to the simulated API server for kubectl and the doctor.


LOOPBACK, SERVER_NAME = "127.0.0.1", "localhost"
CLUSTER_NAME = "rackloom-twin"
SETTLE_SECONDS = 10.0
"""How long a step waits for nodes that have yet to publish the state of the switches."""


@asynccontextmanager
async def served_api(kube: FakeKube, user: str, kubeconfig: Path) -> AsyncIterator[str]:
    """Serve `kube` on loopback. Yields its URL. `kubeconfig` (0600) is there for as long.

    With TLS, under its own authority: client-go sends no token without.
    """
    token = secrets.token_urlsafe(32)
    authority = new_authority(f"{CLUSTER_NAME} authority", time.time())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_identity(tls, issue_certificate(authority, (SERVER_NAME,), time.time()))
    app = KubeApplication(kube, token, user)
    async with serve_http(app, f"{LOOPBACK}:0", tls=tls, limits=SIMULATED_API_SERVER) as port:
        url = f"https://{SERVER_NAME}:{port}"
        cluster = {
            "server": url,
            "certificate-authority-data": base64.b64encode(authority.certificate).decode(),
        }
        # JSON is YAML.
        content = msgspec.json.encode(_kubeconfig_content(cluster, token, user))
        write_durably(kubeconfig, msgspec.json.format(content))
        try:
            yield url
        finally:
            kubeconfig.unlink(missing_ok=True)  # noqa: ASYNC240 (one small file)


def _kubeconfig_content(cluster: dict[str, str], token: str, user: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": CLUSTER_NAME, "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [
            {"name": CLUSTER_NAME, "context": {"cluster": CLUSTER_NAME, "user": user, "namespace": "default"}}
        ],
        "current-context": CLUSTER_NAME,
    }


# The whole twin.


class RunningTwin(msgspec.Struct, frozen=True, kw_only=True):
    """A running twin."""

    real: RealSite
    cluster: TwinCluster
    api: KubeApi
    """The API client of the administrator."""
    kubeconfig: Path

    @property
    def site(self) -> EmbeddedSite:
        """The site service of the newest life, with REST, store and switches."""
        return self.real.service

    @property
    def nodes(self) -> TrayNodes:
        """The trays as nodes."""
        return self.cluster.nodes

    @property
    def fabrics(self) -> Mapping[str, SimulatedFabric]:
        """The simulated fabrics of the switches, by domain."""
        return {domain: server.fabric for domain, server in self.site.twin.servers.items()}


@asynccontextmanager
async def running_twin(
    home: Home,
    *,
    port: int,
    racks: int,
    profile: str,
    seed: str | None = None,
    log: LogSetup = log_to_file,
    traces: Traces = NO_TRACES,
) -> AsyncIterator[RunningTwin]:
    """A twin that answers while the context is entered. Its nodes appear one after the other from then on.

    `nodes.up` is set once all are there. `home` remembers the site. The cluster starts empty. All
    names of a new home, and the random choices of the cluster, are drawn from `seed`.
    """
    kubeconfig = home.path / "kubeconfig"
    chance = None if seed is None else ClockAndRandom(time.time, random.Random(seed))  # noqa: S311 (a seed)
    made = real_site(home, port=port, racks=racks, profile=profile, seed=seed, log=log, traces=traces)
    async with (
        made as real,
        twin_cluster(real.twin, home.twin / "cluster", chance) as cluster,
        served_api(cluster.kube, ADMIN_USER, kubeconfig),
    ):
        shown, version = SharedReadApi(cluster.kube, "rack-map"), _change_counter(cluster.kube)

        def show_cluster(site: EmbeddedSite) -> None:
            site.source.cluster, site.source.cluster_version = shown, version

        real.on_start(show_cluster)
        real.api = cluster.api
        yield RunningTwin(
            real=real, cluster=cluster, api=DirectApi(cluster.kube, ADMIN_USER), kubeconfig=kubeconfig
        )


@asynccontextmanager
async def controlled_twin(
    home: Home, options: "UpOptions", traces: Traces
) -> AsyncIterator[tuple[RunningTwin, ControlAccess]]:
    """A running twin, and the control that plays steps on it."""
    made = running_twin(
        home,
        port=options.port,
        racks=options.racks,
        profile=options.profile,
        seed=options.seed,
        log=options.log,
        traces=traces,
    )
    async with made as whole:
        site = _controlled_site(
            whole.real,
            options.profile,
            whole.kubeconfig,
            whole.nodes,
            make_stage=lambda: Stage(whole.real, whole.cluster),
        )
        async with served_control(site, home.path) as access:
            yield whole, access


def _controlled_site(
    real: RealSite,
    profile: str,
    kubeconfig: Path,
    nodes: TrayNodes,
    *,
    make_stage: Callable[[], Stage],
    cluster_steps: frozenset[str] | None = None,
) -> ControlledSite:
    async def nodes_settle() -> None:
        await nodes.up.wait()
        # While the API server is down they cannot: what is expected then is seen as it is.
        with suppress(TimeoutError):
            await asyncio.wait_for(nodes.settle(), SETTLE_SECONDS)

    def report() -> SiteReport:
        return SiteReport(
            url=real.service.url,
            kubeconfig=str(kubeconfig),
            profile=profile,
            racks=len(real.twin.site.domains),
            seed=real.twin.seed,
            nodes_up=nodes.up.is_set(),
            trays=tray_reports(real.twin),
        )

    return ControlledSite(
        make_stage=make_stage,
        report=report,
        profile=real.twin.profile,
        profile_name=profile,
        racks=len(real.twin.site.domains),
        nodes_settle=nodes_settle,
        cluster_steps=cluster_steps,
    )


def _change_counter(kube: FakeKube) -> Callable[[], int]:
    """Counts changes of a cluster, without the heartbeats of nodes, which the map does not show."""
    seen = 0

    def count(kind: ResourceKind, _: Object) -> None:
        nonlocal seen
        seen += kind != LEASE

    kube.store.listeners.append(count)
    return lambda: seen


# The process.


PROVIDER_ORG, PROVIDER_ROLES = "demo", ("PROVIDER_ADMIN", "TENANT_ADMIN")
"""The organisation that provides an embedded site."""
REQUESTS_PER_SECOND, BURST = 400.0, 2000
"""Client-side limits at a real API server, because one process acts for all kubelets and plugins."""
Announce = Callable[[str], None]
Accompany = Callable[[RunningTwin], Coroutine[None, None, None]]
"""Runs beside a simulated cluster, until it ends or the site does."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    port: int
    racks: int
    profile: str
    seed: str | None = None
    """All names of a new home are drawn from it, or from chance if it is None."""
    guest: GuestOptions | None = None
    """The existing cluster that the trays join, or None for a simulated one."""
    log: LogSetup = log_to_file
    """Sends events to the log file of the home."""
    own_process: bool = True
    """Whether the process is the site's alone, so that its garbage collector may be set for the site."""
    open_browser: bool = False
    """Whether to show the rack map once it answers, signed in as the provider."""
    traces: str | None = None
    """URL of the collector of spans, or None for no spans."""


def run_up(home: Home, options: UpOptions, announce: Announce, accompany: Accompany | None = None) -> None:
    """Run a site in `home` until SIGTERM or SIGINT. `announce` gets its addresses once it answers.

    `accompany` is for a simulated cluster only.
    """
    import uvloop

    allow_open_files(files_needed(Process.UP, racks=options.racks))
    shorten_switch_interval()
    keep_files_private()
    uvloop.run(_run_until_signal(home, options, announce, accompany))


async def _run_until_signal(
    home: Home, options: UpOptions, announce: Announce, accompany: Accompany | None
) -> None:
    stopped = stop_on_signals()
    await serve_up(home, options, announce, stopped, accompany)


async def serve_up(
    home: Home,
    options: UpOptions,
    announce: Announce,
    stopped: asyncio.Event,
    accompany: Accompany | None = None,
) -> None:
    """Run a site until `stopped` is set. Raises the error with which a part of it ends."""
    sent = None if options.traces is None else TraceSettings(endpoint=options.traces, instance=str(home.path))
    async with (
        open_traces(sent) as traces,
        _with_simulated_cluster(home, options, traces, announce, accompany)
        if options.guest is None
        else _with_real_cluster(home, options, options.guest, traces, announce) as work,
    ):
        await wait_stopped_or_ended(stopped, *work)
        for task in work:
            if task.done():
                task.result()


@asynccontextmanager
async def _with_simulated_cluster(
    home: Home, options: UpOptions, traces: Traces, announce: Announce, accompany: Accompany | None
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    async with (
        controlled_twin(home, options, traces) as (twin, _),
        background_task(twin.real.fails()) as serving,
    ):
        _announce_site(home, options, twin.site, announce)
        announce(f"rackloom: its trays as nodes: kubectl --kubeconfig {twin.kubeconfig} get nodes")
        async with AsyncExitStack() as beside:
            if options.own_process:
                await beside.enter_async_context(background_task(freeze_after_start(twin.nodes)))
            if accompany is not None:
                await beside.enter_async_context(background_task(accompany(twin)))
            yield serving, twin.cluster.work


@asynccontextmanager
async def _with_real_cluster(
    home: Home, options: UpOptions, guest: GuestOptions, traces: Traces, announce: Announce
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    client = http_client(guest.kubeconfig, guest.context)
    client.headers["User-Agent"] = "rackloom-twin"
    made = real_site(
        home,
        port=options.port,
        racks=options.racks,
        profile=options.profile,
        seed=options.seed,
        log=options.log,
        traces=traces,
    )
    async with (
        KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST)) as api,
        made as real,
        background_task(real.fails()) as serving,
        guest_racks(real.twin, home.twin / "cluster", api, announce, taint=guest.taint) as racks,
    ):
        real.api = api
        site = _controlled_site(
            real,
            options.profile,
            guest.kubeconfig.absolute(),
            racks.nodes.nodes,
            make_stage=lambda: Stage(real, guest_control(racks.nodes, api)),
            cluster_steps=GUEST_STEPS,
        )
        async with served_control(site, home.path):
            _announce_site(home, options, real.service, announce)
            announce(f"rackloom: its trays join the cluster of {guest.kubeconfig}, at {client.base_url}")
            yield serving, racks.nodes.work, racks.controlling


async def freeze_after_start(nodes: TrayNodes) -> None:
    """Exclude the objects of the start from later garbage collections.

    With 1,800 nodes each full collection would stop REST for half a second, and find nothing.
    """
    await nodes.up.wait()
    await nodes.settle()
    freeze_loaded_objects()


def _announce_site(home: Home, options: UpOptions, site: EmbeddedSite, announce: Announce) -> None:
    announce(f"rackloom: {options.racks} x {options.profile} (simulated) at {site.url}, home {home.path}")
    token = shlex.join(
        ["rackloom", "token", "--home", str(home.path), "--org", PROVIDER_ORG, "--role", "TENANT_ADMIN"]
    )
    announce(f"rackloom: log {home.log}; for a token: {token}")
    carve = shlex.join(["rackloom", "partition", "create", "train", "--home", str(home.path)])
    announce(f"rackloom: to take machines, begin with: {carve}")
    link = site.sign_in_link(PROVIDER_ORG, PROVIDER_ROLES)
    announce(f"rackloom: the rack map, signed in (valid for {CODE_SECONDS / 60:.0f} minutes): {link}")
    if options.open_browser:
        _open_browser(home, link)


def _open_browser(home: Home, link: str) -> None:
    """Open the link by a file that only this user reads: arguments of a process are seen by all users."""
    page = home.path / "open-map.html"
    write_durably(page, f'<!doctype html><meta http-equiv="refresh" content="0; url={link}">'.encode())
    webbrowser.open(page.as_uri())
