"""The admin gRPC server: mutual TLS, authorization by certificate name, dispatch, and error mapping.

TLS refuses a client without a certificate of the operator's CA. `serving.grpc_server` limits the resources
of such a client until then. The common name or an alternative name of the certificate then decides the access
class: admin or reader. An admin may also read. `RPCS` is the complete table of services and methods, each
with its request type, handler and required class.

Only this module turns a refusal into a gRPC status code. The nearest fix travels as UTF-8 in the trailing
metadata `nearest-fix-bin`. An unexpected error is logged and answered as INTERNAL without details.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

import grpc
import msgspec
import structlog
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import (
    audit,
    endpoints,
    instances,
    logical_partitions,
    machines,
    operators,
    partitions,
    reservations,
)
from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.store.values import RefusalKind, Rejected
from rackloom.errors import Refused, Retry, Unknown
from rackloom.serving.acceptor import ConnectionEnded, bound_socket, split_listen
from rackloom.serving.grpc_server import GrpcServer
from rackloom.serving.limits import SITE_ADMIN

# Access classes.


class AccessClass(StrEnum):
    """Classes of clients. An admin may also read."""

    ADMIN = "admin"
    READER = "reader"


class ClientIdentities(msgspec.Struct, frozen=True):
    """The certificate names of each class."""

    admins: frozenset[str]
    readers: frozenset[str]

    def name(self, auth_context: Mapping[str, Collection[bytes]]) -> str:
        """The name of the client in the log."""
        return next(iter(_certificate_names(auth_context)), "unnamed")

    def allows(self, auth_context: Mapping[str, Collection[bytes]], needed: AccessClass) -> bool:
        """Whether a client with this certificate has the class `needed`."""
        names = set(_certificate_names(auth_context))
        if names & self.admins:
            return True
        return needed is AccessClass.READER and bool(names & self.readers)


def _certificate_names(auth_context: Mapping[str, Collection[bytes]]) -> list[str]:
    keys = ("x509_common_name", "x509_subject_alternative_name")
    return [value.decode(errors="replace") for key in keys for value in auth_context.get(key, ())]


# Errors.


FIX_METADATA_KEY = "nearest-fix-bin"
"""Trailing metadata with the nearest fix of a refused request, in UTF-8."""

EXPECTED_ERRORS = (Refused, Retry, Unknown, FabricRefused, FabricUnavailable)
"""The errors that a handler may raise. Any other error is a defect."""

_CODES = {
    RefusalKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    RefusalKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    RefusalKind.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_code_of(error: Exception) -> grpc.StatusCode:
    """The status code that fits the caller's remedy for `error`."""
    if isinstance(error, Rejected):
        # A conflict that names the object in the way is one of identity, not of state.
        exists = error.kind is RefusalKind.CONFLICT and "id" in (error.data or {})
        return grpc.StatusCode.ALREADY_EXISTS if exists else _CODES[error.kind]
    if isinstance(error, Refused | FabricRefused):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.UNAVAILABLE


def fix_metadata_of(error: Exception) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the nearest fix, if there is one."""
    fix = error.nearest_fix if isinstance(error, Refused) else None
    return () if fix is None else ((FIX_METADATA_KEY, fix.encode()),)


# The table of RPCs.


FORGE, OPERATOR = "forge.Forge", "rackloom.admin.v1.Operator"


class RpcMethod(msgspec.Struct, frozen=True):
    """One RPC: the type of its request, its handler, and who may call it."""

    request: type[Any]
    handler: Callable[[AdminDeps, Any], Awaitable[Any]]
    access: AccessClass = AccessClass.ADMIN


_admin_rpc, _reader_rpc = RpcMethod, partial(RpcMethod, access=AccessClass.READER)


_logical, _physical = logical_partitions, partitions

RPCS: dict[str, dict[str, RpcMethod]] = {
    FORGE: {
        "Version": _reader_rpc(pb.VersionRequest, endpoints.show_version),
        "ListNvlinkNmxcEndpoints": _reader_rpc(Empty, endpoints.list_endpoints),
        "CreateNvlinkNmxcEndpoint": _admin_rpc(pb.NvlinkNmxcEndpoint, endpoints.create_endpoint),
        "UpdateNvlinkNmxcEndpoint": _admin_rpc(pb.NvlinkNmxcEndpoint, endpoints.update_endpoint),
        "DeleteNvlinkNmxcEndpoint": _admin_rpc(pb.DeleteNvlinkNmxcEndpointRequest, endpoints.delete_endpoint),
        "NmxcBrowse": _reader_rpc(pb.NmxcBrowseRequest, endpoints.browse_controller),
        "FindNVLinkPartitionIds": _reader_rpc(pb.NVLinkPartitionSearchFilter, _physical.find_ids),
        "FindNVLinkPartitionsByIds": _reader_rpc(pb.NVLinkPartitionsByIdsRequest, _physical.find_by_ids),
        "NVLinkPartitionsForTenant": _reader_rpc(pb.TenantSearchQuery, _physical.of_tenant),
        "FindNVLinkLogicalPartitionIds": _reader_rpc(
            pb.NVLinkLogicalPartitionSearchFilter, _logical.find_ids
        ),
        "FindNVLinkLogicalPartitionsByIds": _reader_rpc(
            pb.NVLinkLogicalPartitionsByIdsRequest, _logical.find_by_ids
        ),
        "NVLinkLogicalPartitionsForTenant": _reader_rpc(pb.TenantSearchQuery, _logical.of_tenant),
        "CreateNVLinkLogicalPartition": _admin_rpc(pb.NVLinkLogicalPartitionCreationRequest, _logical.create),
        "UpdateNVLinkLogicalPartition": _admin_rpc(pb.NVLinkLogicalPartitionUpdateRequest, _logical.update),
        "DeleteNVLinkLogicalPartition": _admin_rpc(pb.NVLinkLogicalPartitionDeletionRequest, _logical.delete),
        "FindMachineIds": _reader_rpc(pb.MachineSearchConfig, machines.find_ids),
        "FindMachinesByIds": _reader_rpc(pb.MachinesByIdsRequest, machines.find_by_ids),
        "UpdateMachineNvLinkInfo": _admin_rpc(pb.UpdateMachineNvLinkInfoRequest, machines.update_nvlink_info),
        "AdminForceDeleteMachine": _admin_rpc(pb.AdminForceDeleteMachineRequest, machines.force_delete),
        "FindInstanceIds": _reader_rpc(pb.InstanceSearchFilter, instances.find_ids),
        "FindInstancesByIds": _reader_rpc(pb.InstancesByIdsRequest, instances.find_by_ids),
        "FindInstanceByMachineID": _reader_rpc(ids_pb.MachineId, instances.find_by_machine),
        "UpdateInstanceConfig": _admin_rpc(pb.InstanceConfigUpdateRequest, instances.update_config),
        "ReleaseInstance": _admin_rpc(pb.InstanceReleaseRequest, instances.release),
        "CreateCredential": _admin_rpc(pb.CredentialCreationRequest, endpoints.create_credential),
        "DeleteCredential": _admin_rpc(pb.CredentialDeletionRequest, endpoints.delete_credential),
    },
    OPERATOR: {
        "MakePlan": _reader_rpc(ours.PlanRequest, operators.make_domain_plan),
        "ApplyPlan": _admin_rpc(ours.ApplyRequest, operators.apply_plan),
        "ImportMachines": _admin_rpc(ours.ImportRequest, operators.import_machines),
        "ShowDomains": _reader_rpc(ours.DomainsRequest, operators.show_domains),
        "PauseDomain": _admin_rpc(ours.DomainRequest, operators.pause),
        "ResumeDomain": _admin_rpc(ours.DomainRequest, operators.resume),
        "CordonTray": _admin_rpc(ours.TrayRequest, operators.cordon),
        "UncordonTray": _admin_rpc(ours.TrayRequest, operators.uncordon),
        "AdoptPartition": _admin_rpc(ours.AdoptRequest, operators.adopt),
        "ReleasePartition": _admin_rpc(ours.ReleaseRequest, operators.release),
        "DrainTray": _admin_rpc(ours.TrayRequest, operators.drain),
        "ListTrayReservations": _reader_rpc(ours.TrayReservationsRequest, reservations.list_all),
        "CreateTrayReservation": _admin_rpc(ours.TrayReservationOrder, reservations.create),
        "DeleteTrayReservation": _admin_rpc(ours.TrayReservationDeletion, reservations.delete),
        "ShowTakeoverSite": _reader_rpc(ours.TakeoverSiteRequest, operators.show_takeover_site),
        "RunTakeoverStep": _admin_rpc(ours.TakeoverStepRequest, operators.run_takeover_step),
        "ExportAuditEntries": _reader_rpc(ours.AuditExportRequest, audit.export_entries),
    },
}
"""Service -> RPC name -> RPC."""


# The server.


log = structlog.get_logger(__name__)

GRACE_SECONDS = 2.0


class AdminTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents. All are required: there is no admin interface without mutual TLS."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class AdminServer:
    """Serves the admin RPCs on `listen` (`host:port`, port 0 for a free one) while the context is entered."""

    def __init__(
        self,
        deps: AdminDeps,
        identities: ClientIdentities,
        tls: AdminTls,
        listen: str,
        ended: ConnectionEnded = lambda _: None,
    ) -> None:
        self._deps = deps
        self._ended = ended
        self._identities = identities
        self._tls = tls
        self._listen = listen
        self._server: GrpcServer | None = None
        self.port = 0

    async def __aenter__(self) -> "AdminServer":
        """Begin to listen. Raises Refused if the address or the certificates cannot be used."""
        handlers = [self._handlers(service, rpcs) for service, rpcs in RPCS.items()]
        try:
            credentials = grpc.ssl_server_credentials(
                [(self._tls.key, self._tls.certificate)], self._tls.client_ca, require_client_auth=True
            )
            server = GrpcServer(handlers, SITE_ADMIN, credentials, self._ended)
            listener = bound_socket(*split_listen(self._listen))
        except (RuntimeError, ValueError, OSError, OverflowError) as error:
            raise Refused(
                f"the admin interface cannot listen on {self._listen}",
                nearest_fix="check [admin]: is the address in use, does the key fit the certificate?",
            ) from error
        self.port = listener.getsockname()[1]
        await server.start(listener)
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish the open calls, and stop."""
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)

    def _handlers(self, service: str, rpcs: Mapping[str, RpcMethod]) -> grpc.GenericRpcHandler:
        methods = {name: self._method(service, name, rpc) for name, rpc in rpcs.items()}
        return grpc.method_handlers_generic_handler(service, methods)

    def _method(self, service: str, name: str, rpc: RpcMethod) -> grpc.RpcMethodHandler:
        async def answer(request: Any, context: Any) -> Any:
            return await self._answer(service, name, rpc, request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=rpc.request.FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )

    async def _answer(self, service: str, name: str, rpc: RpcMethod, request: Any, context: Any) -> Any:
        certificate = context.auth_context()
        caller = self._identities.name(certificate)
        deps, trail = msgspec.structs.replace(self._deps, caller=caller), None
        is_allowed = self._identities.allows(certificate, rpc.access)
        if rpc.access is AccessClass.ADMIN or not is_allowed:
            trail = audit.begin_trail(deps, service, name, request, context.peer())

        async def refuse(
            code: grpc.StatusCode, message: str, fix: tuple[tuple[str, bytes], ...] = ()
        ) -> None:
            if trail is not None:
                audit.refuse(deps, trail, code, message)
            await context.abort(code, message, fix)

        if not is_allowed:
            log.warning("admin.denied", rpc=name, caller=caller)
            await refuse(grpc.StatusCode.PERMISSION_DENIED, f"certificate {caller} may not call {name}")
        try:
            if trail is None:
                return await rpc.handler(deps, request)
            log.info("admin.call", rpc=name, caller=caller)
            reply = await rpc.handler(deps.recorded_by(trail), request)
            if not trail.is_recorded:
                await deps.store.run(trail.record_alone)
        except EXPECTED_ERRORS as error:
            await refuse(
                status_code_of(error),
                (error.reason if isinstance(error, Refused | Retry | Unknown) else str(error)),
                fix_metadata_of(error),
            )
        except Exception:
            log.exception("admin.failed", rpc=name, caller=caller)
            await refuse(grpc.StatusCode.INTERNAL, "internal error: see the log of the service")
        else:
            return reply
