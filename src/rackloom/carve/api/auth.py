"""Authentication: verified bearer tokens, roles in an organization, and the local issuer.

`claim_mapping` derives the caller from a verified token. A role name may carry a deployment's
prefix before its first underscore. The algorithm is a property of the trusted key and is never read from the
token, so a token cannot select another algorithm. The current time is passed in, so tokens also expire in a
simulation.

Valid tokens are remembered (`VerifiedTokens`), because verifying a signature costs a third of a read.
Times are checked for each request. A verifier never changes its keys: to trust other keys, make a new
verifier, which remembers nothing.

A token must expire (`exp`), no later than the maximum lifetime of its issuer from now. It must be valid by
now (`nbf`) and issued by now (`iat`), both with `CLOCK_SKEW` seconds for the clock of the issuer. `exp` has
no such leeway: it would prolong every token. Implausible times are refused.

`LocalIssuer` is the issuer of an embedded service. It has one Ed25519 key in its home, created at first
use and readable by the owner only. Creation is atomic: a reader sees the whole key or none, and the
first of two creators wins.
"""

import os
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import jwt
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rackloom.carve.api.claim_mapping import ClaimMapping, UnusableClaims, roles_in, subject_of
from rackloom.carve.store.values import forbidden
from rackloom.errors import Refused

# Verification.


Algorithm = Literal["EdDSA", "ES256", "RS256"]


class Role(StrEnum):
    """A role that a caller may have in an organization."""

    TENANT_ADMIN = "TENANT_ADMIN"
    PROVIDER_ADMIN = "PROVIDER_ADMIN"
    PROVIDER_VIEWER = "PROVIDER_VIEWER"


CUSTOM_ROLE_NAME = re.compile(r"[a-z][a-z0-9-]{1,62}")
"""Names of custom roles are lower-case, so they cannot be mistaken for a role above."""


def titles(roles: Sequence[Role]) -> str:
    """Alternative roles as a message names them."""
    return " or ".join(role.replace("_", " ").title() for role in roles)


class Side(StrEnum):
    """The side on which a caller acts for its organisation: as a tenant of sites, or as their provider."""

    TENANT = "TENANT"
    PROVIDER = "PROVIDER"


Permission = tuple[Side, str]
"""A permission that a role gives on one side, such as `instances:read`."""


class UnauthenticatedCaller(Exception):
    """The request has no valid token."""


class UnknownKey(UnauthenticatedCaller):
    """The token names a key that is not trusted, or not known yet."""


class TrustedKey(msgspec.Struct, frozen=True):
    """A public key that is trusted for one algorithm."""

    key_id: str
    algorithm: Algorithm
    public_key: Any
    """PEM text or a key object of `cryptography`."""


class Caller(msgspec.Struct, frozen=True):
    """A verified person or service, acting for one organization."""

    subject: str
    org: str
    roles: frozenset[Role]
    expires: float
    """When this identity must be proved again, in seconds since the epoch. No later than its token ends."""
    custom_roles: frozenset[str] = frozenset()
    """Names that may be those of custom roles of the organisation."""
    held: frozenset[Permission] = frozenset()
    """The permissions of the custom roles."""
    account_ends: float | None = None
    """The end of the caller's service account, or None if it has none."""

    def require(self, *roles: Role) -> None:
        """Refuse a caller that has none of `roles`."""
        if self.roles.isdisjoint(roles):
            raise forbidden(f"User does not have {titles(roles)} role with org")


DEFAULT_LIFETIME = 24 * 3600.0
"""Seconds for which a token may be valid."""
CLOCK_SKEW = 60.0
"""Seconds by which the clock of an issuer may be ahead, for `iat` and `nbf`."""
INVALID_MESSAGE = "Invalid authorization token in request"
_OTHER_KEY_MAY_FIT = (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError, jwt.InvalidKeyError)
_LATEST_TIME = 1e12
"""No plausible time is later: some 30,000 years after the epoch."""


MAX_REMEMBERED = 1024
"""The number of tokens that are remembered."""
MAX_REMEMBERED_BYTES = 8 << 10
"""The length of a token that is remembered. A longer one is verified each time."""


class VerifiedTokens:
    """The claims of tokens with a valid signature, by digest. New ones replace the least recently used.

    Only a token that passed every check is remembered, so a flood of invalid ones displaces nothing.
    """

    def __init__(self) -> None:
        self._claims: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def find(self, digest: bytes) -> dict[str, Any] | None:
        """The claims of a remembered token, or None. Callers must not change them."""
        claims = self._claims.get(digest)
        if claims is not None:
            self._claims.move_to_end(digest)
        return claims

    def remember(self, digest: bytes, claims: dict[str, Any]) -> None:
        """Remember a valid token."""
        self._claims[digest] = claims
        if len(self._claims) > MAX_REMEMBERED:
            self._claims.popitem(last=False)


class TokenVerifier:
    """Verifies the tokens of one issuer, for any of the audiences.

    `clock` gives seconds since the epoch. A token may be valid for `lifetime` seconds from now on.
    `qualifier` is put before subjects, so that those of several issuers differ.
    """

    def __init__(
        self,
        keys: Sequence[TrustedKey],
        *,
        issuer: str,
        audience: str | Sequence[str],
        clock: Callable[[], float],
        lifetime: float = DEFAULT_LIFETIME,
        mapping: ClaimMapping | None = None,
        qualifier: str = "",
    ) -> None:
        # A key set may have several keys of one id (RFC 7517, 4.5).
        self._keys: defaultdict[str, list[TrustedKey]] = defaultdict(list)
        for key in keys:
            self._keys[key.key_id].append(key)
        self._issuer = issuer
        self._audience = audience
        self._clock = clock
        self._lifetime = lifetime
        self._verified = VerifiedTokens()
        self._mapping = mapping or ClaimMapping()
        self._qualifier = qualifier

    def verify(self, authorization: str | None, org: str) -> Caller:
        """The caller behind an Authorization header, for `org`.

        Raises UnauthenticatedCaller without a valid token, Rejected (forbidden) if it does not name `org`.
        """
        claims = self._claims(_bearer_token(authorization))
        wanted = org.lower()
        try:
            subject = self._qualifier + subject_of(claims, self._mapping)
        except UnusableClaims as error:
            raise UnauthenticatedCaller(str(error)) from error
        names = roles_in(claims, self._mapping, wanted)
        roles, custom = frozenset(_roles_by_name(names)), frozenset(filter(CUSTOM_ROLE_NAME.fullmatch, names))
        return Caller(subject, wanted, roles, float(claims["exp"]), custom)

    def _claims(self, token: str) -> dict[str, Any]:
        # By digest, so that the memory of the process holds no token.
        digest = sha256(token.encode(errors="surrogatepass")).digest()
        claims = self._verified.find(digest)
        if claims is not None:
            self._check_times(claims)
            return claims
        claims = self._signed_claims(token)
        self._check_times(claims)
        if len(token) <= MAX_REMEMBERED_BYTES:
            self._verified.remember(digest, claims)
        return claims

    def _signed_claims(self, token: str) -> dict[str, Any]:
        try:
            keys = self._keys.get(jwt.get_unverified_header(token).get("kid", ""))
            if keys is None:
                raise UnknownKey(INVALID_MESSAGE)
            *others, last = keys
            for key in others:
                with suppress(*_OTHER_KEY_MAY_FIT):
                    return self._decoded(token, key)
            return self._decoded(token, last)
        except jwt.InvalidSignatureError as error:
            raise UnauthenticatedCaller(INVALID_MESSAGE) from error
        except (jwt.DecodeError, RecursionError) as error:
            raise UnauthenticatedCaller("Error parsing the token claims") from error
        except jwt.PyJWTError as error:
            # Also a key that its algorithm does not take, which is no error of the token to the library.
            raise UnauthenticatedCaller(INVALID_MESSAGE) from error

    def _decoded(self, token: str, key: TrustedKey) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            key.public_key,
            algorithms=[key.algorithm],
            issuer=self._issuer,
            audience=self._audience,
            # `_check_times` compares the times: the library would use the machine's clock.
            options={
                "require": ["exp", "iss", "aud", "sub"],
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
        return claims

    def _check_times(self, claims: dict[str, Any]) -> None:
        now = self._clock()
        ends, begins, issued = claims["exp"], claims.get("nbf", 0), claims.get("iat", 0)
        if not all(map(_is_time, (ends, begins, issued))):
            raise UnauthenticatedCaller("Error parsing the token claims")
        if ends <= now:
            raise UnauthenticatedCaller("Authorization token in request has expired")
        if ends > now + self._lifetime:
            hours = f"{self._lifetime / 3600:g} hours"
            raise UnauthenticatedCaller(f"Authorization token in request is valid for longer than {hours}")
        if max(begins, issued) > now + CLOCK_SKEW:
            raise UnauthenticatedCaller("Authorization token in request is not valid yet")


def _bearer_token(authorization: str | None) -> str:
    if authorization is None:
        raise UnauthenticatedCaller("Request is missing authorization header")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedCaller("Invalid Authorization header format")
    return token.strip()


def _roles_by_name(names: Sequence[str]) -> list[Role]:
    """Roles by name. The part before the first underscore may be a prefix of the deployment."""
    known = {role.value: role for role in Role}
    return [known[part] for name in names for part in (name, name.partition("_")[2]) if part in known]


def _is_time(value: object) -> bool:
    # False for NaN too: it compares with nothing.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LATEST_TIME


# The local issuer.


LOCAL_ISSUER = "rackloom"
LOCAL_AUDIENCE = "rackloom"
LOCAL_KEY_FILE = "token-ed25519.pem"
LOCAL_LIFETIME = 366 * 24 * 3600.0
"""Seconds for which a token of an embedded service may be valid. There is no login that renews it."""


class LocalIssuer:
    """Issues tokens that `verifier` accepts. The key is created at first use, readable by its owner only."""

    def __init__(self, keys: Path) -> None:
        """`keys` is the directory of the key, created when it is missing."""
        self._key = _load_or_create_key(keys / LOCAL_KEY_FILE)
        raw = self._key.public_key().public_bytes_raw()
        self._key_id = sha256(raw).hexdigest()[:16]

    def mint(self, org: str, roles: Sequence[str], now: float, ttl: float) -> str:
        """A token that gives `roles` in `org` from `now` for `ttl` seconds.

        Refused for a role that is neither built-in nor named as a custom one.
        """
        unknown = sorted(name for name in {*roles}.difference(Role) if not CUSTOM_ROLE_NAME.fullmatch(name))
        if unknown:
            raise Refused(f"no role is called {', '.join(unknown)}", nearest_fix=f"use {', '.join(Role)}")
        claims = {
            "iss": LOCAL_ISSUER,
            "aud": LOCAL_AUDIENCE,
            "sub": f"local@{org.lower()}",
            "iat": int(now),
            "exp": int(now + ttl),
            "orgs": {org.lower(): [str(role) for role in roles]},
        }
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": self._key_id})

    def verifier(self, clock: Callable[[], float] = time.time) -> TokenVerifier:
        """Verifies this issuer's tokens and no others."""
        key = TrustedKey(self._key_id, "EdDSA", self._key.public_key())
        return TokenVerifier(
            [key], issuer=LOCAL_ISSUER, audience=LOCAL_AUDIENCE, clock=clock, lifetime=LOCAL_LIFETIME
        )


_NEW_KEY_FIX = "restore it, or remove it to have a new one made (tokens of the old one end)"


def _load_or_create_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        _create_key(path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be used: {error}", nearest_fix=_NEW_KEY_FIX) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused(f"{path} holds no Ed25519 private key", nearest_fix=_NEW_KEY_FIX)
    return key


def _create_key(path: Path) -> None:
    """Write a new key so that a reader sees all of it or nothing, and the first of two creators wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(
            Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.flush()
        os.fsync(file.fileno())
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink()
