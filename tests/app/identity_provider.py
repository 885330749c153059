"""Identity providers for tests: signing keys, and a real https server with discovery document and key set."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
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
        """Fields that replace those of the document; None: it is something else."""
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


_ENCRYPTION_KEY = rsa.generate_private_key(65537, 2048)


@asynccontextmanager
async def served(directory: Path, authority: Any, *providers: Provider) -> AsyncIterator[str]:
    """Serve the providers over https with a certificate of `authority`; gives the URL of the server."""
    crt, key = authority.issue("idp").save(directory, "idp")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = Request(scope).url.path
        for provider in providers:
            if path.startswith(f"{provider.path}/"):
                await provider.answer(path.removeprefix(provider.path))(scope, receive, send)
                return
        await Response(status_code=404)(scope, receive, send)

    async with serve_http(app, "127.0.0.1:0", cert=crt, key=key) as port:
        for provider in providers:
            provider.url = f"https://localhost:{port}{provider.path}"
        yield f"https://localhost:{port}"
