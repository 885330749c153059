"""The pages of the controllers' process: /metrics from what is known now, and /healthz."""

import asyncio
from collections import Counter

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.responses import Response

from rackloom.app.leadership import Leadership
from rackloom.app.plain_pages import PlainPages, metrics, unwell, well
from rackloom.claim.cluster.controller import Controller
from rackloom.claim.domain.objects import Readiness, read_status
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN

BLIND_SECONDS = 300.0
"""A leader that could not follow the API server for so long is restarted."""


class ControllerPages(PlainPages):
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
        counted = self._leadership.meter.page(() if gangs is None else gangs.caches.plans())
        return metrics(generate_latest(registry) + counted)

    async def _health(self) -> Response:
        controller = self._leadership.controller
        since = None if controller is None else controller.caches.unknown_since()
        if since is not None and asyncio.get_running_loop().time() - since > BLIND_SECONDS:
            return unwell("the API server could not be followed")
        return well()


def _count_domains(controller: Controller, registry: CollectorRegistry) -> None:
    """The gauge of NVIDIA's driver, under its name; counted afresh, so it is right after a restart too."""
    gauge = Gauge("nvidia_dra_compute_domain_info", "ComputeDomains.", ["status"], registry=registry)
    found = Counter(read_status(one).status for one in controller.caches.all(COMPUTE_DOMAIN))
    for status in Readiness:
        gauge.labels(status.value).set(found[status])
