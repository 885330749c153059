"""Bearer tokens of the issuers that the site trusts: their signing keys, fetched and refreshed.

Keys are fetched outside of requests: a caller with an unknown key id must not be able to make the service
call another server. A failed refresh keeps the keys of before. The issuer that an unverified token claims
decides only which keys are tried; a token verifies only with the keys and the audience of that issuer.
A key counts only for signatures, and for the one algorithm that its type and the configuration allow.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import httpx2
import jwt
import structlog

from rackloom.app.config import IssuerConfig
from rackloom.carve.api.auth import Caller, TokenVerifier, TrustedKey, UnauthenticatedCaller
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

FETCH_SECONDS = 10.0
MAX_BYTES = 1 << 20
_ALGORITHM_OF: dict[str, Literal["EdDSA", "ES256", "RS256"]] = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}


class IssuerVerifier(TokenVerifier):
    """Verifies tokens of all configured issuers; each only with its own keys and audience."""

    def __init__(self, issuers: Sequence[IssuerConfig], clock: Callable[[], float]) -> None:
        self._issuers = {issuer.issuer: issuer for issuer in issuers}
        self._clock = clock
        self._verifiers: dict[str, TokenVerifier] = {}

    def verify(self, authorization: str | None, org: str) -> Caller:
        """As `TokenVerifier.verify`; the issuer that the token names decides only which keys are tried."""
        verifier = self._verifiers.get(_claimed_issuer(authorization))
        # Without keys of that issuer nothing verifies; the empty verifier refuses with the usual message.
        empty = TokenVerifier([], issuer="", audience="", clock=self._clock)
        return (verifier or empty).verify(authorization, org)

    async def load(self) -> None:
        """Fetch the keys of every issuer once. Keys that cannot be fetched are left to `refresh`."""
        for issuer in self._issuers.values():
            await self._load(issuer)

    async def refresh(self) -> None:
        """Fetch the keys of every issuer at its interval, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for issuer in self._issuers.values():
                tasks.create_task(self._refresh(issuer))

    async def _refresh(self, issuer: IssuerConfig) -> None:
        while True:
            await asyncio.sleep(issuer.refresh.total_seconds())
            await self._load(issuer)

    async def _load(self, issuer: IssuerConfig) -> None:
        try:
            keys = trusted_keys(await _fetch_keys(issuer), issuer)
        except (Refused, OSError, httpx2.HTTPError, jwt.PyJWTError, ValueError) as error:
            # Keep the keys of before: an issuer that cannot be reached has not revoked them.
            log.warning("auth.keys-not-read", issuer=issuer.issuer, reason=str(error))
            return
        self._verifiers[issuer.issuer] = TokenVerifier(
            keys,
            issuer=issuer.issuer,
            audience=issuer.audience,
            clock=self._clock,
            lifetime=issuer.max_token_lifetime.total_seconds(),
        )


def trusted_keys(jwks: bytes, issuer: IssuerConfig) -> list[TrustedKey]:
    """The signing keys of a key set, each for one allowed algorithm. Refused when none can be used."""
    keys = [
        TrustedKey(str(key.key_id), algorithm, key.key)
        for key in jwt.PyJWKSet.from_json(jwks.decode()).keys
        if (algorithm := _allowed_algorithm(key, issuer)) is not None and key.key_id
    ]
    if not keys:
        raise Refused(
            f"the key set of {issuer.issuer} has no key for {', '.join(issuer.algorithms)}",
            nearest_fix="let `algorithms` name what its signing keys are for, each with a kid and an alg",
        )
    return keys


def _allowed_algorithm(key: Any, issuer: IssuerConfig) -> Literal["EdDSA", "ES256", "RS256"] | None:
    if key.public_key_use not in (None, "sig"):
        return None
    algorithm = _ALGORITHM_OF.get(key.key_type)
    return algorithm if algorithm in issuer.algorithms and key.algorithm_name == algorithm else None


async def _fetch_keys(issuer: IssuerConfig) -> bytes:
    if issuer.jwks_file is not None:
        return await asyncio.to_thread(issuer.jwks_file.read_bytes)
    async with httpx2.AsyncClient(timeout=FETCH_SECONDS) as client:
        reply = (await client.get(str(issuer.jwks_url))).raise_for_status()
        if len(reply.content) > MAX_BYTES:
            raise Refused(
                f"the key set of {issuer.issuer} is larger than {MAX_BYTES} bytes",
                nearest_fix="let jwks_url name the JWK set itself",
            )
        return reply.content


def _claimed_issuer(authorization: str | None) -> str:
    """The issuer that the token claims, unverified; empty where it claims none."""
    token = (authorization or "").partition(" ")[2].strip()
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, UnauthenticatedCaller):
        return ""
    return str(claims.get("iss", ""))
