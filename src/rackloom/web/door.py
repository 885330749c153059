"""Who may look: a bearer token, taken once at the login page and kept in a cookie that scripts cannot read.

Nothing is remembered here: the cookie is the token, verified at every request, and it ends with the token.
"""

import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

COOKIE = "rackloom-map"
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TOKEN = re.compile(r"[A-Za-z0-9_.=-]{1,3800}")
"""What a signed token is written in, and as much as browsers keep in a cookie."""


class Viewer(msgspec.Struct, frozen=True):
    """Somebody who may look."""

    org: str
    operator: bool
    """Whether it sees the whole site; else only what is the organisation's."""
    expires: float
    """When its token ends, in seconds since the epoch."""


Doorman = Callable[[str, str], Awaitable[Viewer | None]]
"""Verifies a token for an organisation; None: not admitted."""


async def viewer(request: Request, doorman: Doorman) -> Viewer | None:
    """Who sends a request, by its cookie."""
    org, _, token = request.cookies.get(COOKIE, "").partition(":")
    return await admitted(doorman, org, token)


async def admitted(doorman: Doorman, org: str, token: str) -> Viewer | None:
    """Who shows a token, however it came."""
    if not _ORG.fullmatch(org) or not _TOKEN.fullmatch(token):
        return None
    return await doorman(token, org)


def remember(response: Response, request: Request, org: str, token: str, seconds: float) -> None:
    """Let the browser show the token from now on, to this site only."""
    response.set_cookie(
        COOKIE,
        f"{org}:{token}",
        max_age=max(0, int(seconds)),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def forget(response: Response) -> None:
    """Let the browser drop the token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def from_our_page(request: Request) -> bool:
    """Whether a form was sent from a page of this site, as every browser of today says."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")
