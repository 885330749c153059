"""Every RPC of the admin server: what it does, and which class of client may ask for it."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import (
    build,
    credentials,
    domains,
    endpoints,
    instances,
    logical_partitions,
    machines,
    operators,
    partitions,
)
from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.identity import Access

FORGE, OPERATOR = "forge.Forge", "rackloom.admin.v1.Operator"


class Rpc(msgspec.Struct, frozen=True):
    """One RPC: the type of its request, what answers it, and who may ask."""

    request: type[Any]
    answer: Callable[[AdminDeps, Any], Awaitable[Any]]
    access: Access


def _read(request: type[Any], answer: Callable[[AdminDeps, Any], Awaitable[Any]]) -> Rpc:
    return Rpc(request, answer, Access.READER)


def _write(request: type[Any], answer: Callable[[AdminDeps, Any], Awaitable[Any]]) -> Rpc:
    return Rpc(request, answer, Access.ADMIN)


_lp, _pp = logical_partitions, partitions

RPCS: dict[str, dict[str, Rpc]] = {
    FORGE: {
        "Version": _read(pb.VersionRequest, build.tell),
        "ListNvlinkNmxcEndpoints": _read(Empty, endpoints.list_all),
        "CreateNvlinkNmxcEndpoint": _write(pb.NvlinkNmxcEndpoint, endpoints.create),
        "UpdateNvlinkNmxcEndpoint": _write(pb.NvlinkNmxcEndpoint, endpoints.update),
        "DeleteNvlinkNmxcEndpoint": _write(pb.DeleteNvlinkNmxcEndpointRequest, endpoints.delete),
        "NmxcBrowse": _read(pb.NmxcBrowseRequest, endpoints.browse),
        "FindNVLinkPartitionIds": _read(pb.NVLinkPartitionSearchFilter, _pp.find_ids),
        "FindNVLinkPartitionsByIds": _read(pb.NVLinkPartitionsByIdsRequest, _pp.find_by_ids),
        "NVLinkPartitionsForTenant": _read(pb.TenantSearchQuery, _pp.of_tenant),
        "FindNVLinkLogicalPartitionIds": _read(pb.NVLinkLogicalPartitionSearchFilter, _lp.find_ids),
        "FindNVLinkLogicalPartitionsByIds": _read(pb.NVLinkLogicalPartitionsByIdsRequest, _lp.find_by_ids),
        "NVLinkLogicalPartitionsForTenant": _read(pb.TenantSearchQuery, _lp.of_tenant),
        "CreateNVLinkLogicalPartition": _write(pb.NVLinkLogicalPartitionCreationRequest, _lp.create),
        "UpdateNVLinkLogicalPartition": _write(pb.NVLinkLogicalPartitionUpdateRequest, _lp.update),
        "DeleteNVLinkLogicalPartition": _write(pb.NVLinkLogicalPartitionDeletionRequest, _lp.delete),
        "FindMachineIds": _read(pb.MachineSearchConfig, machines.find_ids),
        "FindMachinesByIds": _read(pb.MachinesByIdsRequest, machines.find_by_ids),
        "UpdateMachineNvLinkInfo": _write(pb.UpdateMachineNvLinkInfoRequest, machines.update_nvlink_info),
        "AdminForceDeleteMachine": _write(pb.AdminForceDeleteMachineRequest, machines.force_delete),
        "FindInstanceIds": _read(pb.InstanceSearchFilter, instances.find_ids),
        "FindInstancesByIds": _read(pb.InstancesByIdsRequest, instances.find_by_ids),
        "FindInstanceByMachineID": _read(ids_pb.MachineId, instances.find_by_machine),
        "UpdateInstanceConfig": _write(pb.InstanceConfigUpdateRequest, instances.update_config),
        "ReleaseInstance": _write(pb.InstanceReleaseRequest, instances.release),
        "CreateCredential": _write(pb.CredentialCreationRequest, credentials.create),
        "DeleteCredential": _write(pb.CredentialDeletionRequest, credentials.delete),
    },
    OPERATOR: {
        "MakePlan": _read(ours.PlanRequest, operators.make),
        "ApplyPlan": _write(ours.ApplyRequest, operators.apply),
        "ImportMachines": _write(ours.ImportRequest, operators.import_machines),
        "ShowDomains": _read(ours.DomainsRequest, domains.show),
        "PauseDomain": _write(ours.DomainRequest, operators.pause),
        "ResumeDomain": _write(ours.DomainRequest, operators.resume),
        "CordonTray": _write(ours.TrayRequest, operators.cordon),
        "UncordonTray": _write(ours.TrayRequest, operators.uncordon),
        "AdoptPartition": _write(ours.AdoptRequest, operators.adopt),
        "ReleasePartition": _write(ours.ReleaseRequest, operators.release),
        "DrainTray": _write(ours.TrayRequest, operators.drain),
    },
}
"""Service -> RPC name -> RPC."""
