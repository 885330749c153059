"""Authentication: each way in which a token can be wrong, and the refusal that it gets."""

import base64
import itertools
import json
import stat
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rackloom.carve.api import auth
from rackloom.carve.api.auth import (
    LOCAL_AUDIENCE,
    LOCAL_ISSUER,
    LOCAL_KEY_FILE,
    LOCAL_LIFETIME,
    Caller,
    LocalIssuer,
    Role,
    TokenVerifier,
    TrustedKey,
    UnauthenticatedCaller,
)
from rackloom.carve.store.values import Rejected
from rackloom.errors import Refused

NOW = 1000.0
KEY = Ed25519PrivateKey.generate()
CLAIMS = {
    "iss": "issuer",
    "aud": "audience",
    "sub": "somebody",
    "exp": int(NOW) + 60,
    "orgs": {"demo": ["NICO_TENANT_ADMIN"]},
}


def verifier(*keys: TrustedKey) -> TokenVerifier:
    trusted = keys or (TrustedKey("k", "EdDSA", KEY.public_key()),)
    return TokenVerifier(trusted, issuer="issuer", audience="audience", clock=lambda: NOW)


def signed(key: Any = KEY, algorithm: str = "EdDSA", kid: str = "k", **changes: Any) -> str:
    claims = {name: value for name, value in (CLAIMS | changes).items() if value is not None}
    return "Bearer " + jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid})


def unsigned() -> str:
    parts = ({"alg": "none", "kid": "k"}, CLAIMS)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return "Bearer " + ".".join([*encoded, ""])


def public_key_as_hmac_secret() -> str:
    secret = KEY.public_key().public_bytes_raw().hex().encode()
    return signed(secret, "HS256")


INVALID = "Invalid authorization token in request"
TOO_LONG = "Authorization token in request is valid for longer than 24 hours"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "Request is missing authorization header"),
        ("", "Invalid Authorization header format"),
        ("Basic dXNlcg==", "Invalid Authorization header format"),
        ("Bearer ", "Invalid Authorization header format"),
        ("Bearer garbage", "Error parsing the token claims"),
        ("Bearer a.b.c", "Error parsing the token claims"),
        (unsigned(), INVALID),
        (public_key_as_hmac_secret(), INVALID),
        (signed(Ed25519PrivateKey.generate()), INVALID),
        (signed(kid="another"), INVALID),
        (signed(iss="another"), INVALID),
        (signed(aud="another"), INVALID),
        (signed(aud=None), INVALID),
        (signed(iss=None), INVALID),
        (signed(sub=None), INVALID),
        (signed(exp=None), INVALID),
        (signed(exp=int(NOW)), "Authorization token in request has expired"),
        (signed(exp=int(NOW) - 3600), "Authorization token in request has expired"),
        (signed(exp="tomorrow"), "Error parsing the token claims"),
        (signed(exp=True), "Error parsing the token claims"),
        (signed(exp=[int(NOW) + 60]), "Error parsing the token claims"),
        (signed(exp=float("nan")), "Error parsing the token claims"),
        (signed(exp=float("inf")), "Error parsing the token claims"),
        (signed(exp=10**400), "Error parsing the token claims"),
        (signed(exp=int(NOW) + 24 * 3600 + 1), TOO_LONG),
        (signed(exp=4_000_000_000), TOO_LONG),
        (signed(nbf="soon"), "Error parsing the token claims"),
        (signed(nbf=float("nan")), "Error parsing the token claims"),
        (signed(nbf=int(NOW) + 61), "Authorization token in request is not valid yet"),
        (signed(nbf=4_000_000_000), "Authorization token in request is not valid yet"),
        (signed(iat="now"), "Error parsing the token claims"),
        (signed(iat=int(NOW) + 61), "Authorization token in request is not valid yet"),
        (signed(iat=4_000_000_000), "Authorization token in request is not valid yet"),
    ],
)
def test_a_wrong_token_is_told_what_is_wrong(header: str | None, message: str) -> None:
    with pytest.raises(UnauthenticatedCaller) as refusal:
        verifier().verify(header, "demo")
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "times",
    [{"exp": int(NOW) + 24 * 3600}, {"exp": NOW + 0.5}, {"iat": int(NOW) + 60}, {"nbf": int(NOW) + 60}],
)
def test_a_token_within_the_limits_is_believed(times: dict[str, float]) -> None:
    assert verifier().verify(signed(**times), "demo").expires == times.get("exp", NOW + 60)


def test_a_local_token_lasts_a_year_and_no_longer(tmp_path: Path) -> None:
    issuer = LocalIssuer(tmp_path)
    known = issuer.verifier(lambda: NOW)
    year = issuer.mint("demo", ["TENANT_ADMIN"], NOW, LOCAL_LIFETIME)
    assert known.verify(f"Bearer {year}", "demo").expires == NOW + LOCAL_LIFETIME
    longer = issuer.mint("demo", ["TENANT_ADMIN"], NOW, LOCAL_LIFETIME + 1)
    with pytest.raises(UnauthenticatedCaller, match="longer than 8784 hours"):
        known.verify(f"Bearer {longer}", "demo")


@pytest.mark.parametrize(
    "orgs", [{"other": ["TENANT_ADMIN"]}, {}, None, "demo", ["demo"], {"demo": "TENANT_ADMIN"}]
)
def test_a_stranger_to_the_org_is_refused(orgs: Any) -> None:
    with pytest.raises(Rejected, match="Failed to validate membership for org: demo"):
        verifier().verify(signed(orgs=orgs), "demo")


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["TENANT_ADMIN"], {Role.TENANT_ADMIN}),
        (["FORGE_TENANT_ADMIN", "NICO_PROVIDER_VIEWER"], {Role.TENANT_ADMIN, Role.PROVIDER_VIEWER}),
        (["A_B_TENANT_ADMIN", "tenant_admin", "ADMIN", 7, None], set()),
        ([], set()),
    ],
)
def test_roles_are_read_past_the_first_word(names: list[Any], roles: set[Role]) -> None:
    assert verifier().verify(signed(orgs={"demo": names}), "Demo") == Caller(
        "somebody", "demo", frozenset(roles), NOW + 60
    )


def test_each_key_is_believed_for_its_own_algorithm_only() -> None:
    ecdsa, rsa_key = (
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(public_exponent=65537, key_size=2048),
    )
    trusting = verifier(
        TrustedKey("e", "ES256", ecdsa.public_key()), TrustedKey("r", "RS256", rsa_key.public_key())
    )
    assert trusting.verify(signed(ecdsa, "ES256", "e"), "demo").subject == "somebody"
    assert trusting.verify(signed(rsa_key, "RS256", "r"), "demo").subject == "somebody"
    with pytest.raises(UnauthenticatedCaller):
        trusting.verify(signed(rsa_key, "RS512", "r"), "demo")
    with pytest.raises(UnauthenticatedCaller):
        trusting.verify(signed(ecdsa, "ES256", "r"), "demo")


def test_keys_of_one_id_are_each_tried() -> None:
    """In any order, whether or not they are for the same algorithm."""
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    keys = [
        TrustedKey("k", "EdDSA", KEY.public_key()),
        TrustedKey("k", "EdDSA", Ed25519PrivateKey.generate().public_key()),
        TrustedKey("k", "RS256", rsa_key.public_key()),
    ]
    for order in itertools.permutations(keys):
        for token in signed(), signed(rsa_key, "RS256"):
            assert verifier(*order).verify(token, "demo").org == "demo"
        with pytest.raises(UnauthenticatedCaller):
            verifier(*order).verify(signed(Ed25519PrivateKey.generate()), "demo")


def test_a_token_for_a_key_that_its_algorithm_does_not_take_is_not_believed() -> None:
    unusable = TrustedKey("k", "RS256", "no key")
    token = jwt.encode({"sub": "x"}, rsa.generate_private_key(65537, 2048), "RS256", {"kid": "k"})
    with pytest.raises(UnauthenticatedCaller):
        verifier(unusable).verify(f"Bearer {token}", "demo")


def test_the_local_key_is_private_stable_and_made_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first, second = LocalIssuer(keys), LocalIssuer(keys)
    token = first.mint("Demo", ["TENANT_ADMIN"], NOW, 60)
    assert second.verifier(lambda: NOW).verify(f"Bearer {token}", "demo").roles == {Role.TENANT_ADMIN}
    path = keys / LOCAL_KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [LOCAL_KEY_FILE]


def test_another_homes_tokens_are_not_believed(tmp_path: Path) -> None:
    token = LocalIssuer(tmp_path / "a").mint("demo", ["TENANT_ADMIN"], NOW, 60)
    with pytest.raises(UnauthenticatedCaller, match=INVALID):
        LocalIssuer(tmp_path / "b").verifier(lambda: NOW).verify(f"Bearer {token}", "demo")


def test_local_claims_are_the_documented_ones(tmp_path: Path) -> None:
    token = LocalIssuer(tmp_path).mint("demo", ["PROVIDER_VIEWER", "TENANT_ADMIN"], NOW, 60)
    assert jwt.decode(token, options={"verify_signature": False}) == {
        "iss": LOCAL_ISSUER,
        "aud": LOCAL_AUDIENCE,
        "sub": "local@demo",
        "iat": 1000,
        "exp": 1060,
        "orgs": {"demo": ["PROVIDER_VIEWER", "TENANT_ADMIN"]},
    }


def test_a_role_that_does_not_exist_is_not_minted(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no role is called KING; use TENANT_ADMIN, PROVIDER_ADMIN"):
        LocalIssuer(tmp_path).mint("demo", ["KING"], NOW, 60)


def test_nothing_below_an_org_is_reached_without_a_token(api: Any) -> None:
    for method, path, body in (
        ("GET", "metadata", None),
        ("GET", "no-such-thing", None),
        ("POST", "instance", "{not json"),
        ("DELETE", "vpc/x", None),
    ):
        answer = api.client.request(method, f"/v2/org/demo/nico/{path}", content=body)
        assert answer.status_code == 401, path
        assert answer.json() == {
            "source": "nico",
            "message": "Request is missing authorization header",
            "data": None,
        }
        assert answer.headers["www-authenticate"] == "Bearer"


FORGED = {
    "none": lambda api: unsigned(),
    "algorithm swapped": lambda api: public_key_as_hmac_secret(),
    "issuer": lambda api: signed(api.issuer._key, kid=api.issuer._key_id, aud=LOCAL_AUDIENCE),
    "audience": lambda api: signed(api.issuer._key, kid=api.issuer._key_id, iss=LOCAL_ISSUER),
    "expired": lambda api: "Bearer " + api.token(ttl=-1),
    "kid as path": lambda api: signed(Ed25519PrivateKey.generate(), kid="../../../dev/null"),
    "kid as query": lambda api: signed(Ed25519PrivateKey.generate(), kid="x' UNION SELECT 'k"),
    "kid as URL": lambda api: signed(Ed25519PrivateKey.generate(), kid="https://evil.example/key"),
    "kid not text": lambda api: with_header(api, kid=["a"]),
    "own key in the header": lambda api: with_header(api, jwk={"kty": "OKP", "crv": "Ed25519", "x": "AA"}),
}


def with_header(api: Any, **header: Any) -> str:
    """A token with a header that was changed after it was signed."""
    _, claims, signature = api.token().split(".")
    header_fields = {"alg": "EdDSA", "typ": "JWT", "kid": api.issuer._key_id, **header}
    encoded = base64.urlsafe_b64encode(json.dumps(header_fields).encode()).rstrip(b"=").decode()
    return f"Bearer {encoded}.{claims}.{signature}"


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_token_opens_nothing(api: Any, attack: str) -> None:
    headers = {"Authorization": FORGED[attack](api)}
    answer = api.client.get("/v2/org/demo/nico/vpc", headers=headers)
    assert (answer.status_code, answer.json()["source"]) == (401, "nico"), answer.text


def test_a_token_of_one_org_does_not_open_another(api: Any) -> None:
    headers = {"Authorization": f"Bearer {api.token('rival')}"}
    answer = api.client.get("/v2/org/demo/nico/vpc", headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (
        403,
        "Failed to validate membership for org: demo",
    )


def test_a_token_expires_by_the_services_clock(api: Any) -> None:
    headers = {"Authorization": f"Bearer {api.token(ttl=60)}"}
    assert api.client.get("/v2/org/demo/nico/vpc", headers=headers).status_code == 200
    api.site.tick(61)
    assert api.client.get("/v2/org/demo/nico/vpc", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "role", "message"),
    [
        ("GET", "vpc", Role.PROVIDER_ADMIN, "User does not have Tenant Admin role with org"),
        ("GET", "nvlink-interface", Role.PROVIDER_VIEWER, "User does not have Tenant Admin role with org"),
        ("POST", "allocation", Role.TENANT_ADMIN, "User does not have Provider Admin role with org"),
        ("POST", "allocation", Role.PROVIDER_VIEWER, "User does not have Provider Admin role with org"),
    ],
)
def test_a_role_opens_its_own_doors_only(api: Any, method: str, path: str, role: Role, message: str) -> None:
    body = {"name": "x1", "tenantId": api.site.tenant.id, "siteId": api.site.site_id}
    answer = api.call(method, path, body if method == "POST" else None, role=role)
    assert (answer.status_code, answer.json()["message"]) == (403, message)


# Tokens that were verified before.


class Counted:
    """A verifier on a clock that a test moves, and how many signatures it looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.signatures = NOW, 0
        self.verifier = TokenVerifier(
            [TrustedKey("k", "EdDSA", KEY.public_key())],
            issuer="issuer",
            audience="audience",
            clock=lambda: self.now,
        )
        decode = jwt.decode

        def counting(*args: Any, **options: Any) -> Any:
            self.signatures += 1
            return decode(*args, **options)

        monkeypatch.setattr(jwt, "decode", counting)

    def verify(self, token: str) -> Caller:
        return self.verifier.verify(token, "demo")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_the_signature_of_a_valid_token_is_verified_once(counted: Counted) -> None:
    token = signed()
    assert counted.verify(token) == counted.verify(token)
    assert counted.signatures == 1
    # Another organisation of the same token is another question, and the same signature.
    with pytest.raises(Rejected):
        counted.verifier.verify(token, "elsewhere")
    assert counted.signatures == 1


def test_a_remembered_token_ends_when_it_ends(counted: Counted) -> None:
    token = signed()
    counted.verify(token)
    counted.now = NOW + 60
    with pytest.raises(UnauthenticatedCaller, match="expired"):
        counted.verify(token)


def test_a_token_that_differs_in_one_letter_is_another_token(counted: Counted) -> None:
    token = signed()
    counted.verify(token)
    head, claims, signature = token.split(".")
    for forged in (f"{head}.{claims}.A{signature[1:]}", f"{head}.{claims[:-1]}.{signature}"):
        with pytest.raises(UnauthenticatedCaller):
            counted.verify(forged if forged != token else f"{head}.{claims}.B{signature[1:]}")


def test_a_verifier_of_other_keys_remembers_nothing(counted: Counted) -> None:
    token = signed()
    counted.verify(token)
    with pytest.raises(UnauthenticatedCaller):
        verifier(TrustedKey("k", "EdDSA", Ed25519PrivateKey.generate().public_key())).verify(token, "demo")


def test_a_flood_without_valid_tokens_displaces_none(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_REMEMBERED", 2)
    token, stranger = signed(), Ed25519PrivateKey.generate()
    counted.verify(token)
    for number in range(5):
        for other in (signed(stranger, sub=f"{number}"), signed(sub=f"{number}", exp=int(NOW) - 1)):
            with pytest.raises(UnauthenticatedCaller):
                counted.verify(other)
    before = counted.signatures
    counted.verify(token)
    assert counted.signatures == before


def test_the_tokens_that_were_used_last_are_remembered(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_REMEMBERED", 2)
    first, second, third = (signed(sub=f"{number}") for number in range(3))
    for token in (first, second, first, third, first, third):
        counted.verify(token)
    assert counted.signatures == 3
    counted.verify(second)
    assert counted.signatures == 4


def test_a_long_token_is_verified_each_time(counted: Counted) -> None:
    token = signed(more="x" * auth.MAX_REMEMBERED_BYTES)
    counted.verify(token)
    counted.verify(token)
    assert counted.signatures == 2
