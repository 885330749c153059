"""What the routes are given: the store, time, ids, a way to wake the reconciler, and the caller."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import sqlalchemy as sa
from fastapi import Depends
from starlette.requests import Request

from rackloom.carve.api.auth import Caller, Role, TokenVerifier
from rackloom.carve.site import allocations, tenants
from rackloom.carve.site.store import Store
from rackloom.carve.site.values import Changed, Ids

T = TypeVar("T")


class ApiDeps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the API is composed of."""

    store: Store
    clock: Callable[[], float]
    """Seconds since the epoch."""
    ids: Ids
    wake: Callable[[frozenset[str]], None]
    """Called after a commit with the NVLink domains whose intent changed; empty when none is known yet."""
    verifier: TokenVerifier
    auto_tenant: bool = False
    """An org with a valid token becomes a tenant at first use, with every machine of every type allocated."""

    async def change(self, work: Callable[[sa.Connection], Changed[T]]) -> T:
        """Run `work` in a write transaction, then wake the reconciler of the domains that it touched.

        `work` reads the clock itself, inside the transaction: a wish dated before its commit would seem to be
        answered by an observation that was begun before anybody knew of the wish.
        """
        changed = await self.store.run(work)
        self.wake(changed.domains)
        return changed.value


async def _deps(request: Request) -> ApiDeps:
    deps: ApiDeps = request.app.state.deps
    return deps


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Deps = Annotated[ApiDeps, Depends(_deps)]
Anyone = Annotated[Caller, Depends(_caller)]


async def _tenant_admin(request: Request, deps: Deps, caller: Anyone) -> Caller:
    caller.require(Role.TENANT_ADMIN)
    await _admit(request, deps, caller)
    return caller


async def _provider_admin(caller: Anyone) -> Caller:
    caller.require(Role.PROVIDER_ADMIN)
    return caller


async def _provider_reader(caller: Anyone) -> Caller:
    caller.require(Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
    return caller


async def _reader(request: Request, deps: Deps, caller: Anyone) -> Caller:
    caller.require(Role.TENANT_ADMIN, Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
    if Role.TENANT_ADMIN in caller.roles:
        await _admit(request, deps, caller)
    return caller


TenantAdmin = Annotated[Caller, Depends(_tenant_admin)]
ProviderAdmin = Annotated[Caller, Depends(_provider_admin)]
ProviderReader = Annotated[Caller, Depends(_provider_reader)]
Reader = Annotated[Caller, Depends(_reader)]


async def _admit(request: Request, deps: ApiDeps, caller: Caller) -> None:
    # Tenants are never removed, so an org that was seen once need not be looked up again.
    seen: set[str] = request.app.state.tenants_seen
    if deps.auto_tenant and caller.org not in seen:
        await deps.store.run(_make_tenant, caller.org, deps.clock(), deps.ids)
        seen.add(caller.org)


def _make_tenant(conn: sa.Connection, org: str, now: float, ids: Ids) -> None:
    if tenants.find(conn, org) is None:
        tenant = tenants.ensure(conn, org, now, ids)
        allocations.grant_everything(conn, tenant.id, now, ids)
