"""Nothing of an organisation is reached without a verified token: the check stands before routing.

A route that forgets to ask for a role still cannot be reached by a stranger, and a body is not even parsed
for one.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.carve.api import problems, respond
from rackloom.carve.api.auth import TokenVerifier, Unauthenticated
from rackloom.carve.site.problems import Rejected

ORGS = "/v2/org/"


class Gate:
    """ASGI middleware that sets `request.state.caller` on every path below an organisation."""

    def __init__(self, app: ASGIApp, verifier: TokenVerifier) -> None:
        self.app = app
        self.verifier = verifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] == "http" and scope["path"].startswith(ORGS):
            try:
                self._admit(scope)
            except Unauthenticated as error:
                refusal = respond.problem(401, str(error), headers={"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
            except Rejected as error:
                await problems.rejected(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        org = scope["path"].removeprefix(ORGS).partition("/")[0]
        caller = self.verifier.verify(Headers(scope=scope).get("authorization"), org)
        scope.setdefault("state", {})["caller"] = caller
