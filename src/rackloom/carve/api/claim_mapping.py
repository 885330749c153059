"""From the claims of a verified token to the caller: its subject, and its roles in each organisation.

Every identity provider has its own claims, so the mapping is configured for each issuer, as plain values. A
`ClaimMapping` is applied in this order. Claims with required values are compared. A claim that is read but
that the issuer left out of the token (Entra ID does so with too many groups) is refused: fewer groups would
mean other rights than the issuer meant. The subject is read. Then every `Grant` adds roles in organisations.

A grant reads the texts of one claim: a text, a list of texts, or the names of an object. Its pattern
(`/{org}/{role}`) must match the whole text. The organisation comes from the pattern, from another claim, or
is fixed. The role comes from the pattern or is fixed. Tables may translate both. A text that does not match
grants nothing.

The guarantees: neither name may contain a character that separates `{org}` from `{role}`, so a text is read
in one way only. Organisations are ASCII names and compared without case, so another script cannot imitate
one. An email address is a subject only if the issuer has verified it. Subjects are qualified with their
issuer as `issuer#subject`. An issuer contains no `#`, so subjects of two issuers never collide.

Without grants the claim `orgs` is read: organisation -> list of roles.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rackloom.carve.store.values import forbidden

Claims = Mapping[str, Any]
Path = tuple[str, ...]
"""The names that lead to a claim, from the outermost object to the innermost."""


class UnusableClaims(Exception):
    """The claims are not those of a caller of this service."""


ORG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
DEFAULT_PATTERN = "{role}"
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_UNESCAPED_DOT = re.compile(r"(?<!\\)\.")


# The mapping.


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Roles in organisations, from the texts of one claim."""

    path: Path
    pattern: re.Pattern[str]
    """The groups are `org` and `role`, as far as the texts name them."""
    org: str | None = None
    org_path: Path | None = None
    orgs: Mapping[str, str] = {}
    """Name in the token -> organisation. If empty, each name is that of an organisation."""
    role: str | None = None
    roles: Mapping[str, Sequence[str]] = {}
    """Name in the token -> roles. If empty, each name is that of a role."""


class ClaimMapping(msgspec.Struct, frozen=True, kw_only=True):
    """How the claims of one issuer are read."""

    subject: Path = ("sub",)
    required: Mapping[Path, Sequence[str | int | bool]] = {}
    """Claim -> accepted values. A claim without values must only be present."""
    grants: Sequence[Grant] = ()
    """If empty, the claim `orgs` is read."""
    organisations: frozenset[str] | None = None
    """The organisations, in lower case, that the issuer may name in any claim. None allows all."""


def claim_path(text: str) -> Path:
    r"""Parse `realm_access.roles`, with `\.` for a dot in a name. Raises ValueError for an empty name."""
    parts = tuple(part.replace("\\.", ".") for part in _UNESCAPED_DOT.split(text))
    if not all(parts):
        raise ValueError(
            f"{text!r} is no claim: write its names with dots between them, a dot in a name as \\."
        )
    return parts


def make_grant(
    *,
    claim: str,
    pattern: str = DEFAULT_PATTERN,
    org: str | None = None,
    org_claim: str | None = None,
    orgs: Mapping[str, str],
    role: str | None = None,
    roles: Mapping[str, Sequence[str]],
) -> Grant:
    """A grant as configured: `roles` has the texts that mean each role. Raises ValueError."""
    placeholders = _PLACEHOLDER.findall(pattern)
    if [org is not None, org_claim is not None, "org" in placeholders].count(True) != 1:
        raise ValueError(f"grant of {claim}: give one of org, org_claim, and {{org}} in the pattern")
    if (role is not None) == ("role" in placeholders):
        raise ValueError(f"grant of {claim}: give either role or {{role}} in the pattern")
    if role is not None and roles:
        raise ValueError(f"grant of {claim}: roles translates {{role}}, which the pattern does not have")
    if org is not None and orgs:
        raise ValueError(f"grant of {claim}: orgs translates names in the token, but org is fixed")
    for name in orgs.values() if org is None else (org,):
        if not ORG_NAME.fullmatch(name):
            raise ValueError(f"grant of {claim}: {name!r} is no name of an organisation")
    return Grant(
        path=claim_path(claim),
        pattern=_compile_pattern(pattern),
        org=None if org is None else org.lower(),
        org_path=None if org_claim is None else claim_path(org_claim),
        orgs={name: ours.lower() for name, ours in orgs.items()},
        role=role,
        roles=_by_name_in_token(roles),
    )


def _by_name_in_token(roles: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for role, names in roles.items():
        for name in names:
            found.setdefault(name, []).append(role)
    return found


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    literals = _PLACEHOLDER.split(pattern)[::2]
    names = _PLACEHOLDER.findall(pattern)
    if sorted(names) not in (["org"], ["role"], ["org", "role"]) or any("{" in part for part in literals):
        raise ValueError(f"pattern {pattern!r}: use {{org}} and {{role}}, each at most once, and no other")
    between = literals[1] if len(names) > 1 else ""
    separators = "".join(sorted({character for character in between if not re.match(r"\w", character)}))
    if len(names) > 1 and not separators:
        raise ValueError(
            f"pattern {pattern!r}: put a character that is in no name between {{org}} and {{role}}, as / or :"
        )
    value = f"[^{re.escape(separators)}]+" if separators else ".+"
    parts = [
        f"{re.escape(literal)}(?P<{name}>{value})" for literal, name in zip(literals, names, strict=False)
    ]
    return re.compile("".join(parts) + re.escape(literals[-1]), re.DOTALL)


# Facts from a token.


def subject_of(claims: Claims, mapping: ClaimMapping) -> str:
    """The subject of the caller, after the required claims were compared. Raises UnusableClaims."""
    for path, accepted in mapping.required.items():
        if not _is_accepted(_claim_at(claims, path), accepted):
            raise UnusableClaims(f"Authorization token in request is not for this service: {path[-1]}")
    subject = _claim_at(claims, mapping.subject)
    if not isinstance(subject, str) or not subject:
        raise UnusableClaims("Authorization token in request does not say who the caller is")
    if mapping.subject[-1] == "email" and claims.get("email_verified") is not True:
        raise UnusableClaims("The email address in the authorization token is not verified")
    return subject


def roles_in(claims: Claims, mapping: ClaimMapping, org: str) -> list[str]:
    """The names of the caller's roles in `org`, which is in lower case. A member may have none.

    Refused for an organisation that the token does not name, or its issuer may not name.
    """
    if mapping.organisations is not None and org not in mapping.organisations:
        raise _stranger(org)
    if not mapping.grants:
        orgs = claims.get("orgs")
        names = orgs.get(org) if isinstance(orgs, dict) else None
        if not isinstance(names, list):
            raise _stranger(org)
        return [name for name in names if isinstance(name, str)]
    for grant in mapping.grants:
        _require_whole(claims, grant)
    granted = [role for grant in mapping.grants for named, role in _granted(grant, claims) if named == org]
    if not granted:
        raise _stranger(org)
    return granted


def _stranger(org: str) -> Exception:
    return forbidden(f"Failed to validate membership for org: {org}")


def _require_whole(claims: Claims, grant: Grant) -> None:
    """Refuse a token if its issuer left out a claim that the grant reads."""
    elsewhere = claims.get("_claim_names")
    for path in (grant.path, grant.org_path):
        name = path[0] if path else ""
        left_out = isinstance(elsewhere, dict) and name in elsewhere
        if left_out or (name == "groups" and claims.get("hasgroups") is True):
            raise forbidden(
                f"The authorization token does not list the {name} of the caller, because there are too many:"
                " let the issuer send only those that are assigned to this application"
            )


def _granted(grant: Grant, claims: Claims) -> Iterator[tuple[str, str]]:
    """Pairs of organisation (in lower case) and role."""
    fixed = [grant.org] if grant.org else _texts_at(claims, grant.org_path) if grant.org_path else []
    for text in _texts_at(claims, grant.path):
        if (match := grant.pattern.fullmatch(text)) is None:
            continue
        found = match.groupdict()
        orgs = [found["org"]] if "org" in found else fixed
        names = [found["role"]] if "role" in found else []
        roles = [role for name in names for role in _translated_roles(grant, name)] if names else [grant.role]
        for org in filter(None, (_translated_org(grant, name) for name in orgs)):
            yield from ((org, role) for role in roles if role)


def _translated_org(grant: Grant, name: str) -> str | None:
    if grant.orgs:
        return grant.orgs.get(name)
    return name.lower() if ORG_NAME.fullmatch(name) else None


def _translated_roles(grant: Grant, name: str) -> Sequence[str]:
    return grant.roles.get(name, ()) if grant.roles else (name,)


def _texts_at(claims: Claims, path: Path) -> list[str]:
    """The texts of a claim: a text, those of a list, or the names of an object."""
    value = _claim_at(claims, path)
    values = [value] if isinstance(value, str) else value if isinstance(value, list | dict) else ()
    return [text for text in values if isinstance(text, str)]


def _claim_at(claims: Claims, path: Path) -> Any:
    value: Any = claims
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _is_accepted(value: Any, accepted: Sequence[str | int | bool]) -> bool:
    if not accepted:
        return value is not None
    values = value if isinstance(value, list) else [value]
    # By type too: 1 is not true.
    return any(type(found) is type(wanted) and found == wanted for found in values for wanted in accepted)
