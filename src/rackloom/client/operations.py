"""Operations of the service, each a function that makes its request. Written by `make client`."""

from datetime import datetime
from typing import Literal

from rackloom.client import models
from rackloom.client.call import Call, Many, PagedCall, path_of


def get_metadata() -> Call[models.Metadata]:
    """Which versions of the contract are served, what of them is not, and which build this is.

    GET /metadata
    """
    return Call(operation="get-metadata", method="GET", path=path_of("metadata"), answer=models.Metadata)


def get_current_tenant() -> Call[models.Tenant]:
    """The tenant of the org, made by the first call.

    GET /tenant/current
    """
    return Call(
        operation="get-current-tenant", method="GET", path=path_of("tenant", "current"), answer=models.Tenant
    )


def get_current_infrastructure_provider() -> Call[models.Org]:
    """The infrastructure provider of the org.

    GET /infrastructure-provider/current
    """
    return Call(
        operation="get-current-infrastructure-provider",
        method="GET",
        path=path_of("infrastructure-provider", "current"),
        answer=models.Org,
    )


def get_current_service_account() -> Call[models.ServiceAccount]:
    """Whether the org is provider and tenant in one, and as which.

    GET /service-account/current
    """
    return Call(
        operation="get-current-service-account",
        method="GET",
        path=path_of("service-account", "current"),
        answer=models.ServiceAccount,
    )


def get_current_tenant_quota() -> Call[list[models.Quota]]:
    """The caller's quotas.

    GET /tenant/current/quota
    """
    return Call(
        operation="get-current-tenant-quota",
        method="GET",
        path=path_of("tenant", "current", "quota"),
        answer=list[models.Quota],
    )


def get_tenant_quota(tenant_id: str) -> Call[list[models.Quota]]:
    """The quotas of a tenant that has an allocation at a site of the caller.

    GET /tenant/{tenantId}/quota
    """
    return Call(
        operation="get-tenant-quota",
        method="GET",
        path=path_of("tenant", tenant_id, "quota"),
        answer=list[models.Quota],
    )


def update_tenant_quota(tenant_id: str, body: models.QuotaUpdate) -> Call[list[models.Quota]]:
    """Set limits. One below what the tenant has takes nothing away, and refuses anything new.

    PATCH /tenant/{tenantId}/quota
    """
    return Call(
        operation="update-tenant-quota",
        method="PATCH",
        path=path_of("tenant", tenant_id, "quota"),
        answer=list[models.Quota],
        body=body,
    )


def get_all_site(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    infrastructure_provider_id: str | None = None,
    is_native_networking_enabled: bool | None = None,
    is_network_security_group_enabled: bool | None = None,
    is_nv_link_partition_enabled: bool | None = None,
    is_flow_enabled: bool | None = None,
    is_rack_level_administration_enabled: bool | None = None,
    tenant_id: Many[str] | None = None,
    status: Many[Literal["Pending", "Registered", "Deleting", "Error"]] | None = None,
    query: str | None = None,
    include_machine_stats: bool | None = None,
    include_gpu_stats: bool | None = None,
) -> PagedCall[models.Site]:
    """The sites that the caller may see.

    GET /site
    """
    return PagedCall(
        operation="get-all-site",
        path=path_of("site"),
        item=models.Site,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "infrastructureProviderId": infrastructure_provider_id,
            "isNativeNetworkingEnabled": is_native_networking_enabled,
            "isNetworkSecurityGroupEnabled": is_network_security_group_enabled,
            "isNVLinkPartitionEnabled": is_nv_link_partition_enabled,
            "isFlowEnabled": is_flow_enabled,
            "isRackLevelAdministrationEnabled": is_rack_level_administration_enabled,
            "tenantId": tenant_id,
            "status": status,
            "query": query,
            "includeMachineStats": include_machine_stats,
            "includeGpuStats": include_gpu_stats,
        },
    )


def get_site(site_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Site]:
    """One site.

    GET /site/{siteId}
    """
    return Call(
        operation="get-site",
        method="GET",
        path=path_of("site", site_id),
        answer=models.Site,
        query={"includeRelation": include_relation},
    )


def update_site(site_id: str, body: models.SiteUpdate) -> Call[models.Site]:
    """Change what is said of a site, and switch its capabilities.

    PATCH /site/{siteId}
    """
    return Call(
        operation="update-site", method="PATCH", path=path_of("site", site_id), answer=models.Site, body=body
    )


def get_site_status_history(site_id: str, *, order_by: str | None = None) -> PagedCall[models.StatusDetail]:
    """How the site came to its status, newest first.

    GET /site/{siteId}/status-history
    """
    return PagedCall(
        operation="get-site-status-history",
        path=path_of("site", site_id, "status-history"),
        item=models.StatusDetail,
        query={"orderBy": order_by},
    )


def get_all_instance_type(
    *,
    include_relation: Many[str] | None = None,
    include_machine_assignment: bool | None = None,
    include_machine_association: bool | None = None,
    include_allocation_stats: bool | None = None,
    order_by: str | None = None,
    site_id: str | None = None,
    infrastructure_provider_id: str | None = None,
    tenant_id: str | None = None,
    status: Literal["Pending", "Registering", "Ready", "Deleting", "Error"] | None = None,
    query: str | None = None,
    exclude_unallocated: bool | None = None,
) -> PagedCall[models.InstanceType]:
    """The instance types that the caller may see.

    GET /instance/type
    """
    return PagedCall(
        operation="get-all-instance-type",
        path=path_of("instance", "type"),
        item=models.InstanceType,
        query={
            "includeRelation": include_relation,
            "includeMachineAssignment": include_machine_assignment,
            "includeMachineAssociation": include_machine_association,
            "includeAllocationStats": include_allocation_stats,
            "orderBy": order_by,
            "siteId": site_id,
            "infrastructureProviderId": infrastructure_provider_id,
            "tenantId": tenant_id,
            "status": status,
            "query": query,
            "excludeUnallocated": exclude_unallocated,
        },
    )


def create_instance_type(body: models.InstanceTypeCreate) -> Call[models.InstanceType]:
    """A new instance type.

    POST /instance/type
    """
    return Call(
        operation="create-instance-type",
        method="POST",
        path=path_of("instance", "type"),
        answer=models.InstanceType,
        body=body,
    )


def get_instance_type(
    instance_type_id: str,
    *,
    include_relation: Many[str] | None = None,
    include_machine_assignment: bool | None = None,
    include_machine_association: bool | None = None,
    include_allocation_stats: bool | None = None,
) -> Call[models.InstanceType]:
    """One instance type.

    GET /instance/type/{instanceTypeId}
    """
    return Call(
        operation="get-instance-type",
        method="GET",
        path=path_of("instance", "type", instance_type_id),
        answer=models.InstanceType,
        query={
            "includeRelation": include_relation,
            "includeMachineAssignment": include_machine_assignment,
            "includeMachineAssociation": include_machine_association,
            "includeAllocationStats": include_allocation_stats,
        },
    )


def update_instance_type(instance_type_id: str, body: models.InstanceTypeUpdate) -> Call[models.InstanceType]:
    """Change an instance type.

    PATCH /instance/type/{instanceTypeId}
    """
    return Call(
        operation="update-instance-type",
        method="PATCH",
        path=path_of("instance", "type", instance_type_id),
        answer=models.InstanceType,
        body=body,
    )


def delete_instance_type(instance_type_id: str) -> Call[models.Message]:
    """Delete an instance type that nothing refers to.

    DELETE /instance/type/{instanceTypeId}
    """
    return Call(
        operation="delete-instance-type",
        method="DELETE",
        path=path_of("instance", "type", instance_type_id),
        answer=models.Message,
    )


def get_instance_type_machine_association(
    instance_type_id: str, *, include_relation: Many[str] | None = None, order_by: str | None = None
) -> PagedCall[models.MachineAssociationAnswer]:
    """The machines of an instance type.

    GET /instance/type/{instanceTypeId}/machine
    """
    return PagedCall(
        operation="get-instance-type-machine-association",
        path=path_of("instance", "type", instance_type_id, "machine"),
        item=models.MachineAssociationAnswer,
        query={"includeRelation": include_relation, "orderBy": order_by},
    )


def create_instance_type_machine_association(
    instance_type_id: str, body: models.MachineAssociation
) -> Call[list[models.MachineAssociationAnswer]]:
    """Make machines of the site machines of this type.

    POST /instance/type/{instanceTypeId}/machine
    """
    return Call(
        operation="create-instance-type-machine-association",
        method="POST",
        path=path_of("instance", "type", instance_type_id, "machine"),
        answer=list[models.MachineAssociationAnswer],
        body=body,
    )


def delete_instance_type_machine_association(
    instance_type_id: str, machine_association_id: str
) -> Call[models.Message]:
    """Take an empty machine out of the type.

    DELETE /instance/type/{instanceTypeId}/machine/{machineAssociationId}
    """
    return Call(
        operation="delete-instance-type-machine-association",
        method="DELETE",
        path=path_of("instance", "type", instance_type_id, "machine", machine_association_id),
        answer=models.Message,
    )


def get_current_tenant_stats() -> Call[models.TenantStats]:
    """The instances and VPCs of the caller by status.

    GET /tenant/current/stats
    """
    return Call(
        operation="get-current-tenant-stats",
        method="GET",
        path=path_of("tenant", "current", "stats"),
        answer=models.TenantStats,
    )


def get_current_infrastructure_provider_stats() -> Call[models.ProviderStats]:
    """The machines of the provider by status.

    GET /infrastructure-provider/current/stats
    """
    return Call(
        operation="get-current-infrastructure-provider-stats",
        method="GET",
        path=path_of("infrastructure-provider", "current", "stats"),
        answer=models.ProviderStats,
    )


def get_tenant_instance_type_stats(*, site_id: str | None = None) -> Call[list[models.TenantTypes]]:
    """What each tenant was given of each instance type, and uses.

    GET /tenant/instance-type/stats
    """
    return Call(
        operation="get-tenant-instance-type-stats",
        method="GET",
        path=path_of("tenant", "instance-type", "stats"),
        answer=list[models.TenantTypes],
        query={"siteId": site_id},
    )


def get_machine_instance_type_stats_summary(*, site_id: str | None = None) -> Call[models.MachineSummary]:
    """The machines with and without an instance type by status.

    GET /machine/instance-type/stats/summary
    """
    return Call(
        operation="get-machine-instance-type-stats-summary",
        method="GET",
        path=path_of("machine", "instance-type", "stats", "summary"),
        answer=models.MachineSummary,
        query={"siteId": site_id},
    )


def get_machine_instance_type_stats(*, site_id: str | None = None) -> Call[list[models.MachineTypeStats]]:
    """The machines of each instance type by status, and the tenants that have them.

    GET /machine/instance-type/stats
    """
    return Call(
        operation="get-machine-instance-type-stats",
        method="GET",
        path=path_of("machine", "instance-type", "stats"),
        answer=list[models.MachineTypeStats],
        query={"siteId": site_id},
    )


def get_all_machine(
    *,
    include_relation: Many[str] | None = None,
    include_metadata: bool | None = None,
    order_by: str | None = None,
    site_id: str | None = None,
    id: Many[str] | None = None,
    instance_type_id: Many[str] | None = None,
    tenant_id: Many[str] | None = None,
    has_instance_type: bool | None = None,
    has_instance: bool | None = None,
    is_missing_on_site: bool | None = None,
    status: Many[
        Literal[
            "Initializing", "Ready", "Reset", "Maintenance", "InUse", "Error", "Decommissioned", "Unknown"
        ]
    ]
    | None = None,
    capability_type: Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"] | None = None,
    capability_name: Many[str] | None = None,
    hw_sku_device_type: Many[str] | None = None,
    query: str | None = None,
) -> PagedCall[models.Machine]:
    """The machines that the caller may see.

    GET /machine
    """
    return PagedCall(
        operation="get-all-machine",
        path=path_of("machine"),
        item=models.Machine,
        query={
            "includeRelation": include_relation,
            "includeMetadata": include_metadata,
            "orderBy": order_by,
            "siteId": site_id,
            "id": id,
            "instanceTypeId": instance_type_id,
            "tenantId": tenant_id,
            "hasInstanceType": has_instance_type,
            "hasInstance": has_instance,
            "isMissingOnSite": is_missing_on_site,
            "status": status,
            "capabilityType": capability_type,
            "capabilityName": capability_name,
            "hwSkuDeviceType": hw_sku_device_type,
            "query": query,
        },
    )


def get_all_machine_capabilities(
    *,
    order_by: str | None = None,
    site_id: str | None = None,
    type: Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"] | None = None,
    name: Many[str] | None = None,
) -> PagedCall[models.Capability]:
    """What the machines that the caller may see have, by type and name; each capability once.

    GET /machine-capability
    """
    return PagedCall(
        operation="get-all-machine-capabilities",
        path=path_of("machine-capability"),
        item=models.Capability,
        query={"orderBy": order_by, "siteId": site_id, "type": type, "name": name},
    )


def get_machine_gpu_stats(*, site_id: str | None = None) -> Call[list[models.GpuStats]]:
    """GPUs by product, of the machines that the caller may see.

    GET /machine/gpu/stats
    """
    return Call(
        operation="get-machine-gpu-stats",
        method="GET",
        path=path_of("machine", "gpu", "stats"),
        answer=list[models.GpuStats],
        query={"siteId": site_id},
    )


def get_machine(
    machine_id: str, *, include_relation: Many[str] | None = None, include_metadata: bool | None = None
) -> Call[models.Machine]:
    """One machine.

    GET /machine/{machineId}
    """
    return Call(
        operation="get-machine",
        method="GET",
        path=path_of("machine", machine_id),
        answer=models.Machine,
        query={"includeRelation": include_relation, "includeMetadata": include_metadata},
    )


def update_machine(machine_id: str, body: models.MachineUpdate) -> Call[models.Machine]:
    """Change the instance type or the labels of a machine, or begin or end its maintenance.

    PATCH /machine/{machineId}
    """
    return Call(
        operation="update-machine",
        method="PATCH",
        path=path_of("machine", machine_id),
        answer=models.Machine,
        body=body,
    )


def delete_machine(machine_id: str) -> Call[models.Message]:
    """Forget a machine that is gone: it carries nothing, and its switch controller does not list it.

    DELETE /machine/{machineId}
    """
    return Call(
        operation="delete-machine",
        method="DELETE",
        path=path_of("machine", machine_id),
        answer=models.Message,
    )


def get_machine_status_history(
    machine_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """What operators did to the machine, newest first.

    GET /machine/{machineId}/status-history
    """
    return PagedCall(
        operation="get-machine-status-history",
        path=path_of("machine", machine_id, "status-history"),
        item=models.StatusDetail,
        query={"orderBy": order_by},
    )


def get_machine_nvlink_info(machine_id: str) -> Call[models.NVLinkInfo]:
    """Where the machine sits in the NVLink fabric, as far as it was observed.

    GET /machine/{machineId}/nvlink-info
    """
    return Call(
        operation="get-machine-nvlink-info",
        method="GET",
        path=path_of("machine", machine_id, "nvlink-info"),
        answer=models.NVLinkInfo,
    )


def cordon_machine(machine_id: str, body: models.Because) -> Call[models.Machine]:
    """Place nothing new on the machine.

    POST /machine/{machineId}/cordon
    """
    return Call(
        operation="cordon-machine",
        method="POST",
        path=path_of("machine", machine_id, "cordon"),
        answer=models.Machine,
        body=body,
    )


def uncordon_machine(machine_id: str, body: models.Because) -> Call[models.Machine]:
    """Let the machine be used again.

    POST /machine/{machineId}/uncordon
    """
    return Call(
        operation="uncordon-machine",
        method="POST",
        path=path_of("machine", machine_id, "uncordon"),
        answer=models.Machine,
        body=body,
    )


def force_delete_machine_instance(machine_id: str, body: models.Because) -> Call[models.Machine]:
    """Release the instance on the machine, whoever owns it, with the same clean-up.

    POST /machine/{machineId}/force-delete
    """
    return Call(
        operation="force-delete-machine-instance",
        method="POST",
        path=path_of("machine", machine_id, "force-delete"),
        answer=models.Machine,
        body=body,
    )


def drain_machine(machine_id: str, body: models.Because) -> Call[models.Drain]:
    """Take the machine's GPUs out of all partitions, and record it.

    POST /machine/{machineId}/drain
    """
    return Call(
        operation="drain-machine",
        method="POST",
        path=path_of("machine", machine_id, "drain"),
        answer=models.Drain,
        body=body,
    )


def end_machine_drain(machine_id: str, body: models.Because) -> Call[models.Machine]:
    """Join the GPUs of the machine's instance again; the machine stays cordoned.

    POST /machine/{machineId}/drain/end
    """
    return Call(
        operation="end-machine-drain",
        method="POST",
        path=path_of("machine", machine_id, "drain", "end"),
        answer=models.Machine,
        body=body,
    )


def get_all_nvlink_drain(
    *, order_by: str | None = None, machine_id: str | None = None, is_active: bool | None = None
) -> PagedCall[models.Drain]:
    """The drains of the provider's trays, past ones too.

    GET /nvlink-drain
    """
    return PagedCall(
        operation="get-all-nvlink-drain",
        path=path_of("nvlink-drain"),
        item=models.Drain,
        query={"orderBy": order_by, "machineId": machine_id, "isActive": is_active},
    )


def get_all_nvlink_domain(
    *, order_by: str | None = None, site_id: str | None = None
) -> PagedCall[models.NVLinkDomain]:
    """The domains where the caller operates machines or may use some, with the room in each.

    GET /nvlink-domain
    """
    return PagedCall(
        operation="get-all-nvlink-domain",
        path=path_of("nvlink-domain"),
        item=models.NVLinkDomain,
        query={"orderBy": order_by, "siteId": site_id},
    )


def get_nvlink_domain(nv_link_domain_id: str) -> Call[models.NVLinkDomain]:
    """One domain.

    GET /nvlink-domain/{nvLinkDomainId}
    """
    return Call(
        operation="get-nvlink-domain",
        method="GET",
        path=path_of("nvlink-domain", nv_link_domain_id),
        answer=models.NVLinkDomain,
    )


def pause_nvlink_domain(nv_link_domain_id: str, body: models.Because) -> Call[models.NVLinkDomain]:
    """Do nothing to the domain until it is resumed; it is observed all the same.

    POST /nvlink-domain/{nvLinkDomainId}/pause
    """
    return Call(
        operation="pause-nvlink-domain",
        method="POST",
        path=path_of("nvlink-domain", nv_link_domain_id, "pause"),
        answer=models.NVLinkDomain,
        body=body,
    )


def resume_nvlink_domain(nv_link_domain_id: str, body: models.Because) -> Call[models.NVLinkDomain]:
    """Work on the domain again.

    POST /nvlink-domain/{nvLinkDomainId}/resume
    """
    return Call(
        operation="resume-nvlink-domain",
        method="POST",
        path=path_of("nvlink-domain", nv_link_domain_id, "resume"),
        answer=models.NVLinkDomain,
        body=body,
    )


def get_all_nvlink_partition(
    *,
    order_by: str | None = None,
    nv_link_domain_id: str | None = None,
    owner: models.Owner | None = None,
    nv_link_logical_partition_id: str | None = None,
) -> PagedCall[models.NVLinkPartition]:
    """The partitions in the newest observations, and whose they are.

    GET /nvlink-partition
    """
    return PagedCall(
        operation="get-all-nvlink-partition",
        path=path_of("nvlink-partition"),
        item=models.NVLinkPartition,
        query={
            "orderBy": order_by,
            "nvLinkDomainId": nv_link_domain_id,
            "owner": owner,
            "nvLinkLogicalPartitionId": nv_link_logical_partition_id,
        },
    )


def adopt_nvlink_partition(body: models.Adoption) -> Call[models.NVLinkPartition]:
    """Make a found partition the physical partition of a logical partition; no GPU is moved.

    POST /nvlink-partition/adopt
    """
    return Call(
        operation="adopt-nvlink-partition",
        method="POST",
        path=path_of("nvlink-partition", "adopt"),
        answer=models.NVLinkPartition,
        body=body,
    )


def release_nvlink_partition(body: models.FoundPartition) -> Call[models.NVLinkPartition]:
    """Let a found partition be taken apart.

    POST /nvlink-partition/release
    """
    return Call(
        operation="release-nvlink-partition",
        method="POST",
        path=path_of("nvlink-partition", "release"),
        answer=models.NVLinkPartition,
        body=body,
    )


def get_all_nvlink_operation(
    *,
    order_by: str | None = None,
    nv_link_domain_id: str | None = None,
    state: Literal["pending", "done", "refused", "unknown"] | None = None,
) -> PagedCall[models.NVLinkOperation]:
    """What was asked of the switch controllers, for whom, why, and what came of it.

    GET /nvlink-operation
    """
    return PagedCall(
        operation="get-all-nvlink-operation",
        path=path_of("nvlink-operation"),
        item=models.NVLinkOperation,
        query={"orderBy": order_by, "nvLinkDomainId": nv_link_domain_id, "state": state},
    )


def get_all_operator_step(
    *, order_by: str | None = None, nv_link_domain_id: str | None = None
) -> PagedCall[models.OperatorStep]:
    """What operators did, and why.

    GET /operator-step
    """
    return PagedCall(
        operation="get-all-operator-step",
        path=path_of("operator-step"),
        item=models.OperatorStep,
        query={"orderBy": order_by, "nvLinkDomainId": nv_link_domain_id},
    )


def get_all_audit_entry(
    *,
    order_by: str | None = None,
    failed_only: bool | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    before: str | None = None,
    after: str | None = None,
    user_id: str | None = None,
    object_kind: str | None = None,
    object_id: str | None = None,
    operation_id: str | None = None,
    method: str | None = None,
    status_code: int | None = None,
    channel: Literal["rest", "admin", "site"] | None = None,
    org_name: str | None = None,
) -> PagedCall[models.AuditEntry]:
    """Who requested what, and what came of it; the newest first.

    GET /audit
    """
    return PagedCall(
        operation="get-all-audit-entry",
        path=path_of("audit"),
        item=models.AuditEntry,
        query={
            "orderBy": order_by,
            "failedOnly": failed_only,
            "since": since,
            "until": until,
            "before": before,
            "after": after,
            "userID": user_id,
            "objectKind": object_kind,
            "objectId": object_id,
            "operationId": operation_id,
            "method": method,
            "statusCode": status_code,
            "channel": channel,
            "orgName": org_name,
        },
    )


def get_audit_retention() -> Call[models.AuditRetention]:
    """The oldest entry that is kept, and how many were removed before it.

    GET /audit/retention
    """
    return Call(
        operation="get-audit-retention",
        method="GET",
        path=path_of("audit", "retention"),
        answer=models.AuditRetention,
    )


def get_audit_entry(audit_entry_id: str) -> Call[models.AuditEntry]:
    """One entry.

    GET /audit/{auditEntryId}
    """
    return Call(
        operation="get-audit-entry",
        method="GET",
        path=path_of("audit", audit_entry_id),
        answer=models.AuditEntry,
    )


def get_all_allocation(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    infrastructure_provider_id: str | None = None,
    site_id: Many[str] | None = None,
    tenant_id: Many[str] | None = None,
    id: Many[str] | None = None,
    resource_type: Many[Literal["InstanceType", "IPBlock"]] | None = None,
    resource_type_id: Many[str] | None = None,
    constraint_type: Many[Literal["Reserved", "OnDemand", "Preemptible"]] | None = None,
    constraint_value: Many[int] | None = None,
    status: Many[Literal["Pending", "Registered", "Deleting", "Error"]] | None = None,
    query: str | None = None,
) -> PagedCall[models.Allocation]:
    """The allocations that the caller gave or was given.

    GET /allocation
    """
    return PagedCall(
        operation="get-all-allocation",
        path=path_of("allocation"),
        item=models.Allocation,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "infrastructureProviderId": infrastructure_provider_id,
            "siteId": site_id,
            "tenantId": tenant_id,
            "id": id,
            "resourceType": resource_type,
            "resourceTypeId": resource_type_id,
            "constraintType": constraint_type,
            "constraintValue": constraint_value,
            "status": status,
            "query": query,
        },
    )


def create_allocation(body: models.AllocationCreate) -> Call[models.Allocation]:
    """Let a tenant use machines of a site.

    POST /allocation
    """
    return Call(
        operation="create-allocation",
        method="POST",
        path=path_of("allocation"),
        answer=models.Allocation,
        body=body,
    )


def get_allocation(
    allocation_id: str,
    *,
    include_relation: Many[str] | None = None,
    infrastructure_provider_id: str | None = None,
    tenant_id: str | None = None,
) -> Call[models.Allocation]:
    """One allocation.

    GET /allocation/{allocationId}
    """
    return Call(
        operation="get-allocation",
        method="GET",
        path=path_of("allocation", allocation_id),
        answer=models.Allocation,
        query={
            "includeRelation": include_relation,
            "infrastructureProviderId": infrastructure_provider_id,
            "tenantId": tenant_id,
        },
    )


def update_allocation(allocation_id: str, body: models.AllocationUpdate) -> Call[models.Allocation]:
    """Change the name or description.

    PATCH /allocation/{allocationId}
    """
    return Call(
        operation="update-allocation",
        method="PATCH",
        path=path_of("allocation", allocation_id),
        answer=models.Allocation,
        body=body,
    )


def delete_allocation(allocation_id: str) -> Call[models.Message]:
    """Take an allocation back that its tenant does not use.

    DELETE /allocation/{allocationId}
    """
    return Call(
        operation="delete-allocation",
        method="DELETE",
        path=path_of("allocation", allocation_id),
        answer=models.Message,
    )


def update_allocation_constraint(
    allocation_id: str, allocation_constraint_id: str, body: models.AllocationConstraintUpdate
) -> Call[models.AllocationConstraintAnswer]:
    """Change how many machines an allocation gives; never fewer than are in use.

    PATCH /allocation/{allocationId}/constraint/{allocationConstraintId}
    """
    return Call(
        operation="update-allocation-constraint",
        method="PATCH",
        path=path_of("allocation", allocation_id, "constraint", allocation_constraint_id),
        answer=models.AllocationConstraintAnswer,
        body=body,
    )


def get_all_tray_reservation(
    *,
    order_by: str | None = None,
    site_id: str | None = None,
    tenant_id: Many[str] | None = None,
    instance_type_id: Many[str] | None = None,
    is_active: bool | None = None,
) -> PagedCall[models.TrayReservation]:
    """The reservations that the caller made or that are for it, past ones too.

    GET /tray-reservation
    """
    return PagedCall(
        operation="get-all-tray-reservation",
        path=path_of("tray-reservation"),
        item=models.TrayReservation,
        query={
            "orderBy": order_by,
            "siteId": site_id,
            "tenantId": tenant_id,
            "instanceTypeId": instance_type_id,
            "isActive": is_active,
        },
    )


def create_tray_reservation(body: models.TrayReservationCreate) -> Call[models.TrayReservation]:
    """Keep trays for a tenant until a time.

    POST /tray-reservation
    """
    return Call(
        operation="create-tray-reservation",
        method="POST",
        path=path_of("tray-reservation"),
        answer=models.TrayReservation,
        body=body,
    )


def get_tray_reservation(tray_reservation_id: str) -> Call[models.TrayReservation]:
    """One reservation.

    GET /tray-reservation/{trayReservationId}
    """
    return Call(
        operation="get-tray-reservation",
        method="GET",
        path=path_of("tray-reservation", tray_reservation_id),
        answer=models.TrayReservation,
    )


def update_tray_reservation(
    tray_reservation_id: str, body: models.TrayReservationUpdate
) -> Call[models.TrayReservation]:
    """Extend or shorten a reservation, or change its trays.

    PATCH /tray-reservation/{trayReservationId}
    """
    return Call(
        operation="update-tray-reservation",
        method="PATCH",
        path=path_of("tray-reservation", tray_reservation_id),
        answer=models.TrayReservation,
        body=body,
    )


def delete_tray_reservation(tray_reservation_id: str) -> Call[models.Message]:
    """Free the trays now; instances on them stay.

    DELETE /tray-reservation/{trayReservationId}
    """
    return Call(
        operation="delete-tray-reservation",
        method="DELETE",
        path=path_of("tray-reservation", tray_reservation_id),
        answer=models.Message,
    )


def get_all_nvlink_logical_partition(
    *,
    include_relation: Many[str] | None = None,
    include_interfaces: bool | None = None,
    include_vpcs: bool | None = None,
    include_stats: bool | None = None,
    order_by: str | None = None,
    site_id: str | None = None,
    status: Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"] | None = None,
    query: str | None = None,
) -> PagedCall[models.NVLinkLogicalPartition]:
    """The tenant's logical partitions.

    GET /nvlink-logical-partition
    """
    return PagedCall(
        operation="get-all-nvlink-logical-partition",
        path=path_of("nvlink-logical-partition"),
        item=models.NVLinkLogicalPartition,
        query={
            "includeRelation": include_relation,
            "includeInterfaces": include_interfaces,
            "includeVpcs": include_vpcs,
            "includeStats": include_stats,
            "orderBy": order_by,
            "siteId": site_id,
            "status": status,
            "query": query,
        },
    )


def create_nvlink_logical_partition(
    body: models.LogicalPartitionCreate,
) -> Call[models.NVLinkLogicalPartition]:
    """A new logical partition.

    POST /nvlink-logical-partition
    """
    return Call(
        operation="create-nvlink-logical-partition",
        method="POST",
        path=path_of("nvlink-logical-partition"),
        answer=models.NVLinkLogicalPartition,
        body=body,
    )


def create_nvlink_logical_partition_dry_run(
    body: models.LogicalPartitionCreate,
) -> Call[models.LogicalPartitionPlan]:
    """A new logical partition.

    POST /nvlink-logical-partition?dryRun=true
    """
    return Call(
        operation="create-nvlink-logical-partition",
        method="POST",
        path=path_of("nvlink-logical-partition"),
        answer=models.LogicalPartitionPlan,
        query={"dryRun": True},
        body=body,
    )


def get_nvlink_logical_partition(
    nv_link_logical_partition_id: str,
    *,
    include_relation: Many[str] | None = None,
    include_interfaces: bool | None = None,
    include_vpcs: bool | None = None,
    include_stats: bool | None = None,
) -> Call[models.NVLinkLogicalPartition]:
    """One logical partition.

    GET /nvlink-logical-partition/{nvLinkLogicalPartitionId}
    """
    return Call(
        operation="get-nvlink-logical-partition",
        method="GET",
        path=path_of("nvlink-logical-partition", nv_link_logical_partition_id),
        answer=models.NVLinkLogicalPartition,
        query={
            "includeRelation": include_relation,
            "includeInterfaces": include_interfaces,
            "includeVpcs": include_vpcs,
            "includeStats": include_stats,
        },
    )


def update_nvlink_logical_partition(
    nv_link_logical_partition_id: str, body: models.LogicalPartitionUpdate
) -> Call[models.NVLinkLogicalPartition]:
    """Change the name or description.

    PATCH /nvlink-logical-partition/{nvLinkLogicalPartitionId}
    """
    return Call(
        operation="update-nvlink-logical-partition",
        method="PATCH",
        path=path_of("nvlink-logical-partition", nv_link_logical_partition_id),
        answer=models.NVLinkLogicalPartition,
        body=body,
    )


def delete_nvlink_logical_partition(nv_link_logical_partition_id: str) -> Call[models.Message]:
    """Delete a logical partition that nothing refers to.

    DELETE /nvlink-logical-partition/{nvLinkLogicalPartitionId}
    """
    return Call(
        operation="delete-nvlink-logical-partition",
        method="DELETE",
        path=path_of("nvlink-logical-partition", nv_link_logical_partition_id),
        answer=models.Message,
    )


def get_nvlink_logical_partition_status_history(
    nv_link_logical_partition_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """How the logical partition came to its status, newest first.

    GET /nvlink-logical-partition/{nvLinkLogicalPartitionId}/status-history
    """
    return PagedCall(
        operation="get-nvlink-logical-partition-status-history",
        path=path_of("nvlink-logical-partition", nv_link_logical_partition_id, "status-history"),
        item=models.StatusDetail,
        query={"orderBy": order_by},
    )


def get_all_nvlink_interface(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    nv_link_logical_partition_id: Many[str] | None = None,
    nv_link_domain_id: Many[str] | None = None,
    status: Many[Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]] | None = None,
    site_id: Many[str] | None = None,
    instance_id: Many[str] | None = None,
) -> PagedCall[models.NVLinkInterface]:
    """The interfaces of all instances of the tenant.

    GET /nvlink-interface
    """
    return PagedCall(
        operation="get-all-nvlink-interface",
        path=path_of("nvlink-interface"),
        item=models.NVLinkInterface,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "nvLinkLogicalPartitionId": nv_link_logical_partition_id,
            "nvLinkDomainId": nv_link_domain_id,
            "status": status,
            "siteId": site_id,
            "instanceId": instance_id,
        },
    )


def get_all_instance_nvlink_interface(
    instance_id: str,
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    nv_link_logical_partition_id: Many[str] | None = None,
    nv_link_domain_id: Many[str] | None = None,
    status: Many[Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]] | None = None,
) -> PagedCall[models.NVLinkInterface]:
    """The interfaces of one instance.

    GET /instance/{instanceId}/nvlink-interface
    """
    return PagedCall(
        operation="get-all-instance-nvlink-interface",
        path=path_of("instance", instance_id, "nvlink-interface"),
        item=models.NVLinkInterface,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "nvLinkLogicalPartitionId": nv_link_logical_partition_id,
            "nvLinkDomainId": nv_link_domain_id,
            "status": status,
        },
    )


def get_all_subnet(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    site_id: Many[str] | None = None,
    vpc_id: Many[str] | None = None,
    status: Many[str] | None = None,
    query: str | None = None,
    include_usage_stats: bool | None = None,
) -> PagedCall[models.Summary]:
    """No subnet.

    GET /subnet
    """
    return PagedCall(
        operation="get-all-subnet",
        path=path_of("subnet"),
        item=models.Summary,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "siteId": site_id,
            "vpcId": vpc_id,
            "status": status,
            "query": query,
            "includeUsageStats": include_usage_stats,
        },
    )


def get_all_vpc_prefix(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    site_id: Many[str] | None = None,
    vpc_id: Many[str] | None = None,
    status: Many[str] | None = None,
    query: str | None = None,
    include_usage_stats: bool | None = None,
) -> PagedCall[models.Summary]:
    """No VPC prefix.

    GET /vpc-prefix
    """
    return PagedCall(
        operation="get-all-vpc-prefix",
        path=path_of("vpc-prefix"),
        item=models.Summary,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "siteId": site_id,
            "vpcId": vpc_id,
            "status": status,
            "query": query,
            "includeUsageStats": include_usage_stats,
        },
    )


def get_all_vpc(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    site_id: Many[str] | None = None,
    name: str | None = None,
    status: Many[Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]]
    | None = None,
    network_security_group_id: Many[str] | None = None,
    query: str | None = None,
    nv_link_logical_partition_id: Many[str] | None = None,
) -> PagedCall[models.Vpc]:
    """The tenant's VPCs.

    GET /vpc
    """
    return PagedCall(
        operation="get-all-vpc",
        path=path_of("vpc"),
        item=models.Vpc,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "siteId": site_id,
            "name": name,
            "status": status,
            "networkSecurityGroupId": network_security_group_id,
            "query": query,
            "nvLinkLogicalPartitionId": nv_link_logical_partition_id,
        },
    )


def create_vpc(body: models.VpcCreate) -> Call[models.Vpc]:
    """A new VPC.

    POST /vpc
    """
    return Call(operation="create-vpc", method="POST", path=path_of("vpc"), answer=models.Vpc, body=body)


def create_vpc_dry_run(body: models.VpcCreate) -> Call[models.VpcPlan]:
    """A new VPC.

    POST /vpc?dryRun=true
    """
    return Call(
        operation="create-vpc",
        method="POST",
        path=path_of("vpc"),
        answer=models.VpcPlan,
        query={"dryRun": True},
        body=body,
    )


def get_vpc(vpc_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Vpc]:
    """One VPC.

    GET /vpc/{vpcId}
    """
    return Call(
        operation="get-vpc",
        method="GET",
        path=path_of("vpc", vpc_id),
        answer=models.Vpc,
        query={"includeRelation": include_relation},
    )


def update_vpc(vpc_id: str, body: models.VpcUpdate) -> Call[models.Vpc]:
    """Change a VPC.

    PATCH /vpc/{vpcId}
    """
    return Call(
        operation="update-vpc", method="PATCH", path=path_of("vpc", vpc_id), answer=models.Vpc, body=body
    )


def delete_vpc(vpc_id: str) -> Call[models.Message]:
    """Delete an empty VPC.

    DELETE /vpc/{vpcId}
    """
    return Call(operation="delete-vpc", method="DELETE", path=path_of("vpc", vpc_id), answer=models.Message)


def update_vpc_virtualization(vpc_id: str, body: models.VpcVirtualization) -> Call[models.Vpc]:
    """Name another network virtualization for an empty VPC.

    PATCH /vpc/{vpcId}/virtualization
    """
    return Call(
        operation="update-vpc-virtualization",
        method="PATCH",
        path=path_of("vpc", vpc_id, "virtualization"),
        answer=models.Vpc,
        body=body,
    )


def get_vpc_status_history(vpc_id: str, *, order_by: str | None = None) -> PagedCall[models.StatusDetail]:
    """How the VPC came to its status, newest first.

    GET /vpc/{vpcId}/status-history
    """
    return PagedCall(
        operation="get-vpc-status-history",
        path=path_of("vpc", vpc_id, "status-history"),
        item=models.StatusDetail,
        query={"orderBy": order_by},
    )


def get_all_instance(
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    infrastructure_provider_id: str | None = None,
    site_id: Many[str] | None = None,
    vpc_id: Many[str] | None = None,
    instance_type_id: Many[str] | None = None,
    operating_system_id: Many[str] | None = None,
    network_security_group_id: Many[str] | None = None,
    machine_id: Many[str] | None = None,
    name: str | None = None,
    status: Many[
        Literal[
            "Pending",
            "Provisioning",
            "Configuring",
            "Ready",
            "Updating",
            "Repairing",
            "Rebooting",
            "Terminating",
            "Error",
            "Terminated",
            "Unknown",
        ]
    ]
    | None = None,
    ip_address: Many[str] | None = None,
    query: str | None = None,
) -> PagedCall[models.Instance]:
    """The tenant's instances.

    GET /instance
    """
    return PagedCall(
        operation="get-all-instance",
        path=path_of("instance"),
        item=models.Instance,
        query={
            "includeRelation": include_relation,
            "orderBy": order_by,
            "infrastructureProviderId": infrastructure_provider_id,
            "siteId": site_id,
            "vpcId": vpc_id,
            "instanceTypeId": instance_type_id,
            "operatingSystemId": operating_system_id,
            "networkSecurityGroupId": network_security_group_id,
            "machineId": machine_id,
            "name": name,
            "status": status,
            "ipAddress": ip_address,
            "query": query,
        },
    )


def create_instance(body: models.InstanceCreate, *, if_plan: str | None = None) -> Call[models.Instance]:
    """A new instance.

    POST /instance
    """
    return Call(
        operation="create-instance",
        method="POST",
        path=path_of("instance"),
        answer=models.Instance,
        query={"ifPlan": if_plan},
        body=body,
    )


def create_instance_dry_run(
    body: models.InstanceCreate, *, if_plan: str | None = None
) -> Call[models.InstancePlan]:
    """A new instance.

    POST /instance?dryRun=true
    """
    return Call(
        operation="create-instance",
        method="POST",
        path=path_of("instance"),
        answer=models.InstancePlan,
        query={"ifPlan": if_plan, "dryRun": True},
        body=body,
    )


def batch_create_instance(
    body: models.InstanceBatchCreate, *, if_plan: str | None = None
) -> Call[list[models.Instance]]:
    """Several new instances, all or none.

    POST /instance/batch
    """
    return Call(
        operation="batch-create-instance",
        method="POST",
        path=path_of("instance", "batch"),
        answer=list[models.Instance],
        query={"ifPlan": if_plan},
        body=body,
    )


def batch_create_instance_dry_run(
    body: models.InstanceBatchCreate, *, if_plan: str | None = None
) -> Call[models.InstancePlan]:
    """Several new instances, all or none.

    POST /instance/batch?dryRun=true
    """
    return Call(
        operation="batch-create-instance",
        method="POST",
        path=path_of("instance", "batch"),
        answer=models.InstancePlan,
        query={"ifPlan": if_plan, "dryRun": True},
        body=body,
    )


def get_instance(instance_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Instance]:
    """One instance.

    GET /instance/{instanceId}
    """
    return Call(
        operation="get-instance",
        method="GET",
        path=path_of("instance", instance_id),
        answer=models.Instance,
        query={"includeRelation": include_relation},
    )


def update_instance(instance_id: str, body: models.InstanceUpdate) -> Call[models.Instance]:
    """Change an instance; `nvLinkInterfaces` replaces the whole list.

    PATCH /instance/{instanceId}
    """
    return Call(
        operation="update-instance",
        method="PATCH",
        path=path_of("instance", instance_id),
        answer=models.Instance,
        body=body,
    )


def delete_instance(instance_id: str) -> Call[models.Message]:
    """Release an instance.

    DELETE /instance/{instanceId}
    """
    return Call(
        operation="delete-instance",
        method="DELETE",
        path=path_of("instance", instance_id),
        answer=models.Message,
    )


def get_instance_status_history(
    instance_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """How the instance came to its status, newest first.

    GET /instance/{instanceId}/status-history
    """
    return PagedCall(
        operation="get-instance-status-history",
        path=path_of("instance", instance_id, "status-history"),
        item=models.StatusDetail,
        query={"orderBy": order_by},
    )


def get_all_interface(
    instance_id: str,
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    status: Many[Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]] | None = None,
) -> PagedCall[models.KeptInterface]:
    """The network interfaces that the instance was asked for with.

    GET /instance/{instanceId}/interface
    """
    return PagedCall(
        operation="get-all-interface",
        path=path_of("instance", instance_id, "interface"),
        item=models.KeptInterface,
        query={"includeRelation": include_relation, "orderBy": order_by, "status": status},
    )


def get_all_instance_infiniband_interface(
    instance_id: str,
    *,
    include_relation: Many[str] | None = None,
    order_by: str | None = None,
    status: Many[Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]] | None = None,
) -> PagedCall[models.KeptInterface]:
    """The InfiniBand interfaces that the instance was asked for with.

    GET /instance/{instanceId}/infiniband-interface
    """
    return PagedCall(
        operation="get-all-instance-infiniband-interface",
        path=path_of("instance", instance_id, "infiniband-interface"),
        item=models.KeptInterface,
        query={"includeRelation": include_relation, "orderBy": order_by, "status": status},
    )


def get_all_role() -> Call[list[models.AccessRole]]:
    """The roles on the sides on which the caller acts: built-in ones, then those of the organisation.

    GET /role
    """
    return Call(operation="get-all-role", method="GET", path=path_of("role"), answer=list[models.AccessRole])


def create_role(body: models.RoleCreate) -> Call[models.AccessRole]:
    """A custom role, with permissions that the caller has.

    POST /role
    """
    return Call(
        operation="create-role", method="POST", path=path_of("role"), answer=models.AccessRole, body=body
    )


def update_role(role_name: str, body: models.RoleUpdate) -> Call[models.AccessRole]:
    """Change a custom role. Who has it may do more or less within a second.

    PATCH /role/{roleName}
    """
    return Call(
        operation="update-role",
        method="PATCH",
        path=path_of("role", role_name),
        answer=models.AccessRole,
        body=body,
    )


def delete_role(role_name: str) -> Call[models.Message]:
    """Delete a custom role that no service account has. In tokens its name means nothing then.

    DELETE /role/{roleName}
    """
    return Call(
        operation="delete-role", method="DELETE", path=path_of("role", role_name), answer=models.Message
    )
