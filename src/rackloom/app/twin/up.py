"""`rackloom up`: the whole twin in one process, for as long as it runs.

`running_twin` joins the embedded site, the cluster of its trays and an API server on loopback. A home
remembers the site; the cluster starts empty each time, and its nodes appear one after another. The rack
map reads the cluster in the same process.

The API server is served with TLS under an authority of its own, because client-go sends no token without
TLS. The kubeconfig (mode 0600) exists for as long as the server does.

With a kubeconfig of a real cluster, the trays join that cluster as nodes in place of a simulated one.

`freeze_after_start` takes what a start has made out of later garbage collections: with 1,800 nodes each
full collection would stop REST for half a second and find nothing.
"""

import asyncio
import base64
import secrets
import shlex
import ssl
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.home import Home
from rackloom.app.listeners import serve_http
from rackloom.app.process import (
    allow_open_files,
    background_task,
    freeze_loaded_objects,
    shorten_switch_interval,
    stop_on_signals,
    wait_stopped_or_ended,
)
from rackloom.app.tracing import TraceSettings, open_traces
from rackloom.app.twin.cluster import ADMIN_USER, TwinCluster, twin_cluster, twin_nodes
from rackloom.app.twin.site import EmbeddedSite, embedded_site
from rackloom.app.webhook import load_identity
from rackloom.claim.cluster.certificates import issue_certificate, new_authority
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.core.kubernetes.objects import LEASE, Object, ResourceKind
from rackloom.durable_files import write_durably
from rackloom.lab.kube.direct import DirectApi, SharedReadApi
from rackloom.lab.kube.kubectl.serving import KubeApplication
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.trays import TrayNodes
from rackloom.lab.switches.fabric import SimulatedFabric
from rackloom.limits import SIMULATED_API_SERVER, Process, files_needed
from rackloom.traces import NO_TRACES, Traces
from rackloom.web.sign_in_codes import CODE_SECONDS

# Access to the simulated API server for kubectl and the doctor.


LOOPBACK, SERVER_NAME = "127.0.0.1", "localhost"
CLUSTER_NAME = "rackloom-twin"


@asynccontextmanager
async def served_api(kube: FakeKube, user: str, kubeconfig: Path) -> AsyncIterator[str]:
    """Serve `kube` on loopback; gives its URL. `kubeconfig` (0600) is there for as long.

    With TLS, under an authority of its own: client-go sends no token without.
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

    site: EmbeddedSite
    cluster: TwinCluster
    api: KubeApi
    """The API client of the administrator."""
    kubeconfig: Path

    @property
    def nodes(self) -> TrayNodes:
        """The trays as nodes."""
        return self.cluster.nodes

    @property
    def fabrics(self) -> Mapping[str, SimulatedFabric]:
        """What the switches have, by domain."""
        return {domain: server.fabric for domain, server in self.site.twin.servers.items()}


@asynccontextmanager
async def running_twin(
    home: Home, *, port: int, racks: int, profile: str, traces: Traces = NO_TRACES
) -> AsyncIterator[RunningTwin]:
    """A twin that answers while the context is entered. Its nodes appear one after the other from then on.

    `nodes.up` is set once all are there. The site is what `home` remembers; the cluster starts empty.
    """
    kubeconfig = home.path / "kubeconfig"
    async with (
        embedded_site(home, port=port, racks=racks, profile=profile, traces=traces) as site,
        twin_cluster(site.twin, home.twin / "cluster") as cluster,
        served_api(cluster.kube, ADMIN_USER, kubeconfig),
    ):
        site.source.cluster = SharedReadApi(cluster.kube, "rack-map")
        site.source.cluster_version = _change_counter(cluster.kube)
        yield RunningTwin(
            site=site, cluster=cluster, api=DirectApi(cluster.kube, ADMIN_USER), kubeconfig=kubeconfig
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
"""Client-side limits at a real API server, where one process acts for all kubelets and plugins."""
Announce = Callable[[str], None]


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    port: int
    racks: int
    profile: str
    kubeconfig: Path | None = None
    """A real cluster for the trays; None: one of their own."""
    open_browser: bool = False
    """Whether to show the rack map once it answers, signed in as the provider."""
    traces: str | None = None
    """URL of the collector of spans; None: no spans."""


def run_up(
    home: Home,
    options: UpOptions,
    announce: Announce,
    accompany: Callable[[RunningTwin], Coroutine[None, None, None]] | None = None,
) -> None:
    """Run a site in `home` until SIGTERM or SIGINT; `announce` gets its addresses once it answers.

    `accompany` runs beside a simulated cluster, until it ends or the site does.
    """
    import uvloop

    allow_open_files(files_needed(Process.UP, racks=options.racks))
    shorten_switch_interval()
    uvloop.run(_run_until_signal(home, options, announce, accompany))


async def _run_until_signal(
    home: Home,
    options: UpOptions,
    announce: Announce,
    accompany: Callable[[RunningTwin], Coroutine[None, None, None]] | None,
) -> None:
    stopped = stop_on_signals()
    sent = None if options.traces is None else TraceSettings(endpoint=options.traces, instance=str(home.path))
    async with (
        open_traces(sent) as traces,
        _with_simulated_cluster(home, options, traces, announce, accompany)
        if options.kubeconfig is None
        else _with_real_cluster(home, options, options.kubeconfig, traces, announce) as work,
    ):
        await wait_stopped_or_ended(stopped, *work)
        for task in work:
            if task.done():
                task.result()


@asynccontextmanager
async def _with_simulated_cluster(
    home: Home,
    options: UpOptions,
    traces: Traces,
    announce: Announce,
    accompany: Callable[[RunningTwin], Coroutine[None, None, None]] | None,
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    site = running_twin(home, port=options.port, racks=options.racks, profile=options.profile, traces=traces)
    async with site as twin:
        _announce_site(home, options, twin.site, announce)
        announce(f"rackloom: its trays as nodes: kubectl --kubeconfig {twin.kubeconfig} get nodes")
        async with background_task(freeze_after_start(twin.nodes)):
            if accompany is None:
                yield twin.site.reconciling, twin.cluster.work
                return
            async with background_task(accompany(twin)):
                yield twin.site.reconciling, twin.cluster.work


@asynccontextmanager
async def _with_real_cluster(
    home: Home, options: UpOptions, kubeconfig: Path, traces: Traces, announce: Announce
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    client = http_client(kubeconfig, None)
    client.headers["User-Agent"] = "rackloom-twin"
    site_on = embedded_site(
        home, port=options.port, racks=options.racks, profile=options.profile, traces=traces
    )
    async with (
        KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST)) as api,
        site_on as site,
        twin_nodes(site.twin, home.twin / "cluster", api) as work,
    ):
        _announce_site(home, options, site, announce)
        announce(f"rackloom: its trays join the cluster of {kubeconfig}")
        yield site.reconciling, work


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
