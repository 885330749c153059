"""`rackloom controller`: the controllers of ComputeDomains, gangs and Kueue's checks, elected among replicas.

A Lease elects the replica that leads. `Leadership` runs the controllers for each term and starts every
term from a new listing of the cluster, so nothing of an earlier term is trusted. The client is limited to
400 requests per second with a burst of 2000: 300 ComputeDomains that are created together cause about
2000 writes.

The metrics endpoint reports `nvidia_dra_compute_domain_info` under the name that NVIDIA's driver uses,
counted anew at each scrape, so that it is right after a restart too. /healthz fails after a leader could
not follow the API server for 300 s, and kubelet then restarts it.

Channel isolation needs IMEX daemons that Rackloom runs, so it is refused together with hostManaged mode.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.responses import Response

from rackloom.app.listeners import (
    PlainEndpoints,
    metrics_response,
    ok_response,
    serve_http,
    unavailable_response,
)
from rackloom.app.process import (
    allow_open_files,
    freeze_loaded_objects,
    run_until_stopped,
    stop_on_signals,
)
from rackloom.claim.cluster.domain_controller import DomainController
from rackloom.claim.cluster.gang_controller import GangController, GangMetrics
from rackloom.claim.cluster.kueue_controller import KueueController
from rackloom.claim.kube.api import EventRecorder, KubeApi
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.leader import LeaderElection
from rackloom.core.cluster.domain_objects import Readiness, read_compute_domain_status
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, GANG_PLAN
from rackloom.core.cluster.projection import project_for_control
from rackloom.core.domains.settings import DEFAULT_NAMESPACE, ControllerSettings
from rackloom.core.gangs.snapshot import BesideKueue, GangSettings
from rackloom.errors import Refused
from rackloom.serving.limits import PROBES, Process, files_needed

# What runs while this process leads.


CONTROLLER_LEASE = "rackloom-controller"
"""Name of the Lease that says who leads, and of the process in events and at the API server."""


@dataclass(eq=False)
class Leadership:
    """Runs the controllers for each term in which this process leads."""

    api: KubeApi
    settings: ControllerSettings
    identity: str
    wall: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.Random)
    gang_settings: GangSettings = field(default_factory=GangSettings)
    kueue_checks: bool = False
    """Decide AdmissionChecks of Kueue too."""
    controller: DomainController | None = field(default=None, init=False)
    """The one at work; None while another process leads."""
    gangs: GangController | None = field(default=None, init=False)
    gang_metrics: GangMetrics = field(default_factory=GangMetrics, init=False)

    async def lead(self) -> None:
        """Control until cancelled. A new term starts from a new look at the cluster."""
        recorder = EventRecorder(self.api, CONTROLLER_LEASE, self.identity, self.wall)
        wall, rng = self.wall, self.rng
        self.controller = DomainController(self.api, self.settings, recorder, wall, rng)
        kueue = BesideKueue(has_plans=self.kueue_checks, quota=self.settings.quota)
        self.gangs = GangController(
            self.api, recorder, wall, rng, self.gang_settings, self.gang_metrics, kueue
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.controller.run())
                tasks.create_task(self.gangs.run())
                if self.kueue_checks:
                    checks = KueueController(self.api, wall, rng, self.gang_settings, self.gangs.caches)
                    tasks.create_task(checks.run())
        finally:
            self.controller = self.gangs = None


# Metrics and health.


BLIND_SECONDS = 300.0
"""A leader that could not follow the API server for so long is restarted."""


class ControllerEndpoints(PlainEndpoints):
    """An ASGI application: /metrics from what is known now, and /healthz."""

    def __init__(self, leadership: Leadership) -> None:
        super().__init__({"/metrics": self._metrics, "/healthz": self._health})
        self._leadership = leadership

    async def _metrics(self) -> Response:
        controller = self._leadership.controller
        registry = CollectorRegistry()
        leading = Gauge("rackloom_controller_leading", "1 while this process leads.", registry=registry)
        leading.set(0 if controller is None else 1)
        if controller is not None:
            _count_domains(controller, registry)
        gangs = self._leadership.gangs
        counted = self._leadership.gang_metrics.render(() if gangs is None else gangs.caches.all(GANG_PLAN))
        return metrics_response(generate_latest(registry) + counted)

    async def _health(self) -> Response:
        controller = self._leadership.controller
        since = None if controller is None else controller.caches.unknown_since()
        if since is not None and asyncio.get_running_loop().time() - since > BLIND_SECONDS:
            return unavailable_response("the API server could not be followed")
        return ok_response()


def _count_domains(controller: DomainController, registry: CollectorRegistry) -> None:
    """The gauge of NVIDIA's driver, under its name; counted afresh, so it is right after a restart too."""
    gauge = Gauge("nvidia_dra_compute_domain_info", "ComputeDomains.", ["status"], registry=registry)
    found = Counter(
        read_compute_domain_status(domain).status for domain in controller.caches.all(COMPUTE_DOMAIN)
    )
    for status in Readiness:
        gauge.labels(status.value).set(found[status])


# The process.


REQUESTS_PER_SECOND = 400.0
BURST = 2000
"""One process writes for the whole cluster: a morning's 300 ComputeDomains are about 2000 writes at once."""


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How this process runs."""

    identity: str
    """Name of the pod; with a random part it is this process's alone."""
    namespace: str = DEFAULT_NAMESPACE
    """Of this program: its Lease is there."""
    listen: str | None = None
    """`host:port` of /metrics and /healthz; None for none."""
    kubeconfig: Path | None = None
    context: str | None = None
    kueue_checks: bool = False


def run_controller(
    settings: ControllerSettings,
    gangs: GangSettings,
    options: ControllerOptions,
    announce: Callable[[str], None],
) -> None:
    """Control ComputeDomains and gangs until SIGTERM or SIGINT."""
    check_settings(settings)
    allow_open_files(files_needed(Process.CONTROLLER))
    asyncio.run(_run_controller(settings, gangs, options, announce))


def check_settings(settings: ControllerSettings) -> None:
    """Raise Refused for settings that contradict one another."""
    if settings.imex_mode is ImexMode.HOST_MANAGED and settings.isolation is ImexIsolation.CHANNEL:
        raise Refused(
            "channel isolation needs IMEX daemons of ours, and in hostManaged mode the host runs them",
            nearest_fix="use --mode driverManaged, or --isolation domain",
        )


async def _run_controller(
    settings: ControllerSettings,
    gangs: GangSettings,
    options: ControllerOptions,
    announce: Callable[[str], None],
) -> None:
    stopped = stop_on_signals()
    identity = f"{options.identity}-{uuid.uuid4()}"
    client = http_client(options.kubeconfig, options.context)
    client.headers["User-Agent"] = CONTROLLER_LEASE
    api = KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST), project_for_control)
    async with api, contextlib.AsyncExitStack() as stack:
        leadership = Leadership(
            api, settings, identity, gang_settings=gangs, kueue_checks=options.kueue_checks
        )
        if options.listen is not None:
            port = await stack.enter_async_context(
                serve_http(ControllerEndpoints(leadership), options.listen, limits=PROBES)
            )
            announce(f"rackloom: metrics on port {port}")
        rng = random.Random()  # noqa: S311
        election = LeaderElection(api, options.namespace, CONTROLLER_LEASE, identity, wall=time.time, rng=rng)
        freeze_loaded_objects()
        await run_until_stopped(stopped, election.run(leadership.lead))
