"""Tokens for the embedded service: it is its own issuer, with one Ed25519 key in its home."""

import os
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rackloom.carve.api.auth import Role, TokenVerifier, TrustedKey
from rackloom.errors import Refused

ISSUER = "rackloom"
AUDIENCE = "rackloom"
KEY_FILE = "token-ed25519.pem"


class LocalIssuer:
    """Mints tokens that `verifier` believes. The key is made at first use, readable by its owner only."""

    def __init__(self, keys: Path) -> None:
        """`keys` is the directory of the key, made when it is missing."""
        self._key = _load_or_make(keys / KEY_FILE)
        raw = self._key.public_key().public_bytes_raw()
        self._key_id = sha256(raw).hexdigest()[:16]

    def mint(self, org: str, roles: Sequence[str], now: float, ttl: float) -> str:
        """A token that gives `roles` in `org` from `now` for `ttl` seconds. Refused for an unknown role."""
        unknown = sorted(set(roles) - {role.value for role in Role})
        if unknown:
            raise Refused(f"no role is called {', '.join(unknown)}", nearest_fix=f"use {', '.join(Role)}")
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": f"local@{org.lower()}",
            "iat": int(now),
            "exp": int(now + ttl),
            "orgs": {org.lower(): [str(role) for role in roles]},
        }
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": self._key_id})

    def verifier(self, clock: Callable[[], float] = time.time) -> TokenVerifier:
        """Verifies this issuer's tokens and no others."""
        key = TrustedKey(self._key_id, "EdDSA", self._key.public_key())
        return TokenVerifier([key], issuer=ISSUER, audience=AUDIENCE, clock=clock)


_NEW_KEY = "restore it, or remove it to have a new one made (tokens of the old one end)"


def _load_or_make(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        _make(path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be used: {error}", nearest_fix=_NEW_KEY) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused(f"{path} holds no Ed25519 private key", nearest_fix=_NEW_KEY)
    return key


def _make(path: Path) -> None:
    """Write a new key so that a reader sees all of it or nothing, and the first of two makers wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(
            Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
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
