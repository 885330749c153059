"""Prometheus metrics of the site service.

Upstream's names begin with `<prefix>nvlink_partition_monitor_`, ours with `<prefix>nvlink_`.

Series are there from the start with zero, so that the first failure is a change and not a new series.
`nmxc` and `nmxm` are the two kinds of controllers; both families exist whichever the site has.
"""

import re
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.app.site_counts import SiteCounts
from rackloom.carve.plan.values import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    Observation,
    Operation,
    RemoveGpus,
)
from rackloom.carve.reconcile.meter import Outcome
from rackloom.carve.site.controllers import ControllerKind

OPERATIONS: Final = ("create", "update", "remove", "remove_default_partition")
STATUSES: Final = {"done": "completed", "refused": "failed", "unknown": "timedout"}
KNOWN_ERRORS: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "client")
"""Errors that are seeded; another one makes its own series when it first comes."""
MAX_ERROR = 32
"""Characters of the `error` label, as upstream."""

_MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000)
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_SAID = re.compile(r"(\w+): (?:([A-Z_]+): )?")


class _Controllers:
    """The series of one kind of controller."""

    def __init__(self, kind: str, base: str, registry: CollectorRegistry) -> None:
        self.op_latency = Histogram(
            f"{base}{kind}_op_latency_milliseconds",
            "Time of one operation at the controller",
            ("operation", "status"),
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.changes = Counter(
            f"{base}{kind}_changes_applied",
            "Operations by outcome",
            ("operation", "status"),
            registry=registry,
        )
        self.connect_errors = Gauge(
            f"{base}{kind}_connect_error_count",
            "Failed attempts to say hello since the start; it only grows",
            ("error",),
            registry=registry,
        )
        labels = ("nvlink_domain_uuid", "health")
        self.partitions = Gauge(
            f"{base}{kind}_partition_count", "Partitions as observed", labels, registry=registry
        )
        self.gpus = Gauge(f"{base}{kind}_gpu_count", "GPUs as observed", labels, registry=registry)
        self.nodes = Gauge(
            f"{base}{kind}_compute_node_count", "Compute nodes by their GPUs", labels, registry=registry
        )
        for error in KNOWN_ERRORS:
            self.connect_errors.labels(error)
        for operation in OPERATIONS:
            for status in STATUSES.values():
                self.changes.labels(operation, status)
                self.op_latency.labels(operation, status)


class SiteMetrics:
    """The `Meter` of the reconciler, and the counts of the records at the time of a scrape."""

    def __init__(self, prefix: str) -> None:
        self.registry = registry = CollectorRegistry()
        base, ours = f"{prefix}nvlink_partition_monitor_", f"{prefix}nvlink_"
        self.nmxc = _Controllers("nmxc", base, registry)
        self.nmxm = _Controllers("nmxm", base, registry)
        self._kinds: dict[str, ControllerKind] = {}

        def milliseconds(name: str, about: str) -> Histogram:
            return Histogram(f"{base}{name}_milliseconds", about, buckets=_MILLISECONDS, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        self.iteration = milliseconds("iteration_latency", "Time of one pass over a domain")
        self.apply = milliseconds("nvlink_config_apply_latency", "Time to carry out one plan")
        self.machine_updates = gauge(
            f"{base}machine_status_updates_count", "Machines that the last observation told of"
        )
        self.logical = gauge(f"{base}num_logical_partitions", "Logical partitions")
        self.physical = gauge(f"{base}num_physical_partitions", "Partitions that the site has made")
        self.ready = Histogram(
            f"{ours}instance_ready_seconds",
            "From an API call that changed what an instance wants to Ready",
            buckets=_SECONDS,
            registry=registry,
        )
        self.age = gauge(
            f"{ours}observation_age_seconds", "Age of the newest observation", "nvlink_domain_uuid"
        )
        self.endpoints = gauge(f"{ours}endpoints", "Switch controllers by what is known of them", "state")
        self.disputed = gauge(
            f"{ours}disputed_domains", "Domains whose switch controllers contradict one another"
        )
        self.drift = Counter(
            f"{ours}drift_operations",
            "Operations that undid a change which was not ours",
            ("nvlink_domain_uuid",),
            registry=registry,
        )
        self.refusals = Counter(
            f"{ours}refused_plans", "Plans that no longer held when they were checked", registry=registry
        )

    def speaks(self, endpoint_id: str, kind: ControllerKind) -> None:
        """What comes from this endpoint is counted for this kind of controller."""
        self._kinds[endpoint_id] = kind

    def passed(self, _endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""
        self.iteration.observe(seconds * 1000)

    def observed(self, _endpoint_id: str, observation: Observation) -> None:
        """An endpoint was read."""
        self.machine_updates.set(len({(gpu.chassis_serial, gpu.slot) for gpu in observation.gpus}))
        self.drift.labels(observation.domain)

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """An endpoint could not be read; counted as a connect error when it did not get beyond Hello."""
        error = connect_error(reason)
        if error is not None:
            self._of(endpoint_id).connect_errors.labels(error).inc()

    def drifted(self, domain: str, operations: int) -> None:
        """A domain differs from an intent that it was once seen to meet."""
        self.drift.labels(domain).inc(operations)

    def refused(self, _domain: str) -> None:
        """A plan was refused."""
        self.refusals.inc()

    def operated(self, endpoint_id: str, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """An operation was asked for."""
        labels = (_name(operation), STATUSES[outcome.state])
        controllers = self._of(endpoint_id)
        controllers.changes.labels(*labels).inc()
        controllers.op_latency.labels(*labels).observe(seconds * 1000)

    def applied(self, _domain: str, seconds: float) -> None:
        """All operations of a plan were asked for."""
        self.apply.observe(seconds * 1000)

    def page(self, counts: SiteCounts, now: float) -> bytes:
        """The page that Prometheus reads. `counts` are of this moment; `now` is seconds since the epoch."""
        self.logical.set(counts.logical_partitions)
        self.physical.set(counts.physical_partitions)
        for state, number in counts.endpoints.items():
            self.endpoints.labels(state).set(number)
        self.disputed.set(counts.disputed_domains)
        # A domain that is gone must not leave its last numbers behind.
        self.age.clear()
        for controllers in (self.nmxc, self.nmxm):
            controllers.partitions.clear()
            controllers.gpus.clear()
            controllers.nodes.clear()
        for domain in counts.domains:
            self.age.labels(domain.uuid).set(max(0.0, now - domain.observed_at))
            controllers = self._family(domain.kind)
            for health, number in domain.partitions.items():
                controllers.partitions.labels(domain.uuid, health).set(number)
            for health, number in domain.gpus.items():
                controllers.gpus.labels(domain.uuid, health).set(number)
            for health, number in domain.nodes.items():
                controllers.nodes.labels(domain.uuid, health).set(number)
        for seconds in counts.ready_seconds:
            self.ready.observe(seconds)
        return generate_latest(self.registry)

    def _of(self, endpoint_id: str) -> _Controllers:
        return self._family(self._kinds.get(endpoint_id, ControllerKind.NMX_C))

    def _family(self, kind: ControllerKind) -> _Controllers:
        return self.nmxm if kind is ControllerKind.NMX_M else self.nmxc


def connect_error(reason: str) -> str | None:
    """The label of a failure to say hello; None for a failure after it."""
    said = _SAID.match(reason)
    if said is None:
        return "client"
    rpc, code = said.groups()
    return (code or "bad-hello")[:MAX_ERROR] if rpc == "Hello" else None


def _name(operation: Operation) -> str:
    match operation:
        case CreatePartition():
            return "create"
        case AddGpus():
            return "update"
        case RemoveGpus() | DeletePartition():
            is_default = operation.partition_id == DEFAULT_PARTITION_ID
            return "remove_default_partition" if is_default else "remove"
