"""How the claims of a token are read: paths, patterns, tables, and refused ambiguities."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.carve.api.claim_mapping import (
    ClaimMapping,
    UnusableClaims,
    claim_path,
    make_grant,
    roles_in,
    subject_of,
)
from rackloom.carve.store.values import Rejected


def granting(claim: str, **settings: Any) -> ClaimMapping:
    return ClaimMapping(grants=[make_grant(**({"claim": claim, "orgs": {}, "roles": {}} | settings))])


def test_dots_in_names_are_escaped() -> None:
    assert claim_path(r"https://example\.com/claims.roles") == ("https://example.com/claims", "roles")
    mapping = granting(r"https://acme\.example/roles", org="acme")
    assert roles_in({"https://acme.example/roles": ["A"]}, mapping, "acme") == ["A"]


@pytest.mark.parametrize(
    ("pattern", "text", "org", "roles"),
    [
        ("/{org}/{role}", "/Acme/ADMIN", "acme", ["ADMIN"]),
        ("/{org}/{role}", "/acme/ADMIN/deep", "acme", None),
        ("/{org}/{role}", "x/acme/ADMIN", "acme", None),
        ("/{org}/{role}", "/acme/ADMIN\n", "acme", ["ADMIN\n"]),
        ("rackloom:{org}:{role}", "rackloom:a:b:ADMIN", "a", None),
        ("rackloom:{org}:{role}", "rackloomXacme:ADMIN", "acme", None),
        ("{role}@{org}", "ADMIN@acme.example", "acme.example", ["ADMIN"]),
        ("{org}/roles/{role}", "acme/roles/ADMIN", "acme", ["ADMIN"]),
        ("{org}.{role}", "acme.ADMIN", "acme", ["ADMIN"]),
        # The sign for kelvin is k in lower case.
        ("/{org}/{role}", "/\N{KELVIN SIGN}/ADMIN", "k", None),
        ("/{org}/{role}", "/acme /ADMIN", "acme ", None),
    ],
)
def test_a_pattern_reads_a_text_in_one_way(
    pattern: str, text: str, org: str, roles: list[str] | None
) -> None:
    mapping = granting("groups", pattern=pattern)
    if roles is None:
        with pytest.raises(Rejected, match="Failed to validate membership"):
            roles_in({"groups": [text]}, mapping, org)
    else:
        assert roles_in({"groups": [text]}, mapping, org) == roles


@given(
    st.text("ab/:-_.", min_size=1, max_size=12),
    st.sampled_from(["{org}/{role}", "x:{org}:{role}", "{role}-{org}"]),
)
def test_what_matches_is_the_pattern_with_names_put_in(text: str, pattern: str) -> None:
    grant = make_grant(claim="groups", pattern=pattern, orgs={}, roles={})
    match = grant.pattern.fullmatch(text)
    if match is not None:
        assert pattern.format(**match.groupdict()) == text
        (separator,) = set(pattern.replace("{org}", "").replace("{role}", "").replace("x", ""))
        assert separator not in match["org"] + match["role"]


@pytest.mark.parametrize("mapping", [granting("groups", pattern="/{org}/{role}"), ClaimMapping()])
def test_an_issuer_names_no_organisation_of_others(mapping: ClaimMapping) -> None:
    claims = {"groups": ["/provider/PROVIDER_ADMIN", "/acme/ADMIN"]}
    claims |= {"orgs": {"provider": ["PROVIDER_ADMIN"], "acme": ["ADMIN"]}}
    assert roles_in(claims, mapping, "provider") == ["PROVIDER_ADMIN"]
    confined = msgspec.structs.replace(mapping, organisations=frozenset({"acme"}))
    assert roles_in(claims, confined, "acme") == ["ADMIN"]
    with pytest.raises(Rejected, match="membership"):
        roles_in(claims, confined, "provider")


@pytest.mark.parametrize("names", [["acme", "other"], "acme", {"acme": {"id": "7"}}])
def test_organisations_of_another_claim(names: Any) -> None:
    mapping = granting("roles", org_claim="organization")
    assert roles_in({"roles": ["A", 7, None], "organization": names}, mapping, "acme") == ["A"]


@pytest.mark.parametrize(
    "claims", [{}, {"a": 7}, {"a": {"b": 7}}, {"a": {"b": {"c": []}}}, {"a": [{"b": ["x"]}]}]
)
def test_a_claim_that_is_not_there_grants_nothing(claims: Any) -> None:
    with pytest.raises(Rejected):
        roles_in(claims, granting("a.b.c", org="acme"), "acme")


def test_tables_translate_and_leave_out_the_rest() -> None:
    mapping = granting("g", org_claim="tid", orgs={"T1": "Acme"}, roles={"ONE": ["x", "y"], "TWO": ["x"]})
    assert roles_in({"g": ["x"], "tid": "T1"}, mapping, "acme") == ["ONE", "TWO"]
    for claims, org in (({"g": ["ONE"], "tid": "T1"}, "acme"), ({"g": ["x"], "tid": "t1"}, "t1")):
        with pytest.raises(Rejected):
            roles_in(claims, mapping, org)


def test_everybody_of_an_organisation_may_have_a_role() -> None:
    mapping = granting("organization", pattern="{org}", role="TENANT_ADMIN")
    assert roles_in({"organization": ["acme"]}, mapping, "acme") == ["TENANT_ADMIN"]


@pytest.mark.parametrize("sign", [{"_claim_names": {"groups": "src1"}}, {"hasgroups": True}])
def test_groups_that_were_left_out_are_refused_though_another_grant_would_do(sign: dict[str, Any]) -> None:
    grants = [*granting("roles", org="acme").grants, *granting("groups", org="acme").grants]
    with pytest.raises(Rejected, match="does not list the groups of the caller, because there are too many"):
        roles_in({"roles": ["TENANT_ADMIN"], **sign}, ClaimMapping(grants=grants), "acme")


@pytest.mark.parametrize(
    ("accepted", "value", "is_accepted"),
    [
        (["a", "b"], "b", True),
        (["a"], ["x", "a"], True),
        (["a"], "A", False),
        ([True], True, True),
        ([1], True, False),
        ([True], "true", False),
        ([], "anything", True),
        ([], None, False),
    ],
)
def test_required_claims(accepted: Any, value: Any, is_accepted: bool) -> None:
    mapping = ClaimMapping(required={("deep", "claim"): accepted})
    claims = {"sub": "s", "deep": {"claim": value}}
    if is_accepted:
        assert subject_of(claims, mapping) == "s"
    else:
        with pytest.raises(UnusableClaims, match="is not for this service: claim"):
            subject_of(claims, mapping)


@pytest.mark.parametrize("subject", [None, "", 7, ["s"]])
def test_a_caller_has_a_name(subject: Any) -> None:
    with pytest.raises(UnusableClaims, match="does not say who"):
        subject_of({"sub": subject}, ClaimMapping())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab/:\N{KELVIN SIGN}", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
CLAIM_NAMES = st.sampled_from(["sub", "groups", "a", "orgs", "_claim_names", "hasgroups", "email_verified"])


@given(st.dictionaries(CLAIM_NAMES, JSON), st.sampled_from(["groups", "a.b", "groups.a"]), st.booleans())
def test_whatever_a_token_says_it_is_read_or_refused(claims: Any, claim: str, has_other: bool) -> None:
    settings = {"org_claim": "a"} if has_other else {"pattern": "{org}/{role}"}
    for mapping in (granting(claim, **settings), ClaimMapping(required={("a", "b"): ["a", True]})):
        try:
            assert subject_of(claims, mapping)
            assert all(isinstance(role, str) for role in roles_in(claims, mapping, "a"))
        except (UnusableClaims, Rejected):
            pass
