"""`rackloom controller`: ComputeDomains and gangs, controlled by one process, elected among its replicas."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from rackloom.app.controller_pages import ControllerPages
from rackloom.app.leadership import LEASE, Leadership
from rackloom.app.listeners import listening
from rackloom.app.stopping import told_to_stop, work_until
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE, Settings
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.leader import Election
from rackloom.claim.kube.lightkube_api import LightkubeApi
from rackloom.claim.kube.pace import Pace
from rackloom.errors import Refused

REQUESTS_PER_SECOND = 400.0
BURST = 2000
"""One process writes for the whole cluster: a morning's 300 ComputeDomains are about 2000 writes at once."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How this process runs."""

    identity: str
    """Name of the pod; with a random part it is this process's alone."""
    namespace: str = DEFAULT_NAMESPACE
    """Of this program: its Lease is there."""
    listen: str | None = None
    """`host:port` of /metrics and /healthz; None for none."""
    kubeconfig: Path | None = None


def run_controller(settings: Settings, options: Options, announce: Callable[[str], None]) -> None:
    """Control ComputeDomains and gangs until SIGTERM or SIGINT."""
    check_supported(settings)
    asyncio.run(_run(settings, options, announce))


def check_supported(settings: Settings) -> None:
    """Raise Refused for settings that contradict one another."""
    if settings.imex_mode is ImexMode.HOST_MANAGED and settings.isolation is Isolation.CHANNEL:
        raise Refused(
            "channel isolation needs IMEX daemons of ours, and in hostManaged mode the host runs them",
            nearest_fix="use --mode driverManaged, or --isolation domain",
        )


async def _run(settings: Settings, options: Options, announce: Callable[[str], None]) -> None:
    stopped = told_to_stop()
    identity = f"{options.identity}-{uuid.uuid4()}"
    client = http_client(options.kubeconfig, None)
    client.headers["User-Agent"] = LEASE
    api = LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST))
    async with api, contextlib.AsyncExitStack() as stack:
        leadership = Leadership(api, settings, identity)
        if options.listen is not None:
            port = await stack.enter_async_context(listening(ControllerPages(leadership), options.listen))
            announce(f"rackloom: metrics on port {port}")
        rng = random.Random()  # noqa: S311
        election = Election(api, options.namespace, LEASE, identity, wall=time.time, rng=rng)
        await work_until(stopped, election.run(leadership.lead))
