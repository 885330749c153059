"""Who may call an operation and use its parameters: what is declared, and what is refused.

A route declares its roles by the type of its caller (`routing.TenantAdmin` and its neighbours): one of these
roles is enough. A field of a query model declares its roles with `PROVIDERS_ONLY`. These declarations are the
only ones: `check_call` enforces them, and /openapi.json shows them under `x-rackloom-roles`, at the operation
and at the schema of the parameter. An operation for every member of the organisation, whatever its roles,
declares `MEMBER`. A field of an answer that others do not see is marked in the same way; the route leaves it
out, and a test compares.

`check_call` decides in this order. A caller without a role of the operation is refused (403). A parameter
that begins with `include` and is not one of the operation's is refused (400): a client that asks for more
must not take the shorter answer for the whole one. A parameter for other roles is refused (403) unless it is
switched off; a client may send its defaults. Other unknown parameters are ignored, as they are upstream.

A caller may have roles as a tenant and as a provider. Its role then admits a parameter, and the route applies
the parameter only to objects of its own provider.
"""

from collections.abc import Mapping, Sequence

from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from pydantic import JsonValue
from starlette.datastructures import QueryParams

from rackloom.carve.api.auth import Caller, Role, titles
from rackloom.carve.store.values import forbidden, invalid

ROLES_KEY = "x-rackloom-roles"
MEMBER = "MEMBER"
"""In a declaration: every member of the organisation, also without a role."""
PROVIDER_ROLES = (Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
PROVIDERS_ONLY: dict[str, JsonValue] = {ROLES_KEY: [str(role) for role in PROVIDER_ROLES]}
"""The `json_schema_extra` of a query parameter, or of the field of an answer, that only providers have."""
_OFF = frozenset({"0", "f", "false", "n", "no", "off"})
"""How a flag is written that is switched off."""


def described_roles(roles: Sequence[Role]) -> dict[str, JsonValue]:
    """The declaration of an operation in /openapi.json; without roles every member may call it."""
    return {ROLES_KEY: [str(role) for role in roles] or [MEMBER]}


def check_call(caller: Caller, roles: Sequence[Role], route: Dependant, query: QueryParams) -> None:
    """Refuse a caller that may not call the operation, or not with this query."""
    if roles:
        caller.require(*roles)
    if query:
        declared = _query_roles(route)
        for name in sorted(query.keys()):
            _check_parameter(caller, name, query.getlist(name), declared)


def _check_parameter(
    caller: Caller, name: str, values: Sequence[str], declared: Mapping[str, Sequence[Role]]
) -> None:
    if name not in declared:
        if name.casefold().startswith("include"):
            raise invalid("Unknown parameter in query", **{name: "is not a parameter of this operation"})
    elif declared[name] and not _OFF.issuperset(value.strip().lower() for value in values):
        _require_for_parameter(caller, name, declared[name])


def _require_for_parameter(caller: Caller, name: str, roles: Sequence[Role]) -> None:
    if caller.roles.isdisjoint(roles):
        raise forbidden(f"Only {titles(roles)} can specify query param `{name}`")


def _query_roles(route: Dependant) -> dict[str, Sequence[Role]]:
    """The query parameters of an operation, each with the roles that it needs besides."""
    found: dict[str, Sequence[Role]] = {}
    for field in get_flat_params(route):
        extra = field.field_info.json_schema_extra
        needed = extra.get(ROLES_KEY) if isinstance(extra, dict) else None
        found[field.alias] = [role for role in Role if isinstance(needed, list) and role in needed]
    return found
