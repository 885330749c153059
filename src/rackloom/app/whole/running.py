"""`rackloom up` as a process."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.collecting import spare_what_is_loaded
from rackloom.app.embedded import Embedded, embedded_site
from rackloom.app.home import Home
from rackloom.app.stopping import told_to_stop
from rackloom.app.taking_turns import take_short_turns
from rackloom.app.whole.cluster import twin_nodes
from rackloom.app.whole.site import whole_site
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.lightkube_api import LightkubeApi
from rackloom.claim.kube.pace import Pace
from rackloom.twin.nodes.trays import Nodes

REQUESTS_PER_SECOND, BURST = 400.0, 2000
"""At an API server of others: one process speaks for all kubelets and plugins."""
Say = Callable[[str], None]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    port: int
    racks: int
    profile: str
    kubeconfig: Path | None = None
    """A real cluster for the trays; None: one of their own."""


def run_up(home: Home, wanted: Wanted, announce: Say) -> None:
    """Run a site in `home` until SIGTERM or SIGINT; `announce` hears where it listens once it answers."""
    import uvloop

    take_short_turns()
    uvloop.run(_until_stopped(home, wanted, announce))


async def _until_stopped(home: Home, wanted: Wanted, announce: Say) -> None:
    stopped = told_to_stop()
    async with (
        _own_cluster(home, wanted, announce)
        if wanted.kubeconfig is None
        else _cluster_of_others(home, wanted, wanted.kubeconfig, announce) as work
    ):
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait((waiting, *work), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in work:
            if task.done():
                task.result()


@asynccontextmanager
async def _own_cluster(
    home: Home, wanted: Wanted, announce: Say
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    site = whole_site(home, port=wanted.port, racks=wanted.racks, profile=wanted.profile)
    async with site as whole:
        _announce(home, wanted, whole.site, announce)
        announce(f"rackloom: its trays as nodes: kubectl --kubeconfig {whole.kubeconfig} get nodes")
        freezing = asyncio.create_task(freeze_when_up(whole.nodes))
        yield whole.site.reconciling, whole.cluster.work
        freezing.cancel()


@asynccontextmanager
async def _cluster_of_others(
    home: Home, wanted: Wanted, kubeconfig: Path, announce: Say
) -> AsyncIterator["tuple[asyncio.Task[None], ...]"]:
    async with AsyncExitStack() as stack:
        client = http_client(kubeconfig, None)
        client.headers["User-Agent"] = "rackloom-twin"
        api = await stack.enter_async_context(LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST)))
        site = await stack.enter_async_context(
            embedded_site(home, port=wanted.port, racks=wanted.racks, profile=wanted.profile)
        )
        work = await stack.enter_async_context(twin_nodes(site.twin, home.twin / "cluster", api))
        _announce(home, wanted, site, announce)
        announce(f"rackloom: its trays join the cluster of {kubeconfig}")
        yield site.reconciling, work


async def freeze_when_up(nodes: Nodes) -> None:
    """Leave what a start has made out of later garbage collections.

    With 1,800 nodes each full collection would stop REST for half a second, and find nothing.
    """
    await nodes.up.wait()
    await nodes.settle()
    spare_what_is_loaded()


def _announce(home: Home, wanted: Wanted, site: Embedded, announce: Say) -> None:
    announce(f"rackloom: {wanted.racks} x {wanted.profile} (simulated) at {site.url}, home {home.path}")
    token = shlex.join(
        ["rackloom", "token", "--home", str(home.path), "--org", "demo", "--role", "TENANT_ADMIN"]
    )
    announce(f"rackloom: log {home.log}; for a token: {token}")
