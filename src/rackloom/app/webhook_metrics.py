"""What Prometheus is told of the webhook: questions, what decided them, and the certificate's end."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.claim.cluster.admission.reviews import Verdict

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The API server waits for five."""


class WebhookMetrics:
    """Counts of one process. `expires`: when its certificate ends (seconds since 1970; 0: it has none)."""

    def __init__(self, expires: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rackloom_admission_requests",
            "Questions of the API server, by page and answer.",
            ["page", "answer"],
            registry=self._registry,
        )
        self._decisions = Counter(
            "rackloom_admission_decisions",
            "What rules did to objects; several may act on one.",
            ["rule", "decision"],
            registry=self._registry,
        )
        self._ended = Counter(
            "rackloom_admission_connections_ended",
            "Connections that were refused or cut, by what they would have taken too much of.",
            ["why"],
            registry=self._registry,
        )
        for why in ("full", "evicted", "handshake", "head", "request", "bodies"):
            self._ended.labels(why)
        self._seconds = Histogram(
            "rackloom_admission_seconds",
            "How long answers took.",
            ["page"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        expiry = Gauge(
            "rackloom_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate ends; 0 without one.",
            registry=self._registry,
        )
        expiry.set_function(expires)

    def answered(self, page: str, verdict: Verdict, seconds: float) -> None:
        """A question got its verdict."""
        answer = "allowed" if verdict.allowed else "unanswered" if verdict.code >= 500 else "denied"
        self._requests.labels(page, answer).inc()
        self._seconds.labels(page).observe(seconds)
        for rule, decision in verdict.rules:
            self._decisions.labels(rule, decision).inc()

    def connection_ended(self, why: str) -> None:
        """A connection, or a body on one, went beyond a bound."""
        self._ended.labels(why).inc()

    def not_understood(self, page: str) -> None:
        """What came was no question."""
        self._requests.labels(page, "invalid").inc()

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)
