"""Trusted issuers: each with its own keys, which are read again and never because of a token."""

import asyncio
import json
from datetime import timedelta

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rackloom.app.config import IssuerConfig
from rackloom.app.site.issuers import IssuerVerifier, trusted_keys
from rackloom.carve.api.auth import UnauthenticatedCaller
from rackloom.errors import Refused

NOW = 1000.0
MAKERS = {
    "RS256": (lambda: rsa.generate_private_key(65537, 2048), jwt.algorithms.RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), jwt.algorithms.ECAlgorithm),
    "EdDSA": (Ed25519PrivateKey.generate, jwt.algorithms.OKPAlgorithm),
}


class Signer:
    """An issuer with one key, whose key set lies in a file."""

    def __init__(self, directory, name, algorithm="EdDSA"):
        self.name, self.algorithm = f"https://{name}", algorithm
        self.file = directory / f"{name}.json"
        self.rotate("one")

    def rotate(self, kid, /, **fields):
        make, kind = MAKERS[self.algorithm]
        self.kid, self.key = kid, make()
        jwk = json.loads(kind.to_jwk(self.key.public_key()))
        self.file.write_text(json.dumps({"keys": [jwk | {"kid": kid} | fields]}))

    def issuer(self, *algorithms):
        return IssuerConfig(
            issuer=self.name,
            audience="rackloom",
            jwks_file=self.file,
            algorithms=algorithms or (self.algorithm,),
        )

    def token(self, **claims):
        content = {"iss": self.name, "aud": "rackloom", "sub": "s", "exp": NOW + 60, "orgs": {"acme": []}}
        return "Bearer " + jwt.encode(
            content | claims, self.key, algorithm=self.algorithm, headers={"kid": self.kid}
        )


@pytest.fixture
def signers(tmp_path):
    return Signer(tmp_path, "first"), Signer(tmp_path, "second", "ES256")


def loaded(*issuers):
    verifier = IssuerVerifier(issuers, lambda: NOW)
    asyncio.run(verifier.load())
    return verifier


@pytest.mark.parametrize("algorithm", MAKERS)
def test_every_algorithm(tmp_path, algorithm):
    signer = Signer(tmp_path, "one", algorithm)
    assert loaded(signer.issuer()).verify(signer.token(), "acme").subject == "s"


def test_an_issuer_speaks_only_for_itself(signers):
    first, second = signers
    verifier = loaded(first.issuer(), second.issuer())
    for signer in signers:
        assert verifier.verify(signer.token(), "acme").org == "acme"
    for forged in (
        first.token(iss=second.name),
        first.token(iss="https://nobody"),
        first.token(iss=""),
        first.token(aud="other"),
        first.token(exp=NOW - 1),
        "Bearer x.y.z",
        "Bearer ",
        "Basic x",
        None,
    ):
        with pytest.raises(UnauthenticatedCaller):
            verifier.verify(forged, "acme")


def test_a_token_lasts_as_long_as_its_issuer_is_trusted_for(signers):
    first, second = signers
    short = first.issuer().model_copy(update={"max_token_lifetime": timedelta(minutes=5)})
    verifier = loaded(short, second.issuer())
    assert verifier.verify(first.token(exp=NOW + 300), "acme").expires == NOW + 300
    assert verifier.verify(second.token(exp=NOW + 24 * 3600), "acme").expires == NOW + 24 * 3600
    for longer in (first.token(exp=NOW + 301), second.token(exp=NOW + 24 * 3600 + 1)):
        with pytest.raises(UnauthenticatedCaller, match="valid for longer than"):
            verifier.verify(longer, "acme")


def test_keys_are_rotated_and_old_ones_end(signers):
    signer = signers[0]
    verifier = loaded(signer.issuer())
    old = signer.token()
    signer.rotate("two")
    with pytest.raises(UnauthenticatedCaller):
        verifier.verify(signer.token(), "acme")
    asyncio.run(verifier.load())
    verifier.verify(signer.token(), "acme")
    with pytest.raises(UnauthenticatedCaller):
        verifier.verify(old, "acme")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "AAAA", "kid": "one"}]}']
)
def test_keys_that_cannot_be_read_leave_the_good_ones(signers, content):
    signer = signers[0]
    verifier = loaded(signer.issuer())
    token = signer.token()
    signer.file.write_text(content)
    asyncio.run(verifier.load())
    verifier.verify(token, "acme")
    signer.file.unlink()
    asyncio.run(verifier.load())
    verifier.verify(token, "acme")


@pytest.mark.parametrize("fields", [{"use": "enc"}, {"alg": "HS256"}, {"kid": ""}])
def test_keys_for_something_else_are_not_taken(signers, fields):
    signer = signers[0]
    signer.rotate("one", **fields)
    with pytest.raises((Refused, jwt.PyJWTError)):
        trusted_keys(signer.file.read_bytes(), signer.issuer())


def test_an_algorithm_that_is_not_allowed_is_not_taken(signers):
    with pytest.raises(Refused, match="RS256"):
        trusted_keys(signers[0].file.read_bytes(), signers[0].issuer("RS256"))
