"""Trusted issuers: own keys, which are read again, discovery, and floods of unknown keys."""

import asyncio
import base64
import json
import os
import time
from datetime import timedelta

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.app.identity_provider import Provider, served
from tests.waiting import PATIENCE

from rackloom.app.config import IssuerConfig
from rackloom.app.site.issuers import ASKED_SECONDS, MAX_REASON, IssuerVerifier
from rackloom.app.site.provider_keys import MAX_BYTES, MAX_KEYS, trusted_keys
from rackloom.carve.api.auth import UnauthenticatedCaller
from rackloom.errors import Refused, Retry

NOW = 1000.0
MAKERS = {
    "RS256": (lambda: rsa.generate_private_key(65537, 2048), jwt.algorithms.RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), jwt.algorithms.ECAlgorithm),
    "EdDSA": (Ed25519PrivateKey.generate, jwt.algorithms.OKPAlgorithm),
}


class Signer:
    """An issuer with one key and its key set in a file."""

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
    assert loaded(signer.issuer()).verify(signer.token(), "acme").subject == "https://one#s"


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
    "content",
    [
        "",
        "{}",
        "null",
        "[]",
        "[" * 100_000,
        '{"keys": 5}',
        json.dumps({"keys": [{}] * (MAX_KEYS + 1)}),
    ],
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


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"kty": "RSA", "alg": ["RS256"], "n": "AQAB", "e": "AQAB", "kid": "one"}],
        [{"kty": "oct", "k": "AAAA", "kid": "one"}],
        [{"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "one", "use": "enc"}],
    ],
)
def test_a_key_set_without_usable_keys_withdraws_the_old_ones(signers, keys):
    signer = signers[0]
    verifier = loaded(signer.issuer())
    token = signer.token()
    verifier.verify(token, "acme")
    signer.file.write_text(json.dumps({"keys": keys}))
    asyncio.run(verifier.load())
    for refused in (token, signer.token(jti="another")):
        with pytest.raises(UnauthenticatedCaller):
            verifier.verify(refused, "acme")
    (doubt,) = verifier.doubts().values()
    assert "has no key for EdDSA" in doubt


@pytest.mark.parametrize("fields", [{"use": "enc"}, {"alg": "HS256"}, {"kid": ""}])
def test_keys_for_something_else_are_not_taken(signers, fields):
    signer = signers[0]
    signer.rotate("one", **fields)
    with pytest.raises(Refused):
        trusted_keys(signer.file.read_bytes(), signer.issuer())


def test_an_algorithm_that_is_not_allowed_is_not_taken(signers):
    with pytest.raises(Refused, match="RS256"):
        trusted_keys(signers[0].file.read_bytes(), signers[0].issuer("RS256"))


def number(bits):
    return base64.urlsafe_b64encode(b"\xff" + os.urandom(bits // 8 - 2) + b"\x01").rstrip(b"=").decode()


def key_set(*keys):
    return json.dumps({"keys": keys}).encode()


@pytest.mark.parametrize("algorithm", MAKERS)
def test_of_a_private_key_only_the_public_half_is_taken(tmp_path, algorithm):
    signer = Signer(tmp_path, "one", algorithm)
    private = json.loads(MAKERS[algorithm][1].to_jwk(signer.key))
    assert "d" in private
    signer.file.write_bytes(key_set(private | {"kid": "one"}))
    assert loaded(signer.issuer()).verify(signer.token(), "acme").subject == "https://one#s"


def test_a_made_up_private_exponent_costs_nothing(signers):
    # To find the primes that belong to it takes seconds for each key, and there are none.
    made_up = {"kty": "RSA", "kid": "one", "n": number(8192), "e": "AQAB", "d": number(8192)}
    before = time.process_time()
    keys = trusted_keys(key_set(*[made_up] * 5), signers[0].issuer("RS256"))
    assert time.process_time() - before < 1
    assert {key.public_key.key_size for key in keys} == {8192}


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "RSA", "n": number(8200), "e": "AQAB"},
        {"kty": "RSA", "n": number(2048), "e": number(72)},
        {"kty": "RSA", "n": number(2048), "e": ["AQAB"]},
        {"kty": "RSA", "n": "AQAB"},
        {"kty": "EC", "crv": "P-384", "x": number(384), "y": number(384), "alg": "ES256"},
        {"kty": "EC", "x": number(256), "y": number(256)},
        {"kty": ["RSA"]},
        [],
        None,
    ],
)
def test_a_key_that_cannot_be_used_is_left_out(tmp_path, key):
    signer = Signer(tmp_path, "one", "RS256")
    good = json.loads(signer.file.read_text())["keys"][0]
    bad = key | {"kid": "two"} if isinstance(key, dict) else key
    keys = trusted_keys(key_set(bad, good), signer.issuer("RS256", "ES256"))
    assert [key.key_id for key in keys] == ["one"]


def test_a_set_of_too_many_keys_is_refused(signers):
    key = json.loads(signers[0].file.read_text())["keys"][0]
    assert len(trusted_keys(key_set(*[key] * MAX_KEYS), signers[0].issuer())) == MAX_KEYS
    with pytest.raises(Refused, match=f"more than {MAX_KEYS} keys"):
        trusted_keys(key_set(*[key] * (MAX_KEYS + 1)), signers[0].issuer())


def claims(org="acme"):
    return {"aud": "rackloom", "sub": "s", "orgs": {org: []}}


def discovered(provider, ground, **settings):
    return IssuerConfig(issuer=provider.url, audience="rackloom", ca_file=ground.ca, **settings)


def when_served(ground, authority, provider, scenario, **settings):
    """Run `scenario` with a verifier that has read the keys of the provider once, if it could."""

    async def run():
        async with served(ground.directory, authority, provider):
            verifier = IssuerVerifier([discovered(provider, ground, **settings)], lambda: provider.now)
            await verifier.load()
            await scenario(verifier)

    provider.now = time.time()
    asyncio.run(run())


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"issuer": "https://localhost/other"}, "is about 'https://localhost/other'"),
        ({"issuer": None}, "is about None"),
        (None, "is no JSON object"),
        ({"jwks_uri": "https://localhost:99999/keys"}, "keys were read never"),
        ({"jwks_uri": "https://\0"}, "keys were read never"),
        ({"jwks_uri": "http://localhost/keys"}, "names no https jwks_uri"),
        ({"jwks_uri": None}, "names no https jwks_uri"),
        ({"padding": "x" * MAX_BYTES}, f"is larger than {MAX_BYTES} bytes"),
    ],
)
def test_a_discovery_document_that_is_wrong_gives_no_keys(ground, authority, document, reason):
    provider = Provider("/one")
    provider.document = document

    async def scenario(verifier):
        with pytest.raises(Retry, match="could not be read yet"):
            verifier.verify(f"Bearer {provider.token(claims())}", "acme")
        (doubt,) = verifier.doubts().values()
        assert reason in doubt

    when_served(ground, authority, provider, scenario)
    assert provider.fetched == ["/.well-known/openid-configuration"]


@pytest.mark.parametrize(
    "document", [{"issuer": "A" * 900_000}, {"jwks_uri": f"https://localhost/{'a' * 900_000}"}]
)
def test_a_reason_is_cut(ground, authority, document):
    provider = Provider("/one")
    provider.document = document

    async def scenario(verifier):
        (doubt,) = verifier.doubts().values()
        assert len(doubt) < MAX_REASON + 100

    when_served(ground, authority, provider, scenario)


def test_redirects_are_not_followed(ground, authority):
    provider = Provider("/one")
    provider.redirect = "https://localhost:1/keys"

    async def scenario(verifier):
        (doubt,) = verifier.doubts().values()
        assert "answers 307; redirects are not followed" in doubt

    when_served(ground, authority, provider, scenario)


def test_the_certificate_of_the_provider_is_verified(ground, authority, make_authority):
    provider = Provider("/one")

    async def scenario(verifier):
        (doubt,) = verifier.doubts().values()
        assert "CERTIFICATE_VERIFY_FAILED" in doubt

    when_served(ground, make_authority("another"), provider, scenario)
    assert provider.fetched == []


def test_keys_of_before_stay_in_use_while_the_provider_is_down(ground, authority):
    provider = Provider("/one")

    async def scenario(verifier):
        token = f"Bearer {provider.token(claims())}"
        provider.is_down = True
        provider.now += 60
        await verifier.load()
        assert verifier.verify(token, "acme").subject == f"{provider.url}#s"
        assert verifier.key_age(provider.url) == 60
        (doubt,) = verifier.doubts().values()
        assert "answers 503" in doubt

    when_served(ground, authority, provider, scenario)


def test_a_flood_of_unknown_key_ids_causes_one_reading(ground, authority):
    provider = Provider("/one")

    async def scenario(verifier):
        refreshing = asyncio.create_task(verifier.refresh())
        known, started = f"Bearer {provider.token(claims())}", len(provider.fetched)
        provider.rotate("second")
        rotated = f"Bearer {provider.token(claims())}"
        with pytest.raises(UnauthenticatedCaller):
            verifier.verify(rotated, "acme")
        provider.now += ASKED_SECONDS
        for number in range(100):
            with pytest.raises(Retry, match="not known yet"):
                verifier.verify(f"Bearer {provider.token(claims(), kid=str(number))}", "acme")
        async with asyncio.timeout(PATIENCE):
            while is_undecided(verifier, rotated):
                await asyncio.sleep(0.01)
        verifier.verify(rotated, "acme")
        for token in (known, f"Bearer {provider.token(claims(), kid='another')}"):
            with pytest.raises(UnauthenticatedCaller):
                verifier.verify(token, "acme")
        assert len(provider.fetched) == started + 2
        refreshing.cancel()

    when_served(ground, authority, provider, scenario)


def is_undecided(verifier, token):
    try:
        verifier.verify(token, "acme")
    except Retry:
        return True
    return False


def test_audiences_are_alternatives(signers):
    signer = signers[0]
    several = signer.issuer().model_copy(update={"audience": None, "audiences": ("one", "two")})
    verifier = loaded(several)
    for audience in ("one", "two", ["three", "two"]):
        assert verifier.verify(signer.token(aud=audience), "acme").org == "acme"
    for audience in ("three", [], "on"):
        with pytest.raises(UnauthenticatedCaller):
            verifier.verify(signer.token(aud=audience), "acme")
