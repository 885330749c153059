"""The simulated switch controllers of a benchmark, in processes of their own: real NMX-C over real sockets.

Their CPU time and their memory are thus no part of what is measured of the control plane. A gRPC server
takes some four file descriptors, so no process has more than `MOST_PER_PROCESS` controllers.
"""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop

from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile, RackSite, build_site

SEED = "benchmark"
MOST_PER_PROCESS = 1_250


def profile() -> RackProfile:
    """18 trays of 4 GPUs: one domain is one rack."""
    return profiles.load_rack("gb200-nvl72")


def racks(domains: int) -> RackSite:
    """The site that the controllers serve."""
    return build_site(profile(), domains, SeededNames(SEED))


@asynccontextmanager
async def switches(domains: int) -> AsyncIterator[dict[str, str]]:
    """Domain uuid to the URL of its controller, all listening on loopback until the context ends."""
    allow_many_files()
    endpoints: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for first in range(0, domains, MOST_PER_PROCESS):
            span = first, min(first + MOST_PER_PROCESS, domains)
            endpoints |= await stack.enter_async_context(_controllers(domains, span))
        yield endpoints


@asynccontextmanager
async def _controllers(domains: int, span: tuple[int, int]) -> AsyncIterator[dict[str, str]]:
    """A process with the controllers of the domains in `span` (the end is not in it)."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(domains, span, theirs))
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(ours.recv)
    finally:
        ours.close()
        await asyncio.to_thread(process.join)


def allow_many_files() -> None:
    """Two sockets a domain are more than many machines allow by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve(domains: int, span: tuple[int, int], parent: Connection) -> None:
    allow_many_files()
    uvloop.run(_serve_until_closed(domains, span, parent))


async def _serve_until_closed(domains: int, span: tuple[int, int], parent: Connection) -> None:
    async with AsyncExitStack() as stack:
        urls = {}
        for fabric in fabrics_of(racks(domains), SEED)[slice(*span)]:
            urls[fabric.domain] = (await stack.enter_async_context(NmxcServer(fabric))).url
        parent.send(urls)
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent.fileno(), closed.set)
        await closed.wait()
