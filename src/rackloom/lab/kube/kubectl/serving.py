"""The simulated API server as an ASGI application, for kubectl and other programs on this machine.

Every request needs the bearer token, and a client that has it may do everything. Requests are passed to
`KubeTransport`. A body is refused as soon as it exceeds the limit. Watches are streamed.
"""

import hmac

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rackloom.claim.kube.api import KubeError
from rackloom.lab.kube.http import MAX_BODY_BYTES, KubeTransport, status_body
from rackloom.lab.kube.server import FakeKube

_UNAUTHORIZED = KubeError(401, "Unauthorized", "Unauthorized")
_FORWARDED_HEADERS = ("accept", "content-type", "user-agent")


class KubeApplication:
    """An application for one server. Everybody is `user` to it."""

    def __init__(self, kube: FakeKube, token: str, user: str) -> None:
        self._token = token
        self._transport = KubeTransport(kube, user)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            request = Request(scope, receive)
            given = request.headers.get("Authorization", "")
            is_admitted = hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())
            reply = await self._passed_on(request) if is_admitted else _refusal_response(_UNAUTHORIZED)
            await reply(scope, receive, send)

    async def _passed_on(self, request: Request) -> Response:
        # The request body, read only a little beyond the limit, so that it is refused.
        content = bytearray()
        async for part in request.stream():
            if len(content) <= MAX_BODY_BYTES:
                content += part
        asked = httpx2.Request(
            request.method,
            str(request.url),
            headers={name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers},
            content=bytes(content),
        )
        try:
            answer = await self._transport.handle_async_request(asked)
        except httpx2.ReadError as error:
            return _refusal_response(KubeError(500, "InternalError", str(error)))
        headers = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
        if asked.url.params.get("watch") in ("true", "1"):
            return StreamingResponse(answer.aiter_raw(), answer.status_code, headers, "application/json")
        return Response(await answer.aread(), answer.status_code, headers, "application/json")


def _refusal_response(error: KubeError) -> Response:
    return JSONResponse(status_body(error), error.code)
