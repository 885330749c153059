"""What the admin handlers are given: who calls, the store, time, ids, and ways to everything else."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import Plan
from rackloom.carve.reconcile.meter import Outcome
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.store import Store
from rackloom.carve.site.values import Changed, Ids, Status

T = TypeVar("T")


class Credentials(Protocol):
    """Where credentials are kept."""

    async def keep(self, path: str, fields: Mapping[str, str]) -> None:
        """Keep the fields of a credential, in place of what was there."""
        ...

    async def forget(self, path: str) -> None:
        """Remove a credential; nothing happens when there is none."""
        ...


class AdminDeps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the admin interface is composed of."""

    store: Store
    clock: Callable[[], float]
    """Seconds since the epoch."""
    ids: Ids
    wake: Callable[[frozenset[str]], None]
    """Called after a commit with the NVLink domains whose intent changed."""
    endpoints_changed: Callable[[], None]
    """Called after a commit that changed which switch controllers there are."""
    browse: Callable[[Endpoint, str, int], Awaitable[str]]
    """Asks a controller one of `GetComputeNodeInfoList` and `GetGpuInfoList`; the number is a GPU's GUID, or
    0 for all. Returns JSON. Raises FabricUnavailable and FabricRefused."""
    apply: Callable[[Plan], Awaitable[tuple[Outcome, ...]]]
    """Carries out a plan after a fresh look. Raises Refused when it is no longer current."""
    credentials: Credentials
    check_endpoint: Callable[[str], None]
    """Raises Refused for an endpoint URL that this site does not allow."""

    imports: bool = True
    """Whether machines may come from an operator's file."""
    new_machine_status: str = Status.READY
    """What is known of the host of a machine from a file."""
    caller: str = "unnamed"
    """Name in the certificate of whoever calls; set for each call."""

    def order(self, reason: str) -> Order:
        """The caller's order, for the record of what operators did."""
        return Order(self.caller, reason, self.clock())

    async def change(self, work: Callable[[sa.Connection], Changed[T]]) -> T:
        """Run `work` in a write transaction, then wake the reconciler of the domains that it touched."""
        changed = await self.store.run(work)
        self.wake(changed.domains)
        return changed.value
