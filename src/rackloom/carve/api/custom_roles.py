"""REST: the roles of an organisation, built-in ones and those that it makes of permissions.

A custom role belongs to the organisation in which it was made. It has permissions on one side, as a tenant or
as the provider of sites. A caller that makes, changes or deletes it needs all permissions that it has before
and after. So a caller cannot use a role to gain permissions that it did not have.
"""

from datetime import datetime
from typing import Annotated

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StringConstraints
from starlette.responses import Response

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Permission, Role, Side
from rackloom.carve.api.directory import BuiltIn, KnownDirectory, OwnPermissions, require_own
from rackloom.carve.api.routing import Administrator, Deps, Reader, Row
from rackloom.carve.api.wire import Json
from rackloom.carve.store.values import invalid
from rackloom.carve.tenancy import identities
from rackloom.carve.tenancy.identities import CustomRole

# Request models.


PermissionName = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z][a-z-]{0,60}:(read|write)$")]
Permissions = Annotated[list[PermissionName], Field(min_length=1, max_length=200)]
NewRoleName = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z][a-z0-9-]{1,62}$")]


class RoleCreate(wire.Body):
    """A custom role."""

    name: NewRoleName
    side: Side
    description: wire.Description | None = None
    permissions: Permissions


class RoleUpdate(wire.Body):
    """Changes of a custom role."""

    description: wire.Description | None = None
    permissions: Permissions | None = None


# Response models.


class AccessRole(wire.Answer):
    """A role with its permissions. A built-in role has no times."""

    name: str
    side: Side
    built_in: bool
    description: str | None
    permissions: list[str]
    created: datetime | None
    updated: datetime | None


# Routes.


router = routing.Operations("/role")

RoleName = Annotated[str, Path(alias="roleName", pattern=r"^[a-z][a-z0-9-]{1,62}$")]


@router.get("", "get-all-role", list[AccessRole])
async def list_all(deps: Deps, caller: Reader, directory: KnownDirectory) -> Response:
    """The roles on the caller's sides: built-in ones, then those of the organisation."""
    sides = frozenset(access.side_of(role) for role in caller.roles)
    rows = await deps.store.read(identities.roles_of_org, caller.org)
    built_in = [_built_in_shape(role, directory.built_in) for role in Role if access.side_of(role) in sides]
    return routing.json_response([*built_in, *(_shape(row) for row in rows if row.side in sides)])


@router.create("", "create-role", AccessRole)
def create(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    body: RoleCreate,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> Json:
    """Create a custom role with permissions that the caller has."""
    require_own(own, _wanted(body.side, body.permissions, directory.built_in))
    role = CustomRole(body.side, frozenset(body.permissions))
    return _shape(
        identities.create_role(conn, caller.org, body.name, role, body.description, deps.clock(), deps.ids)
    )


@router.patch("/{roleName}", "update-role", AccessRole)
async def update(
    deps: Deps,
    caller: Administrator,
    name: RoleName,
    body: RoleUpdate,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> Response:
    """Change a custom role. The change applies to its holders within a second."""
    changes: dict[str, object] = {}
    if body.description is not None:
        changes["description"] = body.description
    if body.permissions is not None:
        changes["permissions"] = sorted(set(body.permissions))

    def update(conn: sa.Connection) -> Json:
        row = identities.get_role(conn, caller.org, name)
        require_own(own, permissions_of_row(row, directory.built_in))
        if body.permissions is not None:
            require_own(own, _wanted(Side(row.side), body.permissions, directory.built_in))
        return _shape(identities.update_role(conn, row, changes, deps.clock(), deps.ids))

    changed = await deps.store.run(update)
    if changes:
        directory.forget()
    return routing.json_response(changed)


@router.delete("/{roleName}", "delete-role")
def delete(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    name: RoleName,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> None:
    """Delete a custom role that no service account has. Its name in a token then has no effect."""
    row = identities.get_role(conn, caller.org, name)
    require_own(own, permissions_of_row(row, directory.built_in))
    identities.delete_role(conn, row, deps.ids)


def permissions_of_row(row: Row, built_in: BuiltIn) -> frozenset[Permission]:
    """The permissions that the custom role of a row gives.

    A permission that no operation needs any more is left out: no caller has it, so none could remove it.
    """
    stored = frozenset((Side(row.side), permission) for permission in row.permissions)
    return stored.intersection(frozenset().union(*built_in.values()))


def _wanted(side: Side, names: list[str], built_in: BuiltIn) -> frozenset[Permission]:
    wanted = frozenset((side, name) for name in names)
    unknown = sorted(name for _, name in wanted.difference(*built_in.values()))
    if unknown:
        raise invalid(
            "Error validating request data", permissions=f"{unknown[0]} does not exist as {side.lower()}"
        )
    return wanted


def _shape(row: Row) -> Json:
    return wire.shape(AccessRole, row, built_in=False)


def _built_in_shape(role: Role, built_in: BuiltIn) -> Json:
    names = sorted(permission for _, permission in built_in[role])
    return wire.shape(
        AccessRole,
        None,
        name=str(role),
        side=access.side_of(role),
        built_in=True,
        description=None,
        permissions=names,
        created=None,
        updated=None,
    )
