"""The pages of the webhook: AdmissionReview in, AdmissionReview out."""

import asyncio
import time
from collections.abc import Awaitable, Callable

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

MAX_BODY = 8 << 20
"""Bytes. A review holds an object twice, and etcd takes objects of up to 1.5 MiB."""
BODY_SECONDS = 10.0
Judge = Callable[[Question], Awaitable[Verdict]]


def application(desk: Desk, is_ready: Callable[[], bool], metrics: WebhookMetrics) -> Starlette:
    """The pages: one per kind of question, /readyz and /metrics."""

    async def told(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def readyz(_: Request) -> Response:
        ready = is_ready()
        return PlainTextResponse("ok\n" if ready else "not ready\n", 200 if ready else 503)

    judges: dict[str, Judge] = {
        "/validate-resource-claim-parameters": desk.validate_claims,
        "/validate-pods": desk.validate_pods,
        "/mutate-pods": desk.mutate_pods,
    }
    pages = [Route(path, _page(path, judge, metrics), methods=["POST"]) for path, judge in judges.items()]
    return Starlette(routes=[*pages, Route("/readyz", readyz), Route("/metrics", told)])


def _page(path: str, judge: Judge, metrics: WebhookMetrics) -> Callable[[Request], Awaitable[Response]]:
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
            body = await _body(request)
            question = read_review(body)
            return Response(await judged(question), media_type="application/json")
        except _TooLarge:
            return PlainTextResponse(f"the body is larger than {MAX_BODY} bytes\n", 413)
        except TimeoutError:
            return PlainTextResponse(f"the body took over {BODY_SECONDS:g} seconds\n", 408)
        except (Refused, ClientDisconnect) as refused:
            return PlainTextResponse(f"{refused}\n", 400)

    return page


class _TooLarge(Exception):
    """The body is."""


async def _body(request: Request) -> bytes:
    body = bytearray()
    async with asyncio.timeout(BODY_SECONDS):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise _TooLarge
    return bytes(body)
