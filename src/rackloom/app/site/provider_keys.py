"""The signing keys of an identity provider: from a file, an address, or by OpenID Connect discovery.

An issuer that is configured with neither a file nor an address is read from its discovery document, at
`<issuer>/.well-known/openid-configuration` (OpenID Connect Discovery 1.0). The `issuer` in the document must
equal the configured one exactly, and `jwks_uri` must be https. It may be at another host, as with some public
providers, because the document came over a verified connection. The document is read with each refresh, so
that a provider may move its keys.

Every fetch is over https with a verified certificate (`ca_file` names the authority of a private provider),
follows no redirect, and is bounded in size and in total time. A key counts only for signatures, and for the
one asymmetric algorithm that its type and the configuration allow. The document's list of algorithms is
not used. Keys without an id are left out.

Only the public members of a key are read (RFC 7517, RFC 7518, RFC 8037). From a private RSA exponent without
its primes the library would compute them, which takes seconds for a made-up one. Sizes and the number of keys
are bounded, so that reading a key set never holds up the process. An entry that cannot be used is left out,
and the others count.
"""

import asyncio
import ssl
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
import jwt

from rackloom.app.config import IssuerConfig
from rackloom.carve.api.auth import Algorithm, TrustedKey
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

FETCH_SECONDS = 10.0
"""The time limit for the document and the keys together."""
MAX_BYTES = 1 << 20
MAX_KEYS = 100
"""The most keys in a key set, of all kinds."""
_PUBLIC_MEMBERS = ("kty", "kid", "use", "alg", "n", "e", "crv", "x", "y")
_MAX_CHARACTERS = {"n": 1366, "e": 11}
"""The most characters of base64url without padding: 8192 bits and 8 bytes."""
_ALGORITHM_OF: dict[tuple[str | None, str | None], Algorithm] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
    ("OKP", "Ed448"): "EdDSA",
}
"""The algorithm by type and curve."""


class NoUsableKeys(Refused):
    """The provider answered with a key set, and none of its keys may be used: it withdrew the old ones."""


async def read_keys(issuer: IssuerConfig) -> list[TrustedKey]:
    """The keys that the issuer signs with now.

    Raises NoUsableKeys for a key set without them, and Refused for content that is no key set. Any other
    failure has the error of its library.
    """
    if issuer.jwks_file is not None:
        return trusted_keys(await asyncio.to_thread(issuer.jwks_file.read_bytes), issuer)
    verify = True if issuer.ca_file is None else ssl.create_default_context(cafile=issuer.ca_file)
    async with (
        asyncio.timeout(FETCH_SECONDS),
        httpx2.AsyncClient(timeout=FETCH_SECONDS, verify=verify) as client,
    ):
        url = issuer.jwks_url or https_address(await discovered_document(client, issuer), "jwks_uri")
        return trusted_keys(await _fetch(client, url), issuer)


async def discovered_document(client: httpx2.AsyncClient, issuer: IssuerConfig) -> dict[str, Any]:
    """The discovery document of an issuer. Raises Refused if it is not about this issuer."""
    document = json_object(
        await _fetch(client, issuer.discovery_url), f"the discovery document of {issuer.issuer}"
    )
    if document.get("issuer") != issuer.issuer:
        raise Refused(
            f"the discovery document of {issuer.issuer} is about {document.get('issuer')!r}",
            nearest_fix="let the issuer be written exactly as in its document",
        )
    return document


def https_address(document: dict[str, Any], name: str) -> str:
    """An address that a discovery document names. Raises Refused if it is not https."""
    url = document.get(name)
    if not isinstance(url, str) or not url.startswith("https://"):
        raise Refused(f"the discovery document of {document['issuer']} names no https {name}")
    return url


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """A provider's content for `name`. Raises Refused if it is not a JSON object."""
    try:
        value = decode_json(content, name)
    except Undecodable:
        value = None
    if not isinstance(value, dict):
        raise Refused(f"{name} is no JSON object")
    return value


async def _fetch(client: httpx2.AsyncClient, url: str) -> bytes:
    # Uncompressed: a small reply must not become a large one.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    status, content = await read_answer(client.stream("GET", url, headers=headers), url)
    if status != httpx2.codes.OK:
        raise Refused(f"{url} answers {status}; redirects are not followed")
    return content


async def read_answer(request: AbstractAsyncContextManager[httpx2.Response], url: str) -> tuple[int, bytes]:
    """Status and body of an answer. Raises Refused if it is too large."""
    async with request as reply:
        content = bytearray()
        async for chunk in reply.aiter_raw():
            content += chunk
            if len(content) > MAX_BYTES:
                raise Refused(f"{url} is larger than {MAX_BYTES} bytes")
        return reply.status_code, bytes(content)


def trusted_keys(jwks: bytes, issuer: IssuerConfig) -> list[TrustedKey]:
    """The signing keys of a key set, each for one allowed algorithm.

    Raises NoUsableKeys if there are none, and Refused if it is not a key set.
    """
    entries = json_object(jwks, f"the key set of {issuer.issuer}").get("keys")
    if not isinstance(entries, list):
        raise Refused(f"the key set of {issuer.issuer} has no list of keys")
    if len(entries) > MAX_KEYS:
        raise Refused(f"the key set of {issuer.issuer} has more than {MAX_KEYS} keys")
    keys = [key for entry in entries if (key := _trusted_key(entry, issuer)) is not None]
    if not keys:
        raise NoUsableKeys(
            f"the key set of {issuer.issuer} has no key for {', '.join(issuer.algorithms)}",
            nearest_fix="let `algorithms` name what its signing keys are for, each with a kid and an alg",
        )
    return keys


def _trusted_key(entry: Any, issuer: IssuerConfig) -> TrustedKey | None:
    """The key of an entry of a key set, or None if it is not for signatures, not allowed, or invalid."""
    if not isinstance(entry, dict):
        return None
    public = {name: entry[name] for name in _PUBLIC_MEMBERS if entry.get(name) is not None}
    if not all(isinstance(value, str) for value in public.values()):
        return None
    algorithm = _ALGORITHM_OF.get((public.get("kty"), public.get("crv")))
    if algorithm not in issuer.algorithms or public.get("alg", algorithm) != algorithm:
        return None
    if not public.get("kid") or public.get("use", "sig") != "sig":
        return None
    if any(len(public.get(name, "").rstrip("=")) > most for name, most in _MAX_CHARACTERS.items()):
        return None
    try:
        return TrustedKey(public["kid"], algorithm, jwt.PyJWK(public, algorithm).key)
    except (jwt.PyJWTError, ValueError):
        return None
