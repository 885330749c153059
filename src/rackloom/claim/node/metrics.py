"""Metrics of a plugin, under the names that dashboards for NVIDIA's DRA driver use.

All series exist with the value zero from the start, so that the first failure is a change and not a new
series. The gauge of prepared devices is computed from the checkpoint when the page is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState

OPERATIONS = ("prepare", "unprepare")
PREPARE_ERRORS = ("lock_acquire", "prepare_devices", "publish_resources")
UNPREPARE_ERRORS = ("lock_acquire", "unprepare_devices")
DURATION_BUCKETS = tuple(0.05 * 2**step for step in range(9))


class PluginMetrics:
    """Counters of one plugin on one node, whose devices are of `kinds`."""

    def __init__(self, driver: str, node: str, kinds: tuple[str, ...]) -> None:
        self.registry = registry = CollectorRegistry()
        self._driver = driver
        self._node = node
        self._kinds = kinds
        by_operation = ("driver", "operation")
        self._requests = Counter(
            "nvidia_dra_requests",
            "Requests of kubelet of which every claim succeeded",
            by_operation,
            registry=registry,
        )
        self._seconds = Histogram(
            "nvidia_dra_request_duration_seconds",
            "Time to answer kubelet",
            by_operation,
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._inflight = Gauge(
            "nvidia_dra_requests_inflight", "Requests being answered", by_operation, registry=registry
        )
        self._devices = Gauge(
            "nvidia_dra_prepared_devices",
            "Devices of claims that are prepared",
            ("node", "driver", "device_type"),
            registry=registry,
        )
        by_error = ("driver", "error_type")
        self._prepare_errors = Counter(
            "nvidia_dra_node_prepare_errors", "Claims not prepared", by_error, registry=registry
        )
        self._unprepare_errors = Counter(
            "nvidia_dra_node_unprepare_errors", "Claims not given back", by_error, registry=registry
        )
        self._seed()

    @contextmanager
    def request(self, operation: str) -> Iterator[None]:
        """Count and time one request while it is answered."""
        labels = (self._driver, operation)
        with self._inflight.labels(*labels).track_inprogress(), self._seconds.labels(*labels).time():
            yield

    def succeeded(self, operation: str) -> None:
        """A request was answered without an error of any claim."""
        self._requests.labels(self._driver, operation).inc()

    def failed(self, operation: str) -> None:
        """A claim was answered with an error."""
        errors = self._prepare_errors if operation == "prepare" else self._unprepare_errors
        errors.labels(self._driver, f"{operation}_devices").inc()

    def not_published(self) -> None:
        """The slices could not be brought up to date."""
        self._prepare_errors.labels(self._driver, "publish_resources").inc()

    def page(self, claims: Mapping[str, CheckpointEntry]) -> bytes:
        """The page that Prometheus reads; `claims` as the checkpoint has them."""
        completed = [entry for entry in claims.values() if entry.state is PrepareState.COMPLETED]
        found = [device.kind for entry in completed for device in entry.devices]
        for kind in self._kinds:
            self._devices.labels(self._node, self._driver, kind).set(found.count(kind))
        return generate_latest(self.registry)

    def _seed(self) -> None:
        for operation in OPERATIONS:
            for family in (self._requests, self._seconds, self._inflight):
                family.labels(self._driver, operation)
        for error in PREPARE_ERRORS:
            self._prepare_errors.labels(self._driver, error)
        for error in UNPREPARE_ERRORS:
            self._unprepare_errors.labels(self._driver, error)
