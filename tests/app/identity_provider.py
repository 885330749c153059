"""Identity providers for tests: signing keys, and a real https server with discovery document and key set."""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rackloom.app.listeners import serve_http

MAKERS = {
    "RS256": (lambda: rsa.generate_private_key(65537, 2048), jwt.algorithms.RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), jwt.algorithms.ECAlgorithm),
}


class Provider:
    """One issuer below the server: `path` is that of its URL."""

    def __init__(self, path: str, algorithm: str = "RS256") -> None:
        self.path = path
        self.algorithm = algorithm
        self.url = ""
        self.fetched: list[str] = []
        self.document: dict[str, Any] | None = {}
        """Fields that replace those of the document. None: the document is `null`."""
        self.is_down = False
        self.redirect: str | None = None
        self.rotate("first")

    def rotate(self, kid: str) -> None:
        make, self._kind = MAKERS[self.algorithm]
        self.kid, self._key = kid, make()

    def keys(self) -> dict[str, Any]:
        public = json.loads(self._kind.to_jwk(self._key.public_key()))
        # Keycloak publishes one for encryption beside those for signatures.
        encryption = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(_ENCRYPTION_KEY.public_key()))
        return {
            "keys": [
                encryption | {"kid": "enc", "use": "enc", "alg": "RSA-OAEP"},
                public | {"kid": self.kid, "use": "sig"},
            ]
        }

    def token(self, claims: dict[str, Any], **header: str) -> str:
        now = int(time.time())
        content = {"iss": self.url, "iat": now, "exp": now + 300} | claims
        return jwt.encode(content, self._key, algorithm=self.algorithm, headers={"kid": self.kid} | header)

    async def reply(self, request: Request, path: str) -> Response:
        return self.answer(path)

    def answer(self, path: str) -> Response:
        self.fetched.append(path)
        if self.is_down:
            return Response(status_code=503)
        if self.redirect is not None:
            return RedirectResponse(self.redirect)
        if path == "/.well-known/openid-configuration":
            usual = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
            document = None if self.document is None else usual | self.document
            return Response(json.dumps(document), media_type="application/json")
        return Response(json.dumps(self.keys()), media_type="application/json")


class SigningInProvider(Provider):
    """A provider for browsers, as strict as OAuth 2.1 requires: PKCE, one use of a code, a known client.

    Every visitor is the person of `claims`, without a form. `client_secret` None: a public client.
    """

    def __init__(self, path: str, *, redirect: str, client_secret: str | None = None) -> None:
        super().__init__(path)
        self.redirect_uri = redirect
        self.client_secret = client_secret
        self.claims: dict[str, Any] = {}
        self.refusal: str | None = None
        self.sends_in_body = False
        self.nonce: str | None = None
        """A nonce that replaces the requested one."""
        self._codes: dict[str, dict[str, str]] = {}

    async def reply(self, request: Request, path: str) -> Response:
        if path == "/authorize":
            return self._authorize(dict(request.query_params))
        if path == "/token" and request.method == "POST":
            return self._token(request.headers, dict(parse_qsl((await request.body()).decode())))
        self.document = {
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            **(
                {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
                if self.sends_in_body
                else {}
            ),
            **(self.document or {}),
        }
        return self.answer(path)

    def _authorize(self, asked: dict[str, str]) -> Response:
        if asked["client_id"] != "rack-map" or asked["redirect_uri"] != self.redirect_uri:
            return Response("unknown client, or another redirect_uri", 400)
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert "openid" in asked["scope"].split()
        back = {"state": asked["state"], "iss": self.url}
        if self.refusal is None:
            code = back["code"] = secrets.token_urlsafe(16)
            self._codes[code] = asked
        else:
            back |= {"error": self.refusal, "error_description": "<b>not today</b>"}
        return RedirectResponse(f"{self.redirect_uri}?{urlencode(back)}", 302)

    def _token(self, headers: Headers, form: dict[str, str]) -> Response:
        asked = self._codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if self.client_secret is not None and self._given_secret(headers, form) != self.client_secret:
            return _json({"error": "invalid_client"}, 401)
        if (
            asked is None
            or form["grant_type"] != "authorization_code"
            or form["redirect_uri"] != asked["redirect_uri"]
            or challenge != asked["code_challenge"]
        ):
            return _json({"error": "invalid_grant"}, 400)
        nonce = self.nonce or asked["nonce"]
        return _json(
            {
                "token_type": "Bearer",
                "expires_in": 300,
                "access_token": self.token({"aud": "rackloom", **self.claims}),
                "id_token": self.token({"aud": "rack-map", "nonce": nonce, **self.claims}),
            }
        )

    def _given_secret(self, headers: Headers, form: dict[str, str]) -> str | None:
        if self.sends_in_body:
            return form.get("client_secret")
        kind, _, pair = headers.get("authorization", "").partition(" ")
        name, _, secret = base64.b64decode(pair).decode().partition(":")
        return unquote(secret) if (kind, name) == ("Basic", "rack-map") else None


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


_ENCRYPTION_KEY = rsa.generate_private_key(65537, 2048)


@asynccontextmanager
async def served(directory: Path, authority: Any, *providers: Provider) -> AsyncIterator[str]:
    """Serve the providers over https with a certificate of `authority`. Gives the URL of the server."""
    crt, key = authority.issue("idp").save(directory, "idp")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = Request(scope).url.path
        for provider in providers:
            if path.startswith(f"{provider.path}/"):
                reply = await provider.reply(Request(scope, receive), path.removeprefix(provider.path))
                await reply(scope, receive, send)
                return
        await Response(status_code=404)(scope, receive, send)

    async with serve_http(app, "127.0.0.1:0", cert=crt, key=key) as port:
        for provider in providers:
            provider.url = f"https://localhost:{port}{provider.path}"
        yield f"https://localhost:{port}"
