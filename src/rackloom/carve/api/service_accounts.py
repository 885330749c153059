"""REST: service accounts, the identities of programs, and their keys.

A service account belongs to one organisation and has built-in and custom roles. A caller that makes or
deletes it, or makes or revokes a key of it, needs all permissions of these roles: otherwise the key of
another account would be a way to more permissions. An account that ends makes no account, and no key of one,
that ends later. The key is shown once, in the answer to its creation. A second key lets a program change its
key without a pause.
"""

from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import AwareDatetime, Field, StringConstraints

from rackloom.carve.api import routing, wire
from rackloom.carve.api.auth import Permission, Role
from rackloom.carve.api.custom_roles import permissions_of_row
from rackloom.carve.api.directory import (
    BuiltIn,
    KnownDirectory,
    OwnPermissions,
    hash_of,
    require_no_later_end,
    require_own,
    written_key,
)
from rackloom.carve.api.routing import Administrator, Deps, Row, Rows
from rackloom.carve.api.wire import Json
from rackloom.carve.store.values import invalid
from rackloom.carve.tenancy import identities

# Request models.


RoleRef = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z][A-Za-z0-9_-]{1,62}$")]


class ServiceAccountCreate(wire.Body):
    """A service account, which has no key yet."""

    name: wire.Name
    description: wire.Description | None = None
    roles: Annotated[list[RoleRef], Field(min_length=1, max_length=20)]
    expires: AwareDatetime | None = None


# Response models.


class ServiceAccountKey(wire.Answer):
    """A key, without its secret. The time of its last use is up to an hour old."""

    id: UUID
    created: datetime
    last_used: datetime | None


class NewServiceAccountKey(wire.Answer):
    """A new key. This is the only time that `key` is shown."""

    id: UUID
    key: str
    created: datetime


class ProgramAccount(wire.Timed):
    """A service account with its keys."""

    id: UUID
    name: str
    description: str | None
    roles: list[str]
    expires: datetime | None
    created_by: str
    keys: list[ServiceAccountKey]


# Routes.


router = routing.Operations("/service-account")

AccountId = Annotated[UUID, Path(alias="serviceAccountId")]
KeyId = Annotated[UUID, Path(alias="serviceAccountKeyId")]


@router.get("", "get-all-service-account", list[ProgramAccount])
def list_all(conn: sa.Connection, caller: Administrator) -> list[Json]:
    """The service accounts of the organisation, by name."""
    return [_shape(conn, row) for row in identities.accounts_of_org(conn, caller.org)]


@router.create("", "create-service-account", ProgramAccount)
def create(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    body: ServiceAccountCreate,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> Json:
    """Create a service account. Its roles may have no permission that the caller lacks."""
    expires = None if body.expires is None else body.expires.timestamp()
    require_no_later_end(caller, expires)
    _require_own_roles(conn, caller.org, body.roles, directory.built_in, own)
    row = identities.create_account(
        conn,
        caller.org,
        body.name,
        description=body.description,
        roles=body.roles,
        expires=expires,
        created_by=caller.subject,
        now=deps.clock(),
        ids=deps.ids,
    )
    return _shape(conn, row)


@router.get("/{serviceAccountId}", "get-service-account", ProgramAccount)
def get(conn: sa.Connection, caller: Administrator, account_id: AccountId) -> Json:
    """One service account."""
    return _shape(conn, identities.get_account(conn, caller.org, str(account_id)))


@router.delete("/{serviceAccountId}", "delete-service-account")
def delete(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    account_id: AccountId,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> None:
    """Delete a service account and all its keys."""
    row = identities.get_account(conn, caller.org, str(account_id))
    _require_own_roles(conn, caller.org, row.roles, directory.built_in, own)
    identities.delete_account(conn, row.id, deps.ids)


@router.create("/{serviceAccountId}/key", "create-service-account-key", NewServiceAccountKey)
def create_key(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    account_id: AccountId,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> Json:
    """Create a key of the account, which may have two. Only this answer shows the key."""
    secret = deps.secret()
    row = identities.get_account(conn, caller.org, str(account_id))
    _require_own_roles(conn, caller.org, row.roles, directory.built_in, own)
    require_no_later_end(caller, row.expires)
    key = identities.create_key(conn, row.id, hash_of(secret), deps.clock(), deps.ids)
    return wire.shape(NewServiceAccountKey, key, key=written_key(key.id, secret))


@router.delete("/{serviceAccountId}/key/{serviceAccountKeyId}", "delete-service-account-key")
def revoke_key(
    conn: sa.Connection,
    deps: Deps,
    caller: Administrator,
    account_id: AccountId,
    key_id: KeyId,
    directory: KnownDirectory,
    own: OwnPermissions,
) -> None:
    """Revoke a key: at once here, and within a second in other replicas."""
    row = identities.get_account(conn, caller.org, str(account_id))
    _require_own_roles(conn, caller.org, row.roles, directory.built_in, own)
    identities.revoke_key(conn, row.id, str(key_id), deps.ids)


def _require_own_roles(
    conn: sa.Connection, org: str, names: list[str], built_in: BuiltIn, own: frozenset[Permission]
) -> None:
    """Refuse roles that do not exist, or that allow more than the caller may do."""
    custom = {row.name: permissions_of_row(row, built_in) for row in identities.roles_of_org(conn, org)}
    allowed = {**custom, **{str(role): built_in[role] for role in Role}}
    for name in names:
        if name not in allowed:
            raise invalid("Error validating request data", roles=f"no role is called {name}")
        require_own(own, allowed[name])


def _shape(conn: sa.Connection, row: Row) -> Json:
    keys: Rows = identities.keys_of_account(conn, row.id)
    return wire.shape(ProgramAccount, row, keys=[wire.shape(ServiceAccountKey, key) for key in keys])
