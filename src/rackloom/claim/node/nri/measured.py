"""How often a runtime asks, how long it waits for the answer, and how often that is a refusal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from rackloom.claim.node.nri.hooks import Hooks, Sandbox

EVENTS = ("synchronize", "run", "stop")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 5.0)
"""Seconds; a runtime waits two by default."""


class Measured:
    """Hooks that are counted and timed with `clock`, in seconds."""

    def __init__(self, hooks: Hooks, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._hooks = hooks
        self._clock = clock
        self._requests = Counter(
            "rackloom_nri_requests",
            "Requests of the container runtime",
            ("event", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "rackloom_nri_request_duration_seconds",
            "Time that the container runtime waits",
            ("event",),
            buckets=BUCKETS,
            registry=registry,
        )
        for event in EVENTS:
            self._seconds.labels(event)
            for outcome in ("done", "failed"):
                self._requests.labels(event, outcome)

    async def synchronize(self, living: tuple[Sandbox, ...]) -> None:
        """All sandboxes there are."""
        with self._request("synchronize"):
            await self._hooks.synchronize(living)

    async def run(self, sandbox: Sandbox) -> None:
        """One is being started."""
        with self._request("run"):
            await self._hooks.run(sandbox)

    async def stop(self, sandbox: Sandbox) -> None:
        """One is being stopped."""
        with self._request("stop"):
            await self._hooks.stop(sandbox)

    @contextmanager
    def _request(self, event: str) -> Iterator[None]:
        start, outcome = self._clock(), "failed"
        try:
            yield
            outcome = "done"
        finally:
            self._requests.labels(event, outcome).inc()
            self._seconds.labels(event).observe(self._clock() - start)
