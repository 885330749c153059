"""Identity providers at which browsers sign in to the map: their addresses, and codes for tokens.

`[auth.issuers.sign_in]` names the client. The two addresses come from the issuer's discovery document, with
the same demands as its keys (`provider_keys`): https with a verified certificate, the document about the
configured issuer letter by letter, no redirect, bounded in size and in total time. A document is used for as
long as keys are (`refresh`). While it cannot be read, the next attempt follows after `RETRY_SECONDS`, even
if many people sign in: they read the reason.

The client's secret is sent in the Authorization header, or in the body where the document names that way
only. Without a secret the client is public, and PKCE alone protects the code. Neither a secret, a code nor a
token is in a log or a message.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import structlog

from rackloom.app.config import IssuerConfig, SignInConfig
from rackloom.app.site.provider_keys import (
    FETCH_SECONDS,
    discovered_document,
    https_address,
    json_object,
    read_answer,
)
from rackloom.errors import Refused
from rackloom.web.provider_sign_in import TokenAnswer

log = structlog.get_logger(__name__)
T = TypeVar("T")
RETRY_SECONDS = 10.0
_MAX_REASON = 200
"""Characters of a reason: a provider chooses parts of it."""


class HttpSignInProvider:
    """One issuer with `[auth.issuers.sign_in]`. `clock` gives seconds since the epoch."""

    def __init__(self, issuer: IssuerConfig, client: SignInConfig, clock: Callable[[], float]) -> None:
        self.issuer = issuer.issuer
        self.title = client.title or issuer.host
        self.client_id = client.client_id
        self.scopes: Sequence[str] = client.scopes
        self.organisation = issuer.only_organisation
        self._config = issuer
        self._client = client
        self._clock = clock
        self._reading = asyncio.Lock()
        self._document: dict[str, Any] = {}
        self._read_at = float("-inf")
        self._failure: tuple[float, str] | None = None

    async def authorization_endpoint(self) -> str:
        """The address for browsers. Raises Refused with the reason while the provider does not give it."""
        return https_address(await self._discovered(), "authorization_endpoint")

    async def exchange(self, code: str, verifier: str, redirect: str) -> TokenAnswer:
        """The token for a code. Raises Refused with the reason."""
        document = await self._discovered()
        url = https_address(document, "token_endpoint")
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect,
            "client_id": self.client_id,
            "code_verifier": verifier,
        }
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        login = await self._login(document, form)
        status, body = await self._asked(
            lambda client: read_answer(
                client.stream("POST", url, data=form, headers=headers, auth=login), url
            )
        )
        answer = json_object(body, f"the answer of {url}")
        if status != httpx2.codes.OK:
            # RFC 6749, 5.2.
            problem = f"{answer.get('error', status)} {answer.get('error_description', '')}"
            raise Refused(problem.strip()[:_MAX_REASON])
        token, id_token = answer.get(self._client.token), answer.get("id_token")
        if not isinstance(token, str):
            raise Refused(f"its answer has no {self._client.token}")
        return TokenAnswer(token, id_token if isinstance(id_token, str) else None)

    async def _login(self, document: dict[str, Any], form: dict[str, str]) -> httpx2.BasicAuth | None:
        """The client's authentication. A secret for the body is put into `form`."""
        if self._client.client_secret_file is None:
            return None
        secret = await asyncio.to_thread(_secret, self._client.client_secret_file)
        ways = document.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if "client_secret_basic" not in ways and "client_secret_post" in ways:
            form["client_secret"] = secret
            return None
        # Both are form-encoded first: RFC 6749, 2.3.1.
        return httpx2.BasicAuth(quote(self.client_id, safe=""), quote(secret, safe=""))

    async def _discovered(self) -> dict[str, Any]:
        async with self._reading:
            now = self._clock()
            if now - self._read_at < self._config.refresh.total_seconds():
                return self._document
            if self._failure is not None and now - self._failure[0] < RETRY_SECONDS:
                raise Refused(self._failure[1])
            try:
                self._document = await self._asked(lambda client: discovered_document(client, self._config))
            except Refused as error:
                self._failure = (now, error.reason)
                log.warning("map.provider-not-read", issuer=self.issuer, reason=error.reason)
                raise
            self._read_at, self._failure = now, None
            return self._document

    def _open(self) -> httpx2.AsyncClient:
        ca = self._config.ca_file
        verify = True if ca is None else ssl.create_default_context(cafile=ca)
        return httpx2.AsyncClient(timeout=FETCH_SECONDS, verify=verify)

    async def _asked(self, ask: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """A provider's answer. Any error on the way there becomes Refused."""
        try:
            # The file of the authority is read first, and may not be there.
            async with asyncio.timeout(FETCH_SECONDS), self._open() as client:
                return await ask(client)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError) as error:
            raise Refused((str(error) or type(error).__name__)[:_MAX_REASON]) from error


def _secret(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"the client's secret cannot be read: {type(error).__name__}") from error
