"""Access to operations and their parameters: how roles are declared and enforced.

A route declares its roles by the type of its caller (`routing.TenantAdmin` and its neighbours): one of these
roles is enough. A field of a query model declares its roles with `PROVIDERS_ONLY`. These declarations are the
only ones: `check_call` enforces them, and /openapi.json shows them under `x-rackloom-roles`, at the operation
and at the schema of the parameter. An operation for every member of the organisation, with or without a role,
declares `MEMBER`. A field of an answer that others do not see is marked in the same way. The route leaves it
out, and a test checks this.

Each operation that needs a role also has a permission, derived from its path and method: `instances:read`,
`instance-types:write`. It is shown under `x-rackloom-permission`. A built-in role is the set of the
permissions of its operations. A custom role is a set of permissions on one side, as a tenant or as a
provider. It opens the operations that have one of them and declare a built-in role of that side. For such
an operation, and for no other, the caller then has that built-in role. Only `acting` decides this.

`check_call` decides in this order. A caller without a role of the operation is refused (403). A parameter
that begins with `include` and that the operation does not have is refused (400): a client that requests more
must not mistake the shorter answer for the complete one. A parameter for other roles is refused (403) unless
it is switched off, because a client may send its defaults. Other unknown parameters are ignored, as upstream
does.

A caller may have roles as a tenant and as a provider. Its role then admits a parameter, and the route
applies the parameter only to objects of the caller's provider. A caller that only a custom role admits sees
related objects (`includeRelation`) of the kinds that it may read. It may use another parameter that shows
objects of another kind only with the permission that `shows` declares for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from pydantic import JsonValue
from starlette.datastructures import QueryParams

from rackloom.carve.api.auth import Caller, Permission, Role, Side, titles
from rackloom.carve.store.values import forbidden, invalid

ROLES_KEY = "x-rackloom-roles"
PERMISSION_KEY = "x-rackloom-permission"
BASE = "/v2/org/{org}/nico"
"""The path of an organisation, above all operations."""
MEMBER = "MEMBER"
"""In a declaration: every member of the organisation, also without a role."""
PROVIDER_ROLES = (Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
PROVIDERS_ONLY: dict[str, JsonValue] = {ROLES_KEY: [str(role) for role in PROVIDER_ROLES]}
"""The `json_schema_extra` of a query parameter or an answer's field that only providers have."""


def shows(permission: str, *, providers_only: bool = False) -> dict[str, JsonValue]:
    """The `json_schema_extra` of a query parameter for objects that need another permission to read."""
    return {PERMISSION_KEY: permission, **(PROVIDERS_ONLY if providers_only else {})}


_OFF = frozenset({"0", "f", "false", "n", "no", "off"})
"""The spellings of a flag that is switched off."""


def described_access(roles: Sequence[Role], permission: str) -> dict[str, JsonValue]:
    """The declaration of an operation in /openapi.json. Without roles, every member may call it."""
    if not roles:
        return {ROLES_KEY: [MEMBER]}
    return {ROLES_KEY: [str(role) for role in roles], PERMISSION_KEY: permission}


# Permissions.


_RESOURCES = {"instance/type": "instance-types"}
"""Resources that are not the plural of the first word in the path."""
_RESOURCE_OF_RELATION = {
    "Site": "sites",
    "Tenant": "tenants",
    "InfrastructureProvider": "infrastructure-providers",
    "Instance": "instances",
    "InstanceType": "instance-types",
    "Vpc": "vpcs",
    "VPC": "vpcs",
    "Machine": "machines",
    "NVLinkLogicalPartition": "nvlink-logical-partitions",
}
"""Value of `includeRelation` -> the resource that it shows."""


@lru_cache(maxsize=1024)
def permission_of(path: str, method: str) -> str:
    """The permission of an operation: the resource in its path, and whether it reads or writes."""
    words = [part for part in path.removeprefix(BASE).split("/") if part and not part.startswith("{")]
    resource = _RESOURCES.get("/".join(words[:2]), f"{words[0].removesuffix('s')}s")
    if words[-1] == "quota":
        resource = "quotas"
    return f"{resource}:{'read' if method == 'GET' else 'write'}"


def side_of(role: Role) -> Side:
    """The side of a built-in role."""
    return Side.PROVIDER if role in PROVIDER_ROLES else Side.TENANT


def permissions_of_roles(
    operations: Iterable[tuple[Sequence[Role], str]],
) -> dict[Role, frozenset[Permission]]:
    """The permissions of each built-in role, from the roles and the permission of every operation."""
    declared = list(operations)
    return {
        role: frozenset((side_of(role), permission) for roles, permission in declared if role in roles)
        for role in Role
    }


def permissions_of(caller: Caller, built_in: Mapping[Role, frozenset[Permission]]) -> frozenset[Permission]:
    """Everything that a caller may do, by built-in and by custom roles."""
    return caller.held.union(*(built_in[role] for role in caller.roles))


def acting(caller: Caller, roles: Sequence[Role], permission: str) -> Caller:
    """The caller of an operation, with the built-in role that a custom role stands for there.

    Of several provider roles, it is the one with the fewest permissions.
    """
    added = set()
    if (Side.TENANT, permission) in caller.held and Role.TENANT_ADMIN in roles:
        added.add(Role.TENANT_ADMIN)
    provider_roles = [role for role in reversed(PROVIDER_ROLES) if role in roles]
    if (Side.PROVIDER, permission) in caller.held and provider_roles:
        added.add(provider_roles[0])
    return msgspec.structs.replace(caller, roles=caller.roles | added) if added else caller


# Calls.


class QueryRule(msgspec.Struct, frozen=True):
    """The requirements of a query parameter, in addition to those of its operation."""

    roles: Sequence[Role]
    permission: str | None
    """The permission that a custom role must hold to read the objects that the parameter adds."""


def check_call(
    caller: Caller,
    roles: Sequence[Role],
    permission: str,
    declared: Mapping[str, QueryRule],
    query: QueryParams,
) -> Caller:
    """The caller of the operation. Refused if it may not call the operation, or not with this query.

    `declared` are the `query_rules` of the operation.
    """
    admitted = caller
    if roles:
        caller = acting(caller, roles, permission)
        caller.require(*roles)
    if query:
        for name in sorted(query.keys()):
            if name not in declared:
                if name.casefold().startswith("include"):
                    raise invalid(
                        "Unknown parameter in query", **{name: "is not a parameter of this operation"}
                    )
                continue
            needed = declared[name].roles
            if needed and caller.roles.isdisjoint(needed) and not _is_off(query.getlist(name)):
                raise forbidden(f"Only {titles(needed)} can specify query param `{name}`")
        _check_included(admitted, roles, permission, declared, query)
    return caller


def _check_included(
    caller: Caller,
    roles: Sequence[Role],
    permission: str,
    declared: Mapping[str, QueryRule],
    query: QueryParams,
) -> None:
    """Refuse other objects in the answer that the custom roles of the caller do not let it read.

    Each side on which only a custom role admits the caller is checked separately: permission to read as a
    tenant opens nothing in an operation that is called as a provider.
    """
    built_in = {side_of(role) for role in caller.roles if role in roles}
    sides = {side_of(role) for role in roles} - built_in
    custom = [side for side in sides if (side, permission) in caller.held]
    if not custom:
        return
    for name in sorted(query.keys() & declared.keys()):
        rule = declared[name]
        if rule.permission is None or _is_off(query.getlist(name)):
            continue
        # A parameter for certain roles applies on their side only.
        concerned = {side_of(role) for role in rule.roles} or set(custom)
        if any((side, rule.permission) not in caller.held for side in concerned.intersection(custom)):
            raise forbidden(f"{name} needs the permission {rule.permission}")
    for relation in query.getlist("includeRelation"):
        needed = f"{_RESOURCE_OF_RELATION.get(relation)}:read"
        if relation in _RESOURCE_OF_RELATION and any((side, needed) not in caller.held for side in custom):
            raise forbidden(f"includeRelation={relation} needs the permission {needed}")


def _is_off(values: Sequence[str]) -> bool:
    return _OFF.issuperset(value.strip().lower() for value in values)


def query_rules(route: Dependant) -> dict[str, QueryRule]:
    """The query parameters of an operation, each with its own requirements."""
    found: dict[str, QueryRule] = {}
    for field in get_flat_params(route):
        extra = field.field_info.json_schema_extra
        declared = extra if isinstance(extra, dict) else {}
        needed, permission = declared.get(ROLES_KEY), declared.get(PERMISSION_KEY)
        roles = [role for role in Role if isinstance(needed, list) and role in needed]
        found[field.alias] = QueryRule(roles, permission if isinstance(permission, str) else None)
    return found
