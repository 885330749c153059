"""The pages of the webhook: AdmissionReview in, AdmissionReview out."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rackloom.app.webhook_metrics import WebhookMetrics
from rackloom.claim.cluster.admission.desk import Desk
from rackloom.claim.cluster.admission.reviews import Request as Question
from rackloom.claim.cluster.admission.reviews import Verdict, answer, read_review
from rackloom.errors import Refused
from rackloom.http_server import FairShare, address_key

MAX_BODY = 7 << 20
"""Bytes. A review may hold an object twice, and the API server reads requests of up to 3 MiB."""
BODY_SECONDS = 10.0
BODIES, BODIES_OF_AN_ADDRESS = 32 << 20, 16 << 20
"""Bytes of all bodies that are being read or judged at a time."""
MAX_VALUES = 500_000
"""In one body. JSON of no more than `{},{},{}` takes 24 times its length once it is read."""
_DIGITS = 16
Judge = Callable[[Question], Awaitable[Verdict]]


def application(desk: Desk, is_ready: Callable[[], bool], metrics: WebhookMetrics) -> Starlette:
    """The pages: one per kind of question, /readyz and /metrics."""

    async def told(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def readyz(_: Request) -> Response:
        ready = is_ready()
        return PlainTextResponse("ok\n" if ready else "not ready\n", 200 if ready else 503)

    bodies = FairShare(BODIES, BODIES_OF_AN_ADDRESS)
    judges: dict[str, Judge] = {
        "/validate-resource-claim-parameters": desk.validate_claims,
        "/validate-pods": desk.validate_pods,
        "/mutate-pods": desk.mutate_pods,
    }
    pages = [
        Route(path, _page(path, judge, metrics, bodies), methods=["POST"]) for path, judge in judges.items()
    ]
    return Starlette(routes=[*pages, Route("/readyz", readyz), Route("/metrics", told)])


def _page(
    path: str, judge: Judge, metrics: WebhookMetrics, bodies: FairShare
) -> Callable[[Request], Awaitable[Response]]:
    name = path.removeprefix("/")

    async def judged(question: Question) -> bytes:
        began = time.perf_counter()
        verdict = await judge(question)
        metrics.answered(name, verdict, time.perf_counter() - began)
        return answer(question.uid, verdict)

    async def page(request: Request) -> Response:
        reply = await replied(request)
        if reply.status_code != 200:
            metrics.not_understood(name)
        return reply

    async def replied(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("send Content-Type: application/json\n", 415)
        try:
            async with _held(request, bodies) as body:
                return Response(await judged(read_review(body)), media_type="application/json")
        except _TooLarge:
            return PlainTextResponse(f"the body is larger than {MAX_BODY} bytes\n", 413)
        except _TooMany:
            metrics.connection_ended("bodies")
            return PlainTextResponse("too much is being asked at a time; ask again\n", 503)
        except TimeoutError:
            return PlainTextResponse(f"the body took over {BODY_SECONDS:g} seconds\n", 408)
        except (Refused, ClientDisconnect) as refused:
            return PlainTextResponse(f"{refused}\n", 400)

    return page


class _TooLarge(Exception):
    """The body is."""


class _TooMany(Exception):
    """There is no room for the body beside those of others."""


@asynccontextmanager
async def _held(request: Request, bodies: FairShare) -> AsyncIterator[bytearray]:
    """The body, for which there is room until it is answered; while it is on its way others may take that."""
    size, lost = _announced(request), asyncio.Event()
    reading = asyncio.timeout(BODY_SECONDS)

    def evict() -> None:
        lost.set()
        reading.reschedule(asyncio.get_running_loop().time())

    owner = address_key(request.client.host if request.client else "")
    share = bodies.take(owner, size, evict)
    if share is None:
        raise _TooMany
    try:
        try:
            async with reading:
                body = await _body(request, size)
        except TimeoutError as error:
            raise (_TooMany if lost.is_set() else error) from None
        share.is_needed = True
        yield body
    finally:
        share.release()


def _announced(request: Request) -> int:
    """What room the body takes: its length, or as much as any may where it does not say."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < _DIGITS else MAX_BODY
    if size > MAX_BODY or len(length) >= _DIGITS:
        raise _TooLarge
    return size


async def _body(request: Request, size: int) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > size:
            raise _TooLarge
    if sum(map(body.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise Refused(f"the body has more than {MAX_VALUES} values")
    return body
