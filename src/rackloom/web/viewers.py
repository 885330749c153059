"""The viewer: the session of a browser is an organisation and its bearer token, in one cookie.

The token is taken once, at the login page, and kept where scripts cannot read it. The server stores
nothing: the token is verified at every request, and the session ends with it.
"""

import re
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

COOKIE = "rackloom-map"
_ORG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TOKEN = re.compile(r"[A-Za-z0-9_.=-]{1,3800}")
"""The characters of a signed token, up to the length that browsers keep in a cookie."""


class Viewer(msgspec.Struct, frozen=True):
    """An authenticated viewer."""

    org: str
    subject: str
    """The person or service that the token names."""
    operator: bool
    """Whether the viewer sees the whole site, not only the part of its organisation."""
    expires: float
    """When the token expires, in seconds since the epoch."""

    @property
    def name(self) -> tuple[str, str]:
        """The identity of the viewer, whichever token it has."""
        return self.org, self.subject


Authenticator = Callable[[str, str], Awaitable[Viewer | None]]
"""Verifies a token for an organisation. The result is None if it is rejected."""


class Session(msgspec.Struct, frozen=True):
    """The content of the cookie of a browser. Empty if it has none."""

    org: str
    token: str

    def __repr__(self) -> str:
        return f"Session(org={self.org!r})"


def session_of(request: Request) -> Session:
    """The session of the browser that sent a request."""
    org, _, token = request.cookies.get(COOKIE, "").partition(":")
    return Session(org, token)


def is_organisation(name: str) -> bool:
    """Whether a text may be the name of an organisation."""
    return _ORG_NAME.fullmatch(name) is not None


def is_token(text: str) -> bool:
    """Whether a text may be a token that a cookie holds."""
    return _TOKEN.fullmatch(text) is not None


async def verify_session(authenticate: Authenticator, session: Session) -> Viewer | None:
    """The viewer with a token, from a form or a cookie."""
    if not is_organisation(session.org) or not is_token(session.token):
        return None
    return await authenticate(session.token, session.org)


def keep_session(answer: Response, session: Session, seconds: float, scheme: str) -> Response:
    """An answer that makes the browser keep a session for `seconds`."""
    answer.set_cookie(
        COOKIE,
        f"{session.org}:{session.token}",
        max_age=max(0, int(seconds)),
        httponly=True,
        samesite="strict",
        secure=scheme == "https",
    )
    return answer


def end_session(answer: Response) -> Response:
    """An answer that makes the browser forget its session."""
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
