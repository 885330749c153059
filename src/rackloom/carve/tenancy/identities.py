"""Custom roles and service accounts of organisations: records, and the rules about them.

A custom role is a named set of permissions on one side, as tenant or as provider. A service account is a
program: it has roles, perhaps an end, and up to two keys, so that a program can be given a new key before
the old one is revoked. Of a key only the SHA-256 of its secret is recorded. The secret has 256 random bits,
so a slow hash would add nothing.

Each organisation may have `MAX_PER_ORG` of either. A role that a service account has cannot be deleted.

Every change gives `identity_revision` another value in the same transaction. `read_identities` reads all
that is needed to admit callers; a process that has read them compares the revision to learn whether they
still hold. Nothing here decides whether the caller may make a change; the routes do, before they call this
module.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.prepared import (
    count_rows,
    delete_and_count,
    delete_rows,
    find_row,
    insert_row,
    require,
    require_unused,
    update_and_count,
    update_rows,
)
from rackloom.carve.store.schema import custom_role, identity_revision, service_account, service_account_key
from rackloom.carve.store.values import IdFactory, conflict, forbidden, invalid

MAX_PER_ORG = 100
MAX_KEYS = 2
_REVISION_ID = "all"


class CustomRole(msgspec.Struct, frozen=True):
    """What a custom role allows."""

    side: str
    permissions: frozenset[str]


class AccountKey(msgspec.Struct, frozen=True):
    """A key of a service account, with what its holder may do."""

    hash: str
    account_id: str
    org: str
    roles: tuple[str, ...]
    expires: float | None
    last_used: float | None


class Identities(msgspec.Struct, frozen=True):
    """All custom roles, by organisation and name, and all keys, by id."""

    revision: str
    roles: Mapping[tuple[str, str], CustomRole]
    keys: Mapping[str, AccountKey]


def read_revision(conn: sa.Connection) -> str:
    """A value that differs after every change here, or empty before the first."""
    row = find_row(conn, identity_revision, id=_REVISION_ID)
    return "" if row is None else str(row.revision)


def read_identities(conn: sa.Connection) -> Identities:
    """Everything as it is now."""
    roles = {
        (row.org, row.name): CustomRole(row.side, frozenset(row.permissions))
        for row in conn.execute(sa.select(custom_role))
    }
    keys, account = service_account_key.c, service_account.c
    found = sa.select(
        keys.id, keys.hash, keys.account_id, account.org, account.roles, account.expires, keys.last_used
    ).join(service_account, account.id == keys.account_id)
    return Identities(
        read_revision(conn),
        roles,
        {
            row.id: AccountKey(
                row.hash, row.account_id, row.org, tuple(row.roles), row.expires, row.last_used
            )
            for row in conn.execute(found)
        },
    )


def _changed(conn: sa.Connection, ids: IdFactory) -> None:
    revision = ids()
    if not update_and_count(conn, identity_revision, {"id": _REVISION_ID}, revision=revision):
        insert_row(conn, identity_revision, id=_REVISION_ID, revision=revision)


# Custom roles.


def roles_of_org(conn: sa.Connection, org: str) -> Sequence[sa.Row[Any]]:
    """The custom roles of an organisation, by name."""
    return conn.execute(
        sa.select(custom_role).where(custom_role.c.org == org).order_by(custom_role.c.name)
    ).all()


def get_role(conn: sa.Connection, org: str, name: str) -> sa.Row[Any]:
    """A custom role. Refused when there is none of that name."""
    return require(find_row(conn, custom_role, org=org, name=name), "Could not find Role with specified name")


def create_role(
    conn: sa.Connection,
    org: str,
    name: str,
    role: CustomRole,
    description: str | None,
    now: float,
    ids: IdFactory,
) -> sa.Row[Any]:
    """A new custom role."""
    require_unused(find_row(conn, custom_role, org=org, name=name), "Role with specified name already exists")
    _require_room(conn, custom_role, org, "Roles")
    insert_row(
        conn,
        custom_role,
        id=ids(),
        org=org,
        name=name,
        side=role.side,
        description=description,
        permissions=sorted(role.permissions),
        created=now,
        updated=now,
    )
    _changed(conn, ids)
    return get_role(conn, org, name)


def update_role(
    conn: sa.Connection, row: sa.Row[Any], changes: Mapping[str, object], now: float, ids: IdFactory
) -> sa.Row[Any]:
    """Change columns of a custom role. Without changes nothing is read again anywhere."""
    if not changes:
        return row
    update_rows(conn, custom_role, {"id": row.id}, **changes, updated=now)
    _changed(conn, ids)
    return get_role(conn, row.org, row.name)


def delete_role(conn: sa.Connection, row: sa.Row[Any], ids: IdFactory) -> None:
    """Delete a custom role. Refused while a service account has it."""
    for account in accounts_of_org(conn, row.org):
        if row.name in account.roles:
            raise conflict(f"Service Account {account.name} has this Role", id=account.id)
    delete_rows(conn, custom_role, id=row.id)
    _changed(conn, ids)


# Service accounts.


def accounts_of_org(conn: sa.Connection, org: str) -> Sequence[sa.Row[Any]]:
    """The service accounts of an organisation, by name."""
    return conn.execute(
        sa.select(service_account).where(service_account.c.org == org).order_by(service_account.c.name)
    ).all()


def get_account(conn: sa.Connection, org: str, account_id: str) -> sa.Row[Any]:
    """A service account. Refused when the organisation has none with that id."""
    row = find_row(conn, service_account, id=account_id, org=org)
    return require(row, "Could not find Service Account with specified ID")


def create_account(
    conn: sa.Connection,
    org: str,
    name: str,
    *,
    description: str | None,
    roles: Collection[str],
    expires: float | None,
    created_by: str,
    now: float,
    ids: IdFactory,
) -> sa.Row[Any]:
    """A new service account, without a key."""
    used = find_row(conn, service_account, org=org, name=name)
    require_unused(used, "Service Account with specified name already exists")
    _require_room(conn, service_account, org, "Service Accounts")
    if expires is not None and expires <= now:
        raise invalid("Error validating request data", expires="must be later than now")
    account_id = ids()
    insert_row(
        conn,
        service_account,
        id=account_id,
        org=org,
        name=name,
        description=description,
        created_by=created_by,
        roles=sorted(set(roles)),
        expires=expires,
        created=now,
        updated=now,
    )
    _changed(conn, ids)
    return get_account(conn, org, account_id)


def delete_account(conn: sa.Connection, account_id: str, ids: IdFactory) -> None:
    """Delete a service account and its keys."""
    delete_rows(conn, service_account_key, account_id=account_id)
    delete_rows(conn, service_account, id=account_id)
    _changed(conn, ids)


def _require_room(conn: sa.Connection, table: sa.Table, org: str, kind: str) -> None:
    if count_rows(conn, table, org=org) >= MAX_PER_ORG:
        raise forbidden(f"Org has reached the maximum number of {kind}. Max: {MAX_PER_ORG}")


# Keys.


def keys_of_account(conn: sa.Connection, account_id: str) -> Sequence[sa.Row[Any]]:
    """The keys of a service account, the oldest first."""
    keys = service_account_key.c
    return conn.execute(
        sa.select(service_account_key).where(keys.account_id == account_id).order_by(keys.created, keys.id)
    ).all()


def create_key(
    conn: sa.Connection, account_id: str, secret_hash: str, now: float, ids: IdFactory
) -> sa.Row[Any]:
    """Another key. Refused while the account has `MAX_KEYS`."""
    if count_rows(conn, service_account_key, account_id=account_id) >= MAX_KEYS:
        raise conflict(f"Service Account has {MAX_KEYS} keys already: revoke the one that is not in use")
    key_id = ids()
    insert_row(
        conn,
        service_account_key,
        id=key_id,
        account_id=account_id,
        hash=secret_hash,
        created=now,
        last_used=None,
    )
    _changed(conn, ids)
    return require(find_row(conn, service_account_key, id=key_id), "Could not find Key with specified ID")


def revoke_key(conn: sa.Connection, account_id: str, key_id: str, ids: IdFactory) -> None:
    """Revoke a key of an account."""
    if not delete_and_count(conn, service_account_key, id=key_id, account_id=account_id):
        require(None, "Could not find Key with specified ID")
    _changed(conn, ids)


def record_use(conn: sa.Connection, key_id: str, now: float) -> None:
    """Record that a key was used; no new revision, because nothing that admits callers changes."""
    update_rows(conn, service_account_key, {"id": key_id}, last_used=now)
