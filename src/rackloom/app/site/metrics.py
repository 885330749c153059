"""Prometheus metrics of the site service, and its endpoints /metrics, /healthz and /readyz.

Names that NVIDIA Infra Controller has begin with `<prefix>nvlink_partition_monitor_`, Rackloom's own with
`<prefix>nvlink_`. `nmxc` and `nmxm` are the two kinds of switch controllers. Both families exist
even if the site has only one. Series start with zero, so that the first failure is a change and not a new
series.

`SiteMetrics` has two inputs. The reconciler reports passes, observations, operations and refusals as they
happen. `record_counts` counts the records at each scrape. Series of a domain that is gone disappear.
Scrapes run one at a time: two at once would count the same transitions to Ready twice. /metrics also has the
findings of the newest examination (`app.doctor_metrics`): the map, /readyz and alerts show one list.

/readyz succeeds while the database answers, though a switch may be out of reach, or no reading can be
recorded: REST can then still answer that a domain is unknown. The page lists the findings of the newest
examination for which requests of tenants wait (`STOPS_SERVING`), each with its time.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import Response

from rackloom.app.doctor_metrics import registry_of
from rackloom.app.listeners import PlainEndpoints, metrics_response, ok_response
from rackloom.app.site import record_counts
from rackloom.app.site.record_counts import SiteCounts
from rackloom.carve.api.audit_middleware import UNAUTHENTICATED_REASONS
from rackloom.carve.api.limits import CallerClass
from rackloom.carve.fabric.controller import ControllerKind
from rackloom.carve.reconcile.domain_pass import OperationOutcome, ReconcileMetrics
from rackloom.carve.store.database import Store
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.report import rfc3339
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainObservation,
    PartitionOperation,
    RemoveGpus,
)
from rackloom.serving.acceptor import END_REASONS, ConnectionEnded
from rackloom.web.model import SiteMap

# The series.


OPERATIONS: Final = ("create", "update", "remove", "remove_default_partition")
STATUSES: Final = {"done": "completed", "refused": "failed", "unknown": "timedout"}
KNOWN_ERRORS: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "client")
"""Errors with series that exist from the start. Any other error makes its series when it first occurs."""
MAX_ERROR_LABEL = 32
"""Characters of the `error` label, as upstream."""

_MILLISECOND_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000)
_SECOND_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_FAILED_RPC = re.compile(r"(\w+): (?:([A-Z_]+): )?")


class _ControllerSeries:
    """The series of one kind of controller."""

    def __init__(self, kind: str, base: str, registry: CollectorRegistry) -> None:
        self.op_latency = Histogram(
            f"{base}{kind}_op_latency_milliseconds",
            "Time of one operation at the controller",
            ("operation", "status"),
            buckets=_MILLISECOND_BUCKETS,
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
        self.observed = {
            name: Gauge(f"{base}{kind}_{name}_count", about, labels, registry=registry)
            for name, about in (
                ("partition", "Partitions as observed"),
                ("gpu", "GPUs as observed"),
                ("compute_node", "Compute nodes by their GPUs"),
            )
        }
        for error in KNOWN_ERRORS:
            self.connect_errors.labels(error)
        for operation in OPERATIONS:
            for status in STATUSES.values():
                self.changes.labels(operation, status)
                self.op_latency.labels(operation, status)


class SiteMetrics(ReconcileMetrics):
    """The metrics of the reconciler, and the counts of the records at the time of a scrape."""

    def __init__(self, prefix: str) -> None:
        self.registry = registry = CollectorRegistry()
        base, ours = f"{prefix}nvlink_partition_monitor_", f"{prefix}nvlink_"
        self.nmxc = _ControllerSeries("nmxc", base, registry)
        self.nmxm = _ControllerSeries("nmxm", base, registry)
        self._kinds: dict[str, ControllerKind] = {}

        def milliseconds(name: str, about: str) -> Histogram:
            return Histogram(
                f"{base}{name}_milliseconds", about, buckets=_MILLISECOND_BUCKETS, registry=registry
            )

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"{ours}{name}", about, labels, registry=registry)

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
            buckets=_SECOND_BUCKETS,
            registry=registry,
        )
        self.age = gauge(
            f"{ours}observation_age_seconds", "Age of the newest observation", "nvlink_domain_uuid"
        )
        self.multicast_groups = gauge(
            f"{ours}multicast_groups", "Used multicast groups, and their limit", "nvlink_domain_uuid", "state"
        )
        self.endpoints = gauge(f"{ours}endpoints", "Switch controllers by what is known of them", "state")
        self.disputed = gauge(
            f"{ours}disputed_domains", "Domains whose switch controllers contradict one another"
        )
        self.key_age = gauge(
            f"{ours}issuer_keys_age_seconds", "Time since the signing keys of an issuer were read", "issuer"
        )
        self.drift = counter(
            "drift_operations", "Operations that undid a change which was not ours", "nvlink_domain_uuid"
        )
        self.refusals = counter("refused_plans", "Plans that no longer held when they were checked")
        self.refused_requests = counter(
            "refused_requests", "REST requests answered with 429, by the class of their caller", "caller"
        )
        for kind in CallerClass:
            self.refused_requests.labels(kind)
        self.unauthenticated = counter(
            "unauthenticated_requests",
            "REST requests without a valid token of their organisation, by what was wrong",
            "why",
        )
        for why in UNAUTHENTICATED_REASONS:
            self.unauthenticated.labels(why)
        self.audited_refusals = counter(
            "refused_by_result",
            "Requests of known callers that were refused, by interface and result",
            "channel",
            "result",
        )
        self.ended = counter(
            "connections_ended", "Connections that a limit refused or closed", "listener", "why"
        )

    def watch_issuer(self, issuer: str, key_age: Callable[[], float]) -> None:
        """Show the age of an issuer's signing keys, in seconds, at each scrape."""
        self.key_age.labels(issuer).set_function(key_age)

    def connections_ended(self, listener: str) -> ConnectionEnded:
        """Counts the connections of a listener that a limit ends, with all reasons from zero."""
        for why in END_REASONS:
            self.ended.labels(listener, why)
        return lambda why: self.ended.labels(listener, why).inc()

    def set_kind(self, endpoint_id: str, kind: ControllerKind) -> None:
        """Count this endpoint for this kind of controller."""
        self._kinds[endpoint_id] = kind

    def passed(self, _endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""
        self.iteration.observe(seconds * 1000)

    def observed(self, _endpoint_id: str, observation: DomainObservation) -> None:
        """An endpoint was read."""
        self.machine_updates.set(len({(gpu.chassis_serial, gpu.slot) for gpu in observation.gpus}))
        self.drift.labels(observation.domain)

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """An endpoint could not be read. Counted as a connect error if it did not get beyond Hello."""
        error = connect_error(reason)
        if error is not None:
            self._series_of(endpoint_id).connect_errors.labels(error).inc()

    def drifted(self, domain: str, operations: int) -> None:
        """A domain differs from an intent that it met before."""
        self.drift.labels(domain).inc(operations)

    def refused(self, _domain: str) -> None:
        """A plan was refused."""
        self.refusals.inc()

    def refused_request(self, kind: CallerClass) -> None:
        """A REST request was refused because too many of its organisation wait."""
        self.refused_requests.labels(kind).inc()

    def unauthenticated_request(self, why: str) -> None:
        """A REST request had no valid token of its organisation."""
        self.unauthenticated.labels(why).inc()

    def audited_refusal(self, channel: str, result: str) -> None:
        """A request of a known caller was refused."""
        self.audited_refusals.labels(channel, result).inc()

    def operated(
        self, endpoint_id: str, operation: PartitionOperation, outcome: OperationOutcome, seconds: float
    ) -> None:
        """An operation was requested."""
        labels = (_operation_name(operation), STATUSES[outcome.state])
        controllers = self._series_of(endpoint_id)
        controllers.changes.labels(*labels).inc()
        controllers.op_latency.labels(*labels).observe(seconds * 1000)

    def applied(self, _domain: str, seconds: float) -> None:
        """All operations of a plan were requested."""
        self.apply.observe(seconds * 1000)

    def page(self, counts: SiteCounts, now: float) -> bytes:
        """The page that Prometheus reads, with the present `counts`. `now` is seconds since the epoch."""
        self.logical.set(counts.logical_partitions)
        self.physical.set(counts.physical_partitions)
        for state, number in counts.endpoints.items():
            self.endpoints.labels(state).set(number)
        self.disputed.set(counts.disputed_domains)
        # The series of a domain that is gone must disappear.
        for gauge in (self.age, self.multicast_groups):
            gauge.clear()
        for controllers in (self.nmxc, self.nmxm):
            for gauge in controllers.observed.values():
                gauge.clear()
        for domain in counts.domains:
            self.age.labels(domain.uuid).set(max(0.0, now - domain.observed_at))
            for state, number in domain.multicast_groups.items():
                self.multicast_groups.labels(domain.uuid, state).set(number)
            numbers = {"partition": domain.partitions, "gpu": domain.gpus, "compute_node": domain.nodes}
            for name, by_health in numbers.items():
                for health, number in by_health.items():
                    self._family(domain.kind).observed[name].labels(domain.uuid, health).set(number)
        for seconds in counts.ready_seconds:
            self.ready.observe(seconds)
        return generate_latest(self.registry)

    def _series_of(self, endpoint_id: str) -> _ControllerSeries:
        return self._family(self._kinds.get(endpoint_id, ControllerKind.NMX_C))

    def _family(self, kind: ControllerKind) -> _ControllerSeries:
        return self.nmxm if kind is ControllerKind.NMX_M else self.nmxc


def connect_error(reason: str) -> str | None:
    """The `error` label of a failed Hello, or None for a failure after it."""
    failure = _FAILED_RPC.match(reason)
    if failure is None:
        return "client"
    rpc, code = failure.groups()
    return (code or "bad-hello")[:MAX_ERROR_LABEL] if rpc == "Hello" else None


def _operation_name(operation: PartitionOperation) -> str:
    match operation:
        case CreatePartition():
            return "create"
        case AddGpus():
            return "update"
        case RemoveGpus() | DeletePartition():
            is_default = operation.partition_id == DEFAULT_PARTITION_ID
            return "remove_default_partition" if is_default else "remove"


# The endpoints.


STOPS_SERVING: Final = (Check.LAYER, Check.CONTROLLER, Check.CONTROLLER_AWAY, Check.DOMAIN_PAUSED)
"""Checks with findings that show that requests of tenants wait, in a domain or in the whole site."""


class MetricsEndpoints(PlainEndpoints):
    """ASGI application of /metrics, /healthz and /readyz."""

    def __init__(
        self,
        metrics: SiteMetrics,
        store: Store,
        clock: Callable[[], float],
        valid_seconds: float,
    ) -> None:
        """`valid_seconds` is the age at which a reading of a switch controller is outdated."""
        super().__init__({"/metrics": self._page, "/healthz": self._alive, "/readyz": self._ready})
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._valid_seconds = valid_seconds
        self.site: Callable[[], SiteMap] = lambda: SiteMap(at=0.0)
        """The newest reading of the site. Without findings, it was not examined yet."""
        self._history = 0
        # Two scrapes at once would count the same transitions to Ready twice.
        self._scrape_lock = asyncio.Lock()

    async def begin(self) -> None:
        """Count transitions to Ready from now on."""
        self._history = await self._store.read(record_counts.newest_history_entry)

    async def _page(self) -> Response:
        async with self._scrape_lock:
            now = self._clock()
            valid_from = now - self._valid_seconds
            counts = await self._store.read(record_counts.count_site_records, self._history, valid_from)
            self._history = counts.newest_history
            page = self._metrics.page(counts, now)
        site = self.site()
        if site.findings is not None:
            at = site.at if site.examined_at is None else site.examined_at
            page += generate_latest(registry_of(at, site.layers, site.domains.values(), site.findings))
        return metrics_response(page)

    async def _alive(self) -> Response:
        return ok_response()

    async def _ready(self) -> Response:
        """Ready when the records can be read, though they may say that a domain is unknown."""
        await self._store.read(record_counts.newest_history_entry)
        found = self.site().findings
        if found is None:
            return ok_response("the site was not examined yet")
        stopped = (finding for finding in found if finding.check in STOPS_SERVING)
        return ok_response(*map(_readiness_line, stopped))


def _readiness_line(finding: Finding) -> str:
    since = "" if finding.since is None else f" since {rfc3339(finding.since)}"
    return f"{finding.subject}: {finding.severity}{since}: {finding.message}"
