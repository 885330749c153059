"""Builds the audit entry of a request, and keeps refused requests until theirs are written.

`AuditTrail` collects the facts of a request. `Store.recorded_by` lets its `record` run each function
that writes, so that the entry is written in the transaction of the change (a transactional outbox). So
no change is acknowledged without its entry, and no change that is rolled back has an entry of success,
also after SIGKILL.

The name and the tenant of an object are read before the change, because a deletion leaves none. An object
that a change creates is found in its result. A change of several objects has an entry for each, with one
request id.

The interfaces share `RequestAudit`. Refused requests are counted in it, in groups (`core.refusal_log`),
until a background job writes them: a flood of them costs no extra transactions. Those that are not written
when the process is killed are lost. Nothing was changed by them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from rackloom.carve.store import schema
from rackloom.carve.store.audit import AuditRecord, append_entries
from rackloom.carve.store.prepared import PreparedStatement
from rackloom.carve.store.schema import tenant
from rackloom.carve.store.values import Changed, IdFactory
from rackloom.core.refusal_log import Emission, RefusalLog

# Objects.


class AuditedObject(msgspec.Struct, frozen=True):
    """The object of a request."""

    kind: str = ""
    id: str = ""
    name: str = ""
    tenant_org: str | None = None


OF_TENANTS: Mapping[str, sa.Table] = {
    "allocation": schema.allocation,
    "nvlink-logical-partition": schema.logical_partition,
    "vpc": schema.vpc,
    "instance": schema.instance,
}
_NAMED: Mapping[str, sa.Table] = {"site": schema.site, "instance-type": schema.instance_type}
ID_FIELDS = {"nvlink-partition": "nvLinkDomainId", "nvlink-nmxc-endpoint": "chassisSerial", "role": "name"}
"""The field of an answer that names the object, if it is not `id`: partitions are found by domain."""


@cache
def _prepared_object_query(kind: str) -> PreparedStatement | None:
    query = _object_query(kind)
    return None if query is None else PreparedStatement(query)


def _object_query(kind: str) -> sa.Select[Any] | None:
    """The name of an object, and the organisation of its tenant."""
    wanted: sa.BindParameter[str] = sa.bindparam("wanted")
    nobody = sa.null().label("org")
    if (table := OF_TENANTS.get(kind)) is not None:
        rows = sa.select(table.c.name, tenant.c.org).join(tenant, tenant.c.id == table.c.tenant_id)
        return rows.where(table.c.id == wanted)
    if (table := _NAMED.get(kind)) is not None:
        return sa.select(table.c.name, nobody).where(table.c.id == wanted)
    if kind == "tenant":
        return sa.select(tenant.c.org.label("name"), tenant.c.org).where(tenant.c.id == wanted)
    if kind == "tray-reservation":
        kept = schema.tray_reservation
        rows = sa.select(sa.literal("").label("name"), tenant.c.org).select_from(kept)
        return rows.join(tenant, tenant.c.id == kept.c.tenant_id).where(kept.c.id == wanted)
    if kind == "machine":
        # A step at a machine concerns the tenant that has an instance there.
        rows = sa.select(sa.literal("").label("name"), tenant.c.org).select_from(schema.instance)
        rows = rows.join(tenant, tenant.c.id == schema.instance.c.tenant_id)
        return rows.where(schema.instance.c.machine_id == wanted)
    return None


def object_of(conn: sa.Connection, kind: str, object_id: str) -> AuditedObject:
    """The object with its name and its tenant, as far as the records have them."""
    query = _prepared_object_query(kind) if object_id else None
    row = None if query is None else query.one_or_none(conn, {"wanted": object_id})
    if row is None:
        return AuditedObject(kind, object_id)
    return AuditedObject(kind, object_id, row.name, row.org)


# The trail of one request.


T = TypeVar("T")


class AuditTrail:
    """The entry of one request, as far as it is known. `record` writes it beside the change."""

    def __init__(self, entry: AuditRecord, clock: Callable[[], float], arrived: float) -> None:
        """`clock` gives the time of the site, at which the request `arrived`."""
        self.entry = entry
        self.is_recorded = False
        self.owner: tuple[str, str] | None = None
        """Kind and id of an object whose tenant may read the entry as well."""
        self._clock = clock
        self._arrived = arrived

    def know(self, **known: Any) -> None:
        """Something more is known of the request."""
        self.entry = msgspec.structs.replace(self.entry, **known)

    def record(self, conn: sa.Connection, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` and write the entry, in one transaction."""
        entry = self.entry
        before = AuditedObject(entry.object_kind, entry.object_id)
        if entry.object_id and (entry.by_operator or entry.method == "DELETE"):
            before = object_of(conn, entry.object_kind, entry.object_id)
        owner = object_of(conn, *self.owner).tenant_org if self.owner else None
        value = work(conn)
        append_entries(conn, self._entries(conn, value, before, owner))
        # This does not matter if the transaction fails: the request is refused then.
        self.is_recorded = True
        return value

    def record_alone(self, conn: sa.Connection) -> None:
        """Write the entry of a request that changes no records."""
        self.record(conn, lambda _: None)

    def refused(self, status: int, code: str, message: str) -> AuditRecord:
        """The entry of a request that was refused."""
        return msgspec.structs.replace(self.entry, status=status, code=code, message=message)

    def _entries(
        self, conn: sa.Connection, value: object, before: AuditedObject, owner: str | None
    ) -> list[AuditRecord]:
        now = self._clock()
        written = msgspec.structs.replace(
            self.entry, created=now, duration_ms=max(0, round((now - self._arrived) * 1000))
        )
        made = value.value if isinstance(value, Changed) else value
        # A list that answers a change of the object in the path concerns that object alone.
        several = made if isinstance(made, list) and made and not self.entry.object_id else [made]
        return [self._of_object(conn, written, facts_of(single), before, owner) for single in several]

    def _of_object(
        self,
        conn: sa.Connection,
        entry: AuditRecord,
        facts: Mapping[str, Any],
        before: AuditedObject,
        owner: str | None,
    ) -> AuditRecord:
        made = str(facts.get(ID_FIELDS.get(entry.object_kind, "id")) or "")
        object_id = entry.object_id or made
        is_same = object_id == made
        name = entry.object_name or before.name or str((facts.get("name") if is_same else "") or "")
        org = entry.tenant_org or before.tenant_org or owner
        if org is None and is_same:
            org = facts.get("org") or _tenant_of(conn, facts)
        return msgspec.structs.replace(entry, object_id=object_id, object_name=name, tenant_org=org)


def facts_of(value: object) -> Mapping[str, Any]:
    """The fields of a change's result: those of a response, or the columns of a row."""
    if isinstance(value, Mapping):
        return value
    return value._asdict() if isinstance(value, sa.Row) else {}


def _tenant_of(conn: sa.Connection, facts: Mapping[str, Any]) -> str | None:
    for field, kind in (("tenantId", "tenant"), ("nvLinkLogicalPartitionId", "nvlink-logical-partition")):
        if found := facts.get(field):
            return object_of(conn, kind, str(found)).tenant_org
    return None


# Shared by the interfaces.


LEFT_OUT = "more kinds of requests of one organisation were refused than are listed one by one"
_numbers = itertools.count(1)


class RequestAudit:
    """Refused requests that have no entry yet, and how requests are identified."""

    def __init__(
        self,
        request_ids: IdFactory = lambda: str(next(_numbers)),
        trusted_proxies: Sequence[IPv4Network | IPv6Network] = (),
        counted: Callable[[str, str], None] = lambda _channel, _result: None,
        unauthenticated: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """`counted` gets channel and result of a refused request, `unauthenticated` why one has no caller."""
        self.request_ids = request_ids
        self.trusted_proxies = tuple(trusted_proxies)
        self.unauthenticated = unauthenticated
        self._counted = counted
        self._refusals: RefusalLog[AuditRecord] = RefusalLog()

    def refuse(self, entry: AuditRecord, now: float) -> None:
        """Count a refused request. `entry` is its audit entry."""
        self._counted(entry.channel, entry.code or str(entry.status))
        key = (entry.subject, entry.operation or entry.method, entry.status, entry.code)
        # Operators have no organisation, so each one counts as an organisation.
        self._refusals.add(entry.org or f"{entry.channel}:{entry.subject}", key, entry, now)

    def due(self, now: float, *, all_of_it: bool = False) -> Sequence[Emission[AuditRecord]]:
        """The entries that are due."""
        return self._refusals.due(now, all_of_it=all_of_it)

    def written(self, emissions: Sequence[Emission[AuditRecord]], now: float) -> None:
        """These were written."""
        self._refusals.written(emissions, now)


def append_refusals(
    conn: sa.Connection, emissions: Sequence[Emission[AuditRecord]], clock: Callable[[], float]
) -> None:
    """Append the entries of refused requests."""
    now = clock()
    append_entries(conn, [_entry_of(emission, now) for emission in emissions])


def _entry_of(emission: Emission[AuditRecord], now: float) -> AuditRecord:
    entry = emission.sample
    times: dict[str, Any] = {"created": now, "first": emission.first, "last": emission.last}
    times["requests"] = emission.requests
    if emission.key is not None:
        return msgspec.structs.replace(entry, **times)
    return AuditRecord(
        channel=entry.channel,
        org=entry.org,
        by_operator=entry.by_operator,
        tenant_org=entry.tenant_org,
        operation="left-out",
        status=entry.status,
        message=LEFT_OUT,
        **times,
    )
