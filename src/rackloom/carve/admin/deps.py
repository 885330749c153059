"""The dependencies of the RPC handlers, and translations that several RPCs share.

`AdminDeps` carries the store, the clock, the caller's certificate name, and functions to wake the
reconciler, to query a controller and to apply a plan. `change` runs a write transaction and then wakes
the affected domains.

`config_version` changes with every update. `check_version` refuses a change made from an older version
(optimistic concurrency). The wire has no unknown state, so Unknown is shown as CONFIGURING.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from google.protobuf.timestamp_pb2 import Timestamp

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.reconcile.domain_pass import OperationOutcome
from rackloom.carve.store.audit_trail import AuditTrail, RequestAudit
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.schema import tenant
from rackloom.carve.store.values import Changed, IdFactory, Status, conflict, invalid
from rackloom.core.partitions.domain import PartitionPlan
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS

# Dependencies.


T = TypeVar("T")


class CredentialStore(Protocol):
    """The store of credentials."""

    async def keep(self, path: str, fields: Mapping[str, str]) -> None:
        """Keep the fields of a credential, in place of the previous fields."""

    async def forget(self, path: str) -> None:
        """Remove a credential, if there is one."""


class AdminDeps(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the admin interface."""

    store: Store
    clock: Callable[[], float]
    """Seconds since the epoch."""
    ids: IdFactory
    wake: Callable[[frozenset[str]], None]
    """Called after a commit with the NVLink domains whose intent changed."""
    endpoints_changed: Callable[[], None]
    """Called after a commit that changed the set of switch controllers."""
    browse: Callable[[Endpoint, str, int], Awaitable[str]]
    """Queries a controller with `GetComputeNodeInfoList` or `GetGpuInfoList`. The number is a GPU's GUID, or
    0 for all. Returns JSON. Raises FabricUnavailable and FabricRefused."""
    apply: Callable[[PartitionPlan], Awaitable[tuple[OperationOutcome, ...]]]
    """Executes a plan after a new observation. Raises Refused if it is no longer current."""
    credentials: CredentialStore
    check_endpoint: Callable[[str], None]
    """Raises Refused if this site does not allow the endpoint URL."""

    imports: bool = True
    """Whether operators may import machines from a file."""
    new_machine_status: str = Status.READY
    """The status of the host of an imported machine."""
    valid_seconds: float = DEFAULT_VALID_SECONDS
    """The age at which a reading of a switch controller is outdated."""
    caller: str = "unnamed"
    """Name in the certificate of the caller, set for each call."""
    audit: RequestAudit = msgspec.field(default_factory=RequestAudit)

    def recorded_by(self, trail: AuditTrail) -> "AdminDeps":
        """The dependencies of a call whose changes are entered into the audit log."""
        return msgspec.structs.replace(self, store=self.store.recorded_by(trail.record))

    def valid_from(self) -> float:
        """The time before which a reading is outdated for a call that is made now."""
        return self.clock() - self.valid_seconds

    def order(self, reason: str) -> OperatorOrder:
        """The caller's order, for the record of operator actions."""
        return OperatorOrder(self.caller, reason, self.clock(), self.valid_from())

    async def change(self, work: Callable[[sa.Connection], Changed[T]]) -> T:
        """Run `work` in a write transaction, then wake the reconciler of the domains that it touched."""
        changed = await self.store.run(work)
        self.wake(changed.domains)
        return changed.value


# Rows of tenants, with the org of each.


def rows_with_org(table: sa.Table) -> sa.Select[Any]:
    """The rows of a table of tenants' objects, with the `org` of the tenant, by name."""
    rows = sa.select(table, tenant.c.org).join(tenant, tenant.c.id == table.c.tenant_id)
    return rows.order_by(table.c.name, table.c.id)


# Shared translations.


MAX_IDS_PER_REQUEST = 100
"""Upstream's limit, which its clients use as page size."""

_STATES = {
    Status.PENDING: pb.PROVISIONING,
    Status.PROVISIONING: pb.PROVISIONING,
    Status.CONFIGURING: pb.CONFIGURING,
    Status.READY: pb.READY,
    Status.DELETING: pb.TERMINATING,
    Status.TERMINATING: pb.TERMINATING,
    Status.TERMINATED: pb.TERMINATED,
    Status.ERROR: pb.FAILED,
    # The wire has no unknown state, and CONFIGURING claims nothing.
    Status.UNKNOWN: pb.CONFIGURING,
}


def tenant_state(status: str) -> pb.TenantState.ValueType:
    """The state on the wire."""
    return _STATES[Status(status)]


def config_version(updated: float) -> str:
    """A version that changes with every update: microseconds since the epoch, in upstream's form."""
    return f"V1-T{round(updated * 1_000_000)}"


def check_version(request: Any, updated: float) -> None:
    """Refuse a change that was made from an older version than the current one."""
    if request.HasField("if_version_match") and request.if_version_match != config_version(updated):
        raise conflict(f"ConcurrentModification: the version is {config_version(updated)} now")


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch in the form of the wire."""
    at = Timestamp()
    at.FromMicroseconds(round(seconds * 1_000_000))
    return at


def check_ids(ids: Sequence[object]) -> None:
    """Refuse a list of ids that is empty or above the limit."""
    if not 1 <= len(ids) <= MAX_IDS_PER_REQUEST:
        raise invalid(f"between 1 and {MAX_IDS_PER_REQUEST} ids are needed, not {len(ids)}")
