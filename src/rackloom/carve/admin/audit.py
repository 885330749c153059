"""The audit log of the admin interface: the entry of each call, and the export of the log.

`begin_trail` makes the trail of a call that may change something. `SUBJECTS` has the object of each such RPC.
If an RPC changes no records (it applies a plan or keeps a credential), its entry is written before its reply.
The name of the caller comes from the certificate, and its address from the connection.

An export is read in parts, oldest entries first, each with one short read. The caller requests the next part
by the last id that it has.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import grpc
import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import audit
from rackloom.carve.store.audit import ADMIN, AuditRecord
from rackloom.carve.store.audit_trail import AuditedObject, AuditTrail
from rackloom.core.takeover import records as takeover
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.grpc_server import client_address

# The object of each RPC.


Subject = Callable[[Any], AuditedObject]
"""From the request of an RPC to its object."""


def _logical_partition(request: Any) -> AuditedObject:
    name = request.config.metadata.name if hasattr(request, "config") else ""
    return AuditedObject("nvlink-logical-partition", request.id.value, name)


def _new_logical_partition(request: Any) -> AuditedObject:
    return msgspec.structs.replace(
        _logical_partition(request), tenant_org=request.config.tenant_organization_id.lower() or None
    )


def _partition(request: Any) -> AuditedObject:
    return AuditedObject("nvlink-partition", request.domain, request.partition_name)


def _adopted_partition(request: Any) -> AuditedObject:
    org = request.owner.tenant_organization_id.lower() or None
    return msgspec.structs.replace(_partition(request), tenant_org=org)


def _new_reservation(request: Any) -> AuditedObject:
    return AuditedObject("tray-reservation", tenant_org=request.tenant_organization_id.lower() or None)


def _takeover_step(request: Any) -> AuditedObject:
    """The object that a step creates or removes, or only `import` if it is not a step."""
    try:
        step = decode_json(request.step, "the step", takeover.Step)
    except Undecodable:
        return AuditedObject("import")
    match step:
        case takeover.PauseDomain() | takeover.SettleDomain():
            return AuditedObject("nvlink-domain", step.domain)
        case takeover.AdoptPartition():
            return AuditedObject("nvlink-partition", step.domain, step.name)
        case takeover.AssignMachineType() | takeover.CordonMachine():
            return AuditedObject("machine", step.machine)
    kind = takeover.kind_of_step(step)
    named = {"logical-partition": "nvlink-logical-partition"}.get(kind, kind)
    return AuditedObject(named, step.id, getattr(step, "name", ""), getattr(step, "org", None))


def _of_kind(kind: str, field: str = "") -> Subject:
    """An object with its id in a field of the request, such as `instance_id.value`."""
    read_id = attrgetter(field) if field else lambda _request: ""
    return lambda request: AuditedObject(kind, read_id(request))


_chassis = _of_kind("nvlink-nmxc-endpoint", "chassis_serial")
_domain = _of_kind("nvlink-domain", "domain")
_tray = _of_kind("machine", "machine_id")


SUBJECTS: Mapping[str, Subject] = {
    "CreateNvlinkNmxcEndpoint": _chassis,
    "UpdateNvlinkNmxcEndpoint": _chassis,
    "DeleteNvlinkNmxcEndpoint": _chassis,
    "CreateNVLinkLogicalPartition": _new_logical_partition,
    "UpdateNVLinkLogicalPartition": _logical_partition,
    "DeleteNVLinkLogicalPartition": _logical_partition,
    "UpdateMachineNvLinkInfo": _of_kind("machine", "machine_id.id"),
    "AdminForceDeleteMachine": _of_kind("machine", "host_query"),
    "UpdateInstanceConfig": _of_kind("instance", "instance_id.value"),
    "ReleaseInstance": _of_kind("instance", "id.value"),
    "CreateCredential": _of_kind("credential"),
    "DeleteCredential": _of_kind("credential"),
    "ApplyPlan": _of_kind("plan"),
    "ImportMachines": _of_kind("machine"),
    "PauseDomain": _domain,
    "ResumeDomain": _domain,
    "CordonTray": _tray,
    "UncordonTray": _tray,
    "DrainTray": _tray,
    "CreateTrayReservation": _new_reservation,
    "DeleteTrayReservation": _of_kind("tray-reservation", "id"),
    "AdoptPartition": _adopted_partition,
    "ReleasePartition": _partition,
    "RunTakeoverStep": _takeover_step,
}
"""RPC that may change something -> the object of its request."""


# The trail of a call.


HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
}
"""gRPC status -> the status of the same error in REST."""


def begin_trail(deps: AdminDeps, service: str, rpc: str, request: Any, peer: str) -> AuditTrail:
    """The trail of a call. A read has one only if it is refused."""
    subject = SUBJECTS.get(rpc, _of_kind(""))(request)
    entry = AuditRecord(
        channel=ADMIN,
        subject=deps.caller,
        by_operator=True,
        source=client_address(peer),
        request_id=deps.audit.request_ids(),
        operation=rpc,
        path=f"/{service}/{rpc}",
        object_kind=subject.kind,
        object_id=subject.id,
        object_name=subject.name,
        tenant_org=subject.tenant_org,
        code=grpc.StatusCode.OK.name,
        reason=getattr(request, "reason", ""),
        fields=tuple(sorted(field.name for field, _ in request.ListFields())),
    )
    trail = AuditTrail(entry, deps.clock, deps.clock())
    if logical_partition := getattr(request, "logical_partition_id", ""):
        trail.owner = ("nvlink-logical-partition", logical_partition)
    return trail


def refuse(deps: AdminDeps, trail: AuditTrail, code: grpc.StatusCode, message: str) -> None:
    """Count a refused call."""
    deps.audit.refuse(trail.refused(HTTP_STATUS[code], code.name, message), deps.clock())


# The export.


PART = 500
"""Entries per reply."""


async def export_entries(deps: AdminDeps, request: pb.AuditExportRequest) -> pb.AuditExportReply:
    """The next entries as JSON, oldest first."""
    since = request.since.ToMicroseconds() / 1e6 if request.HasField("since") else None
    until = request.until.ToMicroseconds() / 1e6 if request.HasField("until") else None
    rows = await deps.store.read(audit.entries_after, request.after, since, until, PART)
    wanted = [
        row
        for row in rows
        if (since is None or row.created >= since) and (until is None or row.created < until)
    ]
    return pb.AuditExportReply(
        entries=[msgspec.json.encode(exported(row)) for row in wanted], last=rows[-1].id if rows else 0
    )


def exported(row: sa.Row[Any]) -> dict[str, Any]:
    """An entry in the form of an export line: the columns, with times in RFC 3339."""
    entry = dict(row._mapping)
    names = ("created", "first", "last")
    times = {name: None if entry[name] is None else rfc3339(entry[name]) for name in names}
    return entry | times
