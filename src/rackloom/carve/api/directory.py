"""The service accounts and custom roles in the records, as each process knows them.

A key of a service account is `rlk_<id>_<secret>`, sent as a bearer token. Custom roles and keys are read
from the records into memory (`Directory`). Before they are used, the process compares their revision with
the records, unless it did so within `STALE_SECONDS`. So a revoked key or a changed role counts for at most
that long in any replica, and not at all in the one that changed it. If the records cannot be read,
nothing is decided (503).

Callers share a read (single flight). A caller joins the running one if that began within `STALE_SECONDS` and
this process has changed nothing since. Otherwise it waits for the next, which it shares with all others that
wait. So no caller waits for more than two reads, however often records change and also while reads fail. A
result that was read during a change of this process answers the callers that waited for it, and is not kept.

A caller with a made-up key costs no extra database read: the key is looked up in memory, and
secrets are compared in constant time by their SHA-256. The revision is read at most once in
`STALE_SECONDS`, however many requests arrive. The time of the last use is written at most once in
`USE_SECONDS` for each key and process.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, cast

import msgspec
from fastapi import Depends
from starlette.requests import Request

from rackloom.carve.api import access
from rackloom.carve.api.auth import INVALID_MESSAGE, Caller, Permission, Role, Side, UnauthenticatedCaller
from rackloom.carve.store.database import Store
from rackloom.carve.store.values import forbidden
from rackloom.carve.tenancy import identities
from rackloom.carve.tenancy.identities import Identities
from rackloom.errors import Retry, Unknown

KEY_PREFIX = "rlk_"
STALE_SECONDS = 1.0
USE_SECONDS = 3600.0
CALLER_SECONDS = 300.0
"""Seconds after which an event stream that was opened with a key or a custom role ends. The client then opens
another, and only then is the caller checked again."""

BuiltIn = Mapping[Role, frozenset[Permission]]


def written_key(key_id: str, secret: str) -> str:
    """A key as its program sends it."""
    return f"{KEY_PREFIX}{key_id}_{secret}"


def hash_of(secret: str) -> str:
    """The recorded hash of a secret."""
    return sha256(secret.encode()).hexdigest()


def sent_key(authorization: str | None) -> str | None:
    """The key in an Authorization header, or None if it has another token or none."""
    scheme, _, token = (authorization or "").partition(" ")
    key = token.strip()
    return key if scheme.lower() == "bearer" and key.startswith(KEY_PREFIX) else None


class _Reading(msgspec.Struct, frozen=True):
    """A read of the records that is under way."""

    task: asyncio.Task[Identities]
    begun: float
    changes: int
    """The number of changes that this process had made when the read began."""


class Directory:
    """The custom roles and keys of all organisations. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        built_in: BuiltIn,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.built_in = built_in
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._known: Identities | None = None
        self._compared_at = float("-inf")
        self._changes = 0
        self._running: _Reading | None = None
        self._next: asyncio.Task[Identities] | None = None
        self._used: dict[str, float] = {}

    def forget(self) -> None:
        """Read the records before the next use: this process has changed them."""
        self._known = None
        self._changes += 1

    async def caller_of(self, key: str, org: str) -> Caller:
        """The service account that has this key, for `org`.

        Raises UnauthenticatedCaller for a key that is not valid now, Rejected for another organisation.
        """
        key_id, _, secret = key.removeprefix(KEY_PREFIX).partition("_")
        known, now = await self._current(), self._clock()
        found = known.keys.get(key_id)
        if found is None or not hmac.compare_digest(found.hash, hash_of(secret)):
            raise UnauthenticatedCaller(INVALID_MESSAGE)
        if found.expires is not None and found.expires <= now:
            raise UnauthenticatedCaller("The service account has expired")
        if found.org != org.lower():
            raise forbidden(f"Failed to validate membership for org: {org}")
        last = max(found.last_used or 0.0, self._used.get(key_id, 0.0))
        if now - last >= USE_SECONDS:
            self._used[key_id] = now
            # If the database takes no writes, programs can still read.
            with suppress(Retry, Unknown):
                await self._store.on_behalf_of(found.org).run(identities.record_use, key_id, now)
        until = now + CALLER_SECONDS
        caller = Caller(
            subject=f"service-account/{found.account_id}",
            org=found.org,
            roles=frozenset(role for role in Role if role in found.roles),
            expires=until if found.expires is None else min(found.expires, until),
            custom_roles=frozenset(found.roles).difference(Role),
            account_ends=found.expires,
        )
        return _with_held(caller, known)

    async def with_custom_roles(self, caller: Caller) -> Caller:
        """The caller with the permissions of its custom roles."""
        if not caller.custom_roles:
            return caller
        caller = _with_held(caller, await self._current())
        if not caller.held:
            return caller
        return msgspec.structs.replace(caller, expires=min(caller.expires, self._clock() + CALLER_SECONDS))

    async def _current(self) -> Identities:
        now = self._monotonic()
        if self._known is not None and now - self._compared_at < STALE_SECONDS:
            return self._known
        running = self._running
        if running is not None and running.changes == self._changes and now - running.begun < STALE_SECONDS:
            return await asyncio.shield(running.task)
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(running))
            # Retrieved here too: all callers that waited for a failed read may have gone.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: other callers still wait for the same read if this request is cancelled.
        return await asyncio.shield(self._next)

    async def _read_after(self, running: "_Reading | None") -> Identities:
        try:
            if running is not None:
                await asyncio.wait([running.task])
        finally:
            self._next = None
        task = cast("asyncio.Task[Identities]", asyncio.current_task())
        reading = self._running = _Reading(task, self._monotonic(), self._changes)
        try:
            known = self._known
            if known is None or await self._store.read(identities.read_revision) != known.revision:
                known = await self._store.read(identities.read_identities)
                self._used = {key: used for key, used in self._used.items() if key in known.keys}
            # A result that was read during a change of this process may be from before the change.
            if reading.changes == self._changes:
                self._known, self._compared_at = known, reading.begun
            return known
        finally:
            self._running = None


def _with_held(caller: Caller, known: Identities) -> Caller:
    named = {name: known.roles.get((caller.org, name)) for name in caller.custom_roles}
    roles = {name: role for name, role in named.items() if role is not None}
    held = {(Side(role.side), name) for role in roles.values() for name in role.permissions}
    return msgspec.structs.replace(caller, held=frozenset(held), custom_roles=frozenset(roles))


# For routes.


def _directory(request: Request) -> Directory:
    directory: Directory = request.app.state.directory
    return directory


def _own_permissions(request: Request) -> frozenset[Permission]:
    # Not of the route's caller: a custom role stands for a built-in one there, which may do more.
    return access.permissions_of(request.state.caller, _directory(request).built_in)


KnownDirectory = Annotated[Directory, Depends(_directory)]
OwnPermissions = Annotated[frozenset[Permission], Depends(_own_permissions)]
"""Everything that the caller may do, in any operation."""


def require_no_later_end(caller: Caller, ends: float | None) -> None:
    """Refuse a service account that ends to make an account, or a key of one, that ends later or never."""
    if caller.account_ends is not None and (ends is None or ends > caller.account_ends):
        raise forbidden("A service account that expires cannot make one that expires later, or a key of it")


def require_own(own: Collection[Permission], needed: Collection[Permission]) -> None:
    """Refuse to give or manage permissions that the caller does not have itself."""
    missing = sorted(set(needed).difference(own))
    if missing:
        side, permission = missing[0]
        raise forbidden(f"You do not have the permission {permission} as {side.lower()} yourself")
