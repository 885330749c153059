"""`rackloom controller`: ComputeDomains and gangs, controlled by one process, elected among its replicas."""

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from rackloom.app.listeners import listening
from rackloom.app.stopping import told_to_stop
from rackloom.claim.cluster.controller import Controller
from rackloom.claim.cluster.gang.controller import GangController
from rackloom.claim.cluster.gang.meter import GangMeter
from rackloom.claim.cluster.gang.planner import PlacePlanner
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.objects import Readiness, read_status
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN
from rackloom.claim.kube.leader import Election
from rackloom.claim.kube.lightkube_api import LightkubeApi
from rackloom.claim.kube.pace import Pace
from rackloom.errors import Refused

LEASE = "rackloom-controller"
REQUESTS_PER_SECOND = 400.0
BURST = 2000
"""One process writes for the whole cluster: a morning's 300 ComputeDomains are about 2000 writes at once."""
BLIND_SECONDS = 300.0
"""A leader that could not follow the API server for so long is restarted."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How this process runs."""

    identity: str
    """Name of the pod; with a random part it is this process's alone."""
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


class Leadership:
    """Runs the controllers for each term in which this process leads."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        identity: str,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._wall = wall
        self._rng = rng or random.Random()  # noqa: S311 (jitter)
        self._api = api
        self._settings = settings
        self._identity = identity
        self.controller: Controller | None = None
        """The one at work; None while another process leads."""
        self.gangs: GangController | None = None
        self.meter = GangMeter()

    async def lead(self) -> None:
        """Control until cancelled. A new term starts from a new look at the cluster."""
        recorder = Recorder(self._api, LEASE, self._identity, self._wall)
        wall, rng = self._wall, self._rng
        self.controller = Controller(self._api, self._settings, recorder, wall, rng)
        self.gangs = GangController(
            self._api, PlacePlanner(), recorder, wall, rng, self._settings.gangs, self.meter
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.controller.run())
                tasks.create_task(self.gangs.run())
        finally:
            self.controller = self.gangs = None


async def _run(settings: Settings, options: Options, announce: Callable[[str], None]) -> None:
    stopped = told_to_stop()
    identity = f"{options.identity}-{uuid.uuid4()}"
    client = http_client(options.kubeconfig, None)
    client.headers["User-Agent"] = LEASE
    api = LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST))
    async with api, contextlib.AsyncExitStack() as stack:
        leadership = Leadership(api, settings, identity)
        if options.listen is not None:
            port = await stack.enter_async_context(listening(Pages(leadership), options.listen))
            announce(f"rackloom: metrics on port {port}")
        rng = random.Random()  # noqa: S311
        election = Election(api, settings.namespace, LEASE, identity, wall=time.time, rng=rng)
        await _until(stopped, asyncio.create_task(election.run(leadership.lead)))


async def _until(stopped: asyncio.Event, work: "asyncio.Task[None]") -> None:
    """Let `work` go on until told to stop. Raises what it fails with."""
    waiting = asyncio.create_task(_wait(stopped))
    await asyncio.wait({waiting, work}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


class Pages:
    """An ASGI application: /metrics from what is known now, and /healthz."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        pages = {"/metrics": self._metrics, "/healthz": self._health}
        page = pages.get(Request(scope, receive).url.path)
        reply = PlainTextResponse("not found\n", 404) if page is None else page()
        await reply(scope, receive, send)

    def _metrics(self) -> Response:
        controller = self._leadership.controller
        registry = CollectorRegistry()
        leading = Gauge("rackloom_controller_leading", "1 while this process leads.", registry=registry)
        leading.set(0 if controller is None else 1)
        if controller is not None:
            _count_domains(controller, registry)
        gangs = self._leadership.gangs
        counted = self._leadership.meter.page(() if gangs is None else gangs.caches.plans())
        return Response(generate_latest(registry) + counted, media_type=CONTENT_TYPE_LATEST)

    def _health(self) -> Response:
        controller = self._leadership.controller
        since = None if controller is None else controller.caches.unknown_since()
        if since is not None and asyncio.get_running_loop().time() - since > BLIND_SECONDS:
            return PlainTextResponse("the API server could not be followed\n", 503)
        return PlainTextResponse("ok\n")


def _count_domains(controller: Controller, registry: CollectorRegistry) -> None:
    """The gauge of NVIDIA's driver, under its name; counted afresh, so it is right after a restart too."""
    gauge = Gauge("nvidia_dra_compute_domain_info", "ComputeDomains.", ["status"], registry=registry)
    found = Counter(read_status(one).status for one in controller.caches.all(COMPUTE_DOMAIN))
    for status in Readiness:
        gauge.labels(status.value).set(found[status])
