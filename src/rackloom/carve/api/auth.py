"""Who is calling: bearer tokens, verified, and the roles they give in an organisation.

The algorithm is a property of the trusted key and never read from the token, so a token cannot talk the
verifier into another one. Time is passed in, so that tokens expire in a simulation too.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Literal

import jwt
import msgspec

from rackloom.carve.site.problems import forbidden

Algorithm = Literal["EdDSA", "ES256", "RS256"]


class Role(StrEnum):
    """What a person may do for an organisation."""

    TENANT_ADMIN = "TENANT_ADMIN"
    PROVIDER_ADMIN = "PROVIDER_ADMIN"
    PROVIDER_VIEWER = "PROVIDER_VIEWER"


class Unauthenticated(Exception):
    """The caller did not prove who it is."""


class TrustedKey(msgspec.Struct, frozen=True):
    """A public key whose signatures are believed, for one algorithm."""

    key_id: str
    algorithm: Algorithm
    public_key: Any
    """PEM text or a key object of `cryptography`."""


class Caller(msgspec.Struct, frozen=True):
    """A verified person or service, acting for one organisation."""

    subject: str
    org: str
    roles: frozenset[Role]
    expires: float
    """When the token ends, in seconds since the epoch."""

    def require(self, *roles: Role) -> None:
        """Refuse a caller that has none of `roles`."""
        if self.roles.isdisjoint(roles):
            wanted = " or ".join(role.replace("_", " ").title() for role in roles)
            raise forbidden(f"User does not have {wanted} role with org")


class TokenVerifier:
    """Verifies the tokens of one issuer. `clock` gives seconds since the epoch."""

    def __init__(
        self, keys: Sequence[TrustedKey], *, issuer: str, audience: str, clock: Callable[[], float]
    ) -> None:
        self._keys = {key.key_id: key for key in keys}
        self._issuer = issuer
        self._audience = audience
        self._clock = clock

    def verify(self, authorization: str | None, org: str) -> Caller:
        """The caller behind an Authorization header, for `org`.

        Raises Unauthenticated for a header that proves nothing, Rejected (forbidden) for a stranger to `org`.
        """
        claims = self._claims(_bearer(authorization))
        wanted = org.lower()
        orgs = claims.get("orgs")
        names = orgs.get(wanted) if isinstance(orgs, dict) else None
        if not isinstance(names, list):
            raise forbidden(f"Failed to validate membership for org: {org}")
        return Caller(str(claims["sub"]), wanted, frozenset(_roles(names)), float(claims["exp"]))

    def _claims(self, token: str) -> dict[str, Any]:
        try:
            key = self._keys.get(jwt.get_unverified_header(token).get("kid", ""))
            if key is None:
                raise Unauthenticated("Invalid authorization token in request")
            claims = jwt.decode(
                token,
                key.public_key,
                algorithms=[key.algorithm],
                issuer=self._issuer,
                audience=self._audience,
                # Times are compared below: the library would take them from the machine's clock.
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidSignatureError as error:
            raise Unauthenticated("Invalid authorization token in request") from error
        except jwt.DecodeError as error:
            raise Unauthenticated("Error parsing the token claims") from error
        except jwt.InvalidTokenError as error:
            raise Unauthenticated("Invalid authorization token in request") from error
        self._check_times(claims)
        return claims

    def _check_times(self, claims: dict[str, Any]) -> None:
        now = self._clock()
        if not _is_number(claims["exp"]) or not _is_number(claims.get("nbf", 0)):
            raise Unauthenticated("Error parsing the token claims")
        if claims["exp"] <= now:
            raise Unauthenticated("Authorization token in request has expired")
        if claims.get("nbf", 0) > now:
            raise Unauthenticated("Authorization token in request is not valid yet")


def _bearer(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthenticated("Request is missing authorization header")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("Invalid Authorization header format")
    return token.strip()


def _roles(names: list[Any]) -> list[Role]:
    """Roles by name; the first underscore-word is a prefix of the deployment and means nothing."""
    known = {role.value: role for role in Role}
    texts = [name for name in names if isinstance(name, str)]
    return [known[part] for name in texts for part in (name, name.partition("_")[2]) if part in known]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
