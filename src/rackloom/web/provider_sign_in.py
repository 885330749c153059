"""Sign-in at an identity provider: OpenID Connect's authorization code flow, with PKCE (RFC 7636).

1. The sign-in page names an organisation. The browser gets a cookie with a state, a code verifier and a
   nonce, all random, and a page that leads on to the provider. It is a page because the content security
   policy lets no form be redirected to another server.
2. The provider sends the browser back to `/map/login/back`. The state must be the cookie's, so that a
   browser cannot be made to finish a sign-in that it did not begin. The issuer must be that of the provider
   (RFC 9207).
3. The code is exchanged for a token, with the verifier. If there is an ID token, its nonce must be the
   cookie's.
4. The token is verified as if it had been typed in, for the organisation of the cookie, and kept in the
   session cookie (`viewers`). So access is decided in one place, and the session ends with the token.

The cookie of a sign-in that is under way is good for ten minutes and one attempt. It is `Lax`, because the
provider leads the browser back from another site. The server keeps nothing, so the browser may come back to
another replica. A process exchanges at most eight codes at a time, because a request without a valid token
can cause an exchange.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote, unquote, urlencode

import jwt
import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rackloom.errors import Refused
from rackloom.web import render
from rackloom.web.forms import is_same_origin, read_form
from rackloom.web.viewers import Authenticator, Session, Viewer, is_organisation, is_token, verify_session

COOKIE = "rackloom-sign-in"
BACK = "/map/login/back"
SECONDS = 600
"""The longest time that a browser may be at the provider."""
MOST_EXCHANGES = 8
MOST_OF_AN_ANSWER = 200
"""Characters of a provider's error that are shown."""
_CODE = re.compile(r"[\x21-\x7e]{1,4096}")
_TARGET = re.compile(r"/(?:map/(?!log)[\x21-\x7e]*)?(?:\?[\x21-\x7e]*)?")
"""The targets of a sign-in: pages of the map, never another server."""
_LONGEST_TARGET = 1024


class TokenAnswer(msgspec.Struct, frozen=True):
    """The answer of a provider to a code."""

    token: str
    """The token that REST and the map take."""
    id_token: str | None = None


class SignInProvider(Protocol):
    """A provider at which browsers may sign in."""

    issuer: str
    title: str
    client_id: str
    scopes: Sequence[str]
    organisation: str | None
    """The only one that its tokens may name, or None if the user names it."""

    async def authorization_endpoint(self) -> str:
        """The address to which browsers are sent. Raises Refused with the reason while it is unknown."""

    async def exchange(self, code: str, verifier: str, redirect: str) -> TokenAnswer:
        """The token for a code. Raises Refused with the reason."""


class StartedSignIn(msgspec.Struct, frozen=True):
    """A sign-in that is under way, as the cookie of the browser has it."""

    state: str
    verifier: str
    nonce: str
    provider: int
    org: str
    target: str
    """The page to which it leads."""

    def cookie(self) -> str:
        """The value of the cookie."""
        fields = (self.state, self.verifier, self.nonce, str(self.provider), self.org, self.target)
        return ":".join(quote(field, safe="") for field in fields)


def read_started(cookie: str) -> StartedSignIn | None:
    """The sign-in of a cookie, or None if it has none."""
    fields = [unquote(field) for field in cookie.split(":")]
    if len(fields) != len(StartedSignIn.__struct_fields__) or not re.fullmatch(r"[0-9]{1,3}", fields[3]):
        return None
    state, verifier, nonce, provider, org, target = fields
    return StartedSignIn(state, verifier, nonce, int(provider), org, page_of_the_map(target))


def page_of_the_map(target: str) -> str:
    """The target if it is a page of the map, else the map itself."""
    return target if len(target) <= _LONGEST_TARGET and _TARGET.fullmatch(target) else "/"


def authorization_address(
    endpoint: str, provider: SignInProvider, started: StartedSignIn, redirect: str
) -> str:
    """The address to which the browser is sent."""
    digest = hashlib.sha256(started.verifier.encode()).digest()
    parameters = {
        "response_type": "code",
        "client_id": provider.client_id,
        "redirect_uri": redirect,
        "scope": " ".join(provider.scopes),
        "state": started.state,
        "nonce": started.nonce,
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(parameters)}"


class ProviderSignIn:
    """The two pages of signing in at one of several providers. `address` is that of the map, for browsers."""

    def __init__(
        self, providers: Sequence[SignInProvider], address: str, authenticate: Authenticator
    ) -> None:
        self.providers = providers
        self._secure = address.startswith("https://")
        # A cookie with this prefix cannot come from another host of the same domain.
        self._cookie = f"__Host-{COOKIE}" if self._secure else COOKIE
        self._redirect = f"{address.rstrip('/')}{BACK}"
        self._authenticate = authenticate
        self._exchanging = 0

    async def begin(self, request: Request) -> Response:
        """Send a browser to the provider that a form names."""
        if not is_same_origin(request):
            return self._problem("The form was sent from another site.", 403)
        form = dict(await read_form(request) or ())
        place = form.get("provider", "")
        if not place.isdecimal() or len(place) > 3 or int(place) >= len(self.providers):
            return self._problem("There is no such identity provider.", 400)
        provider = self.providers[int(place)]
        org = provider.organisation or form.get("org", "").strip()
        if not is_organisation(org):
            return self._problem("Name your organisation, then choose the identity provider again.", 400)
        started = StartedSignIn(
            state=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            nonce=secrets.token_urlsafe(24),
            provider=int(place),
            org=org,
            target=page_of_the_map(form.get("to", "/")),
        )
        try:
            endpoint = await provider.authorization_endpoint()
        except Refused as error:
            return self._problem(f"{provider.title} cannot be asked now: {error.reason}", 503)
        there = authorization_address(endpoint, provider, started, self._redirect)
        answer = HTMLResponse(render.render_leading_on(there, f"Go to {provider.title}"))
        answer.set_cookie(
            self._cookie,
            started.cookie(),
            max_age=SECONDS,
            path="/",
            httponly=True,
            samesite="lax",
            secure=self._secure,
        )
        return answer

    async def finish(self, request: Request) -> tuple[Session, Viewer, str] | Response:
        """The session, the viewer and the target of a browser that a provider sent back, or the problem."""
        started = read_started(request.cookies.get(self._cookie, ""))
        state = request.query_params.get("state", "")
        if (
            started is None
            or started.provider >= len(self.providers)
            or not hmac.compare_digest(started.state.encode(), state.encode())
        ):
            return self._problem(
                "This sign-in was not begun in this browser, or more than ten minutes ago. Begin again.", 400
            )
        provider = self.providers[started.provider]
        try:
            token = await self._token(request, provider, started)
        except Refused as error:
            return self._problem(f"{provider.title} did not sign you in: {error.reason}", 403)
        if not is_token(token):
            return self._problem(
                f"The token of {provider.title} is not kept: it has {len(token)} characters, or others than a"
                " signed token. Have the provider put less into it.",
                403,
            )
        session = Session(started.org, token)
        viewer = await verify_session(self._authenticate, session)
        if viewer is None:
            return self._problem(
                f"{provider.title} has signed you in, but its token gives no role in {started.org}.", 403
            )
        return session, viewer, started.target

    async def _token(self, request: Request, provider: SignInProvider, started: StartedSignIn) -> str:
        """The token for the code that a browser brought back from a provider. Raises Refused."""
        asked = request.query_params
        if asked.get("iss", provider.issuer) != provider.issuer:
            raise Refused("another issuer answered")
        if "error" in asked:
            problem = f"{asked['error']} {asked.get('error_description', '')}".strip()
            raise Refused(problem[:MOST_OF_AN_ANSWER])
        if not _CODE.fullmatch(asked.get("code", "")):
            raise Refused("it sent no code")
        if self._exchanging >= MOST_EXCHANGES:
            raise Refused("too many people sign in at this moment, try again")
        self._exchanging += 1
        try:
            answer = await provider.exchange(asked["code"], started.verifier, self._redirect)
        finally:
            self._exchanging -= 1
        if answer.id_token is not None and not _has_nonce(answer.id_token, started.nonce):
            raise Refused("its answer belongs to another sign-in")
        return answer.token

    def forget(self, answer: Response) -> Response:
        """An answer after which the browser has no sign-in under way."""
        answer.delete_cookie(self._cookie, path="/", httponly=True, samesite="lax", secure=self._secure)
        return answer

    def _problem(self, problem: str, status: int) -> Response:
        return self.forget(HTMLResponse(render.render_login(problem, self.providers), status))


def _has_nonce(id_token: str, nonce: str) -> bool:
    """Whether an ID token is of this sign-in.

    It came straight from the provider's own server over a verified connection, which OpenID Connect Core
    3.1.3.7 accepts in place of its signature. Access is decided by the other token, with its signature.
    """
    try:
        claims = jwt.decode(id_token, options={"verify_signature": False})
    except (jwt.PyJWTError, RecursionError):
        return False
    return hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode())
