"""`rackloom webhook`: admission of claims and pods over HTTPS, and the opening of pod gates.

One page per kind of review takes an AdmissionReview and answers one. The API server presents no client
certificate, so every client must be limited: body size (7 MiB, since a review may hold an object
twice, and the API server reads requests of up to 3 MiB), time for a body, number of JSON values in it
(small JSON becomes up to 24 times larger in memory), and all bodies together, shared fairly between
addresses. A body that is still being read may lose its share to another. One that is under review may
not.

A Job configures the API server to trust the serving certificate, and issues it into a Secret
(`run_issuer`). `ServingCertificate` polls the Secret and loads a new certificate into the running
`SSLContext` through a memory file, so that the key is never written to disk and no connection is cut.
Readiness means: a certificate, and complete informers. The HTTP keep-alive of 120 s is longer than the 90 s
after which the API server closes an idle connection, so that both sides never close at once and lose a
review. One elected replica runs the gatekeeper.
"""

import asyncio
import os
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rackloom.app.listeners import metrics_response, ok_response, serve_http, unavailable_response
from rackloom.app.process import allow_open_files, freeze_loaded_objects, stop_on_signals
from rackloom.claim.cluster.admission.gates import GateController
from rackloom.claim.cluster.admission.reviews import (
    AdmissionVerdict,
    ReviewRequest,
    encode_response,
    read_review,
)
from rackloom.claim.cluster.admission.serving_certificate import (
    ISSUER_NAME,
    WEBHOOK_NAME,
    CertificateIssuer,
    read_serving_identity,
)
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.cluster.certificates import CertifiedKey, expires_at
from rackloom.claim.kube.api import EventRecorder, KubeApi, KubeError
from rackloom.claim.kube.client import KubeClient, RateLimiter, connect
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.leader import LeaderElection
from rackloom.errors import Refused, Retry
from rackloom.serving.acceptor import END_REASONS, FairShare, address_key
from rackloom.serving.limits import WEBHOOK, Process, files_needed

# Metrics.


_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The API server waits for five."""


class WebhookMetrics:
    """Counters of one process. `expires` is its certificate's end, in seconds since 1970, or 0 for none."""

    def __init__(self, expires: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        self._requests = counter(
            "rackloom_admission_requests",
            "Questions of the API server, by page and answer.",
            ["page", "answer"],
        )
        self._decisions = counter(
            "rackloom_admission_decisions",
            "What rules did to objects; several may act on one.",
            ["rule", "decision"],
        )
        self._ended = counter(
            "rackloom_admission_connections_ended",
            "Connections that were refused or cut, by what they would have taken too much of.",
            ["why"],
        )
        for why in (*END_REASONS, "bodies"):
            self._ended.labels(why)
        self._seconds = Histogram(
            "rackloom_admission_seconds",
            "How long answers took.",
            ["page"],
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        Gauge(
            "rackloom_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate ends; 0 without one.",
            registry=self._registry,
        ).set_function(expires)

    def expect(self, page: str) -> None:
        """Have the series of a page from zero, so that its first review is a change."""
        self._seconds.labels(page)
        for answer in ("allowed", "denied", "unanswered", "invalid"):
            self._requests.labels(page, answer)

    def answered(self, page: str, verdict: AdmissionVerdict, seconds: float) -> None:
        """A review got its verdict."""
        answer = "allowed" if verdict.allowed else "unanswered" if verdict.code >= 500 else "denied"
        self._requests.labels(page, answer).inc()
        self._seconds.labels(page).observe(seconds)
        for rule, decision in verdict.rules:
            self._decisions.labels(rule, decision).inc()

    def connection_ended(self, why: str) -> None:
        """A connection, or a body on one, went beyond a bound."""
        self._ended.labels(why).inc()

    def not_understood(self, page: str) -> None:
        """The request was no review."""
        self._requests.labels(page, "invalid").inc()

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)


# Reviews over HTTP.


MAX_BODY = 7 << 20
"""Bytes. A review may hold an object twice, and the API server reads requests of up to 3 MiB."""
BODY_SECONDS = 10.0
BODIES, BODIES_OF_AN_ADDRESS = 32 << 20, 16 << 20
"""Bytes of all bodies that are being read or reviewed at a time."""
MAX_VALUES = 500_000
"""Limit for one body. JSON of no more than `{},{},{}` takes 24 times its length once it is read."""
_DIGITS = 16
ReviewHandler = Callable[[ReviewRequest], Awaitable[AdmissionVerdict]]


def admission_app(
    reviewer: AdmissionReviewer, is_ready: Callable[[], bool], metrics: WebhookMetrics
) -> Starlette:
    """The pages: one per kind of review, /readyz and /metrics."""

    async def metrics_page(_: Request) -> Response:
        return metrics_response(metrics.page())

    async def readyz(_: Request) -> Response:
        return ok_response() if is_ready() else unavailable_response("not ready")

    bodies = FairShare(BODIES, BODIES_OF_AN_ADDRESS)
    handlers: dict[str, ReviewHandler] = {
        "/validate-resource-claim-parameters": reviewer.validate_claims,
        "/validate-pods": reviewer.validate_pods,
        "/mutate-pods": reviewer.mutate_pods,
    }
    pages = [
        Route(path, _review_endpoint(path, handle, metrics, bodies), methods=["POST"])
        for path, handle in handlers.items()
    ]
    return Starlette(routes=[*pages, Route("/readyz", readyz), Route("/metrics", metrics_page)])


def _review_endpoint(
    path: str, handle: ReviewHandler, metrics: WebhookMetrics, bodies: FairShare
) -> Callable[[Request], Awaitable[Response]]:
    name = path.removeprefix("/")
    metrics.expect(name)

    async def review_response(review: ReviewRequest) -> bytes:
        began = time.perf_counter()
        verdict = await handle(review)
        metrics.answered(name, verdict, time.perf_counter() - began)
        return encode_response(review.uid, verdict)

    async def page(request: Request) -> Response:
        reply = await respond(request)
        if reply.status_code != 200:
            metrics.not_understood(name)
        return reply

    async def respond(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("send Content-Type: application/json\n", 415)
        try:
            async with _body_with_share(request, bodies) as body:
                return Response(await review_response(read_review(body)), media_type="application/json")
        except _TooLarge:
            return PlainTextResponse(f"the body is larger than {MAX_BODY} bytes\n", 413)
        except _NoRoom:
            metrics.connection_ended("bodies")
            return PlainTextResponse("too much is being asked at a time; ask again\n", 503)
        except TimeoutError:
            return PlainTextResponse(f"the body took over {BODY_SECONDS:g} seconds\n", 408)
        except (Refused, ClientDisconnect) as refused:
            return PlainTextResponse(f"{refused}\n", 400)

    return page


class _TooLarge(Exception):
    """The body is."""


class _NoRoom(Exception):
    """There is no memory left for the body."""


@asynccontextmanager
async def _body_with_share(request: Request, bodies: FairShare) -> AsyncIterator[bytearray]:
    """The body, with its share of memory until it is answered. Others may take the share while it arrives."""
    size, lost = _announced_size(request), asyncio.Event()
    reading = asyncio.timeout(BODY_SECONDS)

    def evict() -> None:
        lost.set()
        reading.reschedule(asyncio.get_running_loop().time())

    owner = address_key(request.client.host if request.client else "")
    share = bodies.take(owner, size, evict)
    if share is None:
        raise _NoRoom
    try:
        try:
            async with reading:
                body = await _read_body(request, size)
        except TimeoutError as error:
            raise (_NoRoom if lost.is_set() else error) from None
        share.is_needed = True
        yield body
    finally:
        share.release()


def _announced_size(request: Request) -> int:
    """The memory that the body takes: its length, or the maximum if the request does not give it."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < _DIGITS else MAX_BODY
    if size > MAX_BODY or len(length) >= _DIGITS:
        raise _TooLarge
    return size


async def _read_body(request: Request, size: int) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > size:
            raise _TooLarge
    if sum(map(body.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise Refused(f"the body has more than {MAX_VALUES} values")
    return body


# The process.


log = structlog.get_logger(__name__)

RENEWAL_CHECK_SECONDS = 10.0
"""Seconds between two reads of the certificate."""
RETRY_SECONDS = 2.0
REQUESTS_PER_SECOND = 200.0
BURST = 1000


class WebhookOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of this process."""

    identity: str
    """Name of the pod. With a random part it is unique to this process."""
    listen: str
    """`host:port` of HTTPS."""
    kubeconfig: Path | None = None
    context: str | None = None


def run_webhook(
    settings: AdmissionSettings, options: WebhookOptions, announce: Callable[[str], None]
) -> None:
    """Answer reviews until SIGTERM or SIGINT."""
    allow_open_files(files_needed(Process.WEBHOOK))
    asyncio.run(_run_webhook(settings, options, announce))


async def _run_webhook(
    settings: AdmissionSettings, options: WebhookOptions, announce: Callable[[str], None]
) -> None:
    stopped = stop_on_signals()
    client = http_client(options.kubeconfig, options.context)
    client.headers["User-Agent"] = WEBHOOK_NAME
    api = KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST))
    async with api, webhook(api, settings, options) as port:
        freeze_loaded_objects()
        announce(f"rackloom: admission on port {port}")
        await stopped.wait()


@asynccontextmanager
async def webhook(api: KubeApi, settings: AdmissionSettings, options: WebhookOptions) -> AsyncIterator[int]:
    """A webhook at work while the context is entered. Yields the port.

    It listens from the start. It is ready once it has a certificate and has seen the cluster.
    """
    identity = f"{options.identity}-{uuid.uuid4()}"
    rng = random.Random()  # noqa: S311
    known = AdmissionCache(api, settings.isolation, rng)
    gatekeeper = GateController(api, known, EventRecorder(api, WEBHOOK_NAME, identity, time.time), rng)
    certificate = ServingCertificate(partial(read_serving_identity, api, settings.namespace))
    election = LeaderElection(api, settings.namespace, WEBHOOK_NAME, identity, wall=time.time, rng=rng)
    metrics = WebhookMetrics(lambda: certificate.expires)
    app = admission_app(
        AdmissionReviewer(known, settings), lambda: known.is_synced and certificate.is_held, metrics
    )
    async with serve_http(
        app,
        options.listen,
        tls=certificate.context,
        limits=WEBHOOK,
        ended=metrics.connection_ended,
    ) as port:
        informers = [informer.run() for informer in known.informers]
        async with _in_background([*informers, certificate.run(), election.run(gatekeeper.run)]):
            yield port


@asynccontextmanager
async def _in_background(work: Sequence[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run all of this while the context is entered. A failure of one ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


class ServingCertificate:
    """The TLS side of the server. A renewed certificate serves the next connection, and none is cut."""

    def __init__(self, read: Callable[[], Awaitable[CertifiedKey | None]]) -> None:
        self._read = read
        self._held: CertifiedKey | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    @property
    def is_held(self) -> bool:
        """Whether there is one."""
        return self._held is not None

    @property
    def expires(self) -> float:
        """Its end, in seconds since 1970, or 0 without one."""
        return 0.0 if self._held is None else expires_at(self._held.certificate)

    async def run(self) -> None:
        """Serve with the newest one until cancelled."""
        while True:
            try:
                await self.renew()
                why = "" if self.is_held else "the Secret is empty: its Job has not run yet"
            except KubeError as error:
                why = error.message
            except ssl.SSLError as error:
                why = f"the Secret holds no certificate with its key: {error}"
            if why:
                log.warning("webhook.certificate", why=why)
            await asyncio.sleep(RETRY_SECONDS if why else RENEWAL_CHECK_SECONDS)

    async def renew(self) -> None:
        """Load the certificate that was issued last. Raises KubeError, or SSLError if it is unusable."""
        identity = await self._read()
        if identity is not None and identity != self._held:
            # A pair that does not match would spoil the context that serves.
            load_identity(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), identity)
            load_identity(self.context, identity)
            self._held = identity
            log.info("webhook.certificate_loaded")


def load_identity(context: ssl.SSLContext, identity: CertifiedKey) -> None:
    """Serve new connections with this. OpenSSL reads files only, and the key must not reach a disk."""
    with os.fdopen(os.memfd_create("identity"), "wb") as file:
        file.write(identity.certificate + identity.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


# The Job that issues its certificate.


def run_issuer(namespace: str, names: tuple[str, ...], kubeconfig: Path | None, context: str | None) -> None:
    """Do one pass of the certificate's issuer. Raises Retry if the API server did not let it finish."""

    async def run() -> None:
        async with connect(kubeconfig, context, user_agent=ISSUER_NAME) as api:
            await CertificateIssuer(api, namespace, names, time.time).run()

    try:
        asyncio.run(run())
    except KubeError as error:
        reason = f"the webhook's certificate was not issued: {error.message}"
        raise Retry(reason, after=RETRY_SECONDS) from error
