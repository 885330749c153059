"""Operations of the service, each a function that makes its request. Written by `make client`."""

from datetime import datetime
from typing import Literal

from rackloom.client import models
from rackloom.client.call import Call, Many, PagedCall, make_call, make_paged_call


def get_metadata() -> Call[models.Metadata]:
    """The served versions of the contract, the groups of operations that are missing, and the build.

    GET /metadata
    """
    return make_call("get-metadata GET metadata", models.Metadata)


def get_current_tenant() -> Call[models.Tenant]:
    """The tenant of the org. The first call creates it.

    GET /tenant/current
    """
    return make_call("get-current-tenant GET tenant/current", models.Tenant)


def get_current_tenant_quota() -> Call[list[models.Quota]]:
    """The caller's quotas.

    GET /tenant/current/quota
    """
    return make_call("get-current-tenant-quota GET tenant/current/quota", list[models.Quota])


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
    return make_paged_call("get-all-site GET site", models.Site, locals())


def get_site(site_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Site]:
    """One site.

    GET /site/{siteId}
    """
    return make_call("get-site GET site/{site_id}", models.Site, locals())


def get_site_status_history(site_id: str, *, order_by: str | None = None) -> PagedCall[models.StatusDetail]:
    """The status history of the site, newest first.

    GET /site/{siteId}/status-history
    """
    return make_paged_call(
        "get-site-status-history GET site/{site_id}/status-history", models.StatusDetail, locals()
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
    return make_paged_call("get-all-instance-type GET instance/type", models.InstanceType, locals())


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
    return make_call("get-instance-type GET instance/type/{instance_type_id}", models.InstanceType, locals())


def get_current_tenant_stats() -> Call[models.TenantStats]:
    """The instances and VPCs of the caller by status.

    GET /tenant/current/stats
    """
    return make_call("get-current-tenant-stats GET tenant/current/stats", models.TenantStats)


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
    return make_paged_call("get-all-machine GET machine", models.Machine, locals())


def get_all_machine_capabilities(
    *,
    order_by: str | None = None,
    site_id: str | None = None,
    type: Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"] | None = None,
    name: Many[str] | None = None,
) -> PagedCall[models.Capability]:
    """The different capabilities of the machines that the caller may see, by type and name.

    GET /machine-capability
    """
    return make_paged_call("get-all-machine-capabilities GET machine-capability", models.Capability, locals())


def get_machine_gpu_stats(*, site_id: str | None = None) -> Call[list[models.GpuStats]]:
    """GPUs by product, of the machines that the caller may see.

    GET /machine/gpu/stats
    """
    return make_call("get-machine-gpu-stats GET machine/gpu/stats", list[models.GpuStats], locals())


def get_machine(
    machine_id: str, *, include_relation: Many[str] | None = None, include_metadata: bool | None = None
) -> Call[models.Machine]:
    """One machine.

    GET /machine/{machineId}
    """
    return make_call("get-machine GET machine/{machine_id}", models.Machine, locals())


def get_machine_status_history(
    machine_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """The actions of operators on the machine, newest first.

    GET /machine/{machineId}/status-history
    """
    return make_paged_call(
        "get-machine-status-history GET machine/{machine_id}/status-history", models.StatusDetail, locals()
    )


def get_all_nvlink_domain(
    *, order_by: str | None = None, site_id: str | None = None
) -> PagedCall[models.NVLinkDomain]:
    """The domains in which the caller operates or may use machines, with the capacity of each.

    GET /nvlink-domain
    """
    return make_paged_call("get-all-nvlink-domain GET nvlink-domain", models.NVLinkDomain, locals())


def get_nvlink_domain(nv_link_domain_id: str) -> Call[models.NVLinkDomain]:
    """One domain.

    GET /nvlink-domain/{nvLinkDomainId}
    """
    return make_call("get-nvlink-domain GET nvlink-domain/{nv_link_domain_id}", models.NVLinkDomain, locals())


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
    """Requests with their callers and outcomes, newest first.

    GET /audit
    """
    return make_paged_call("get-all-audit-entry GET audit", models.AuditEntry, locals())


def get_audit_entry(audit_entry_id: str) -> Call[models.AuditEntry]:
    """One entry.

    GET /audit/{auditEntryId}
    """
    return make_call("get-audit-entry GET audit/{audit_entry_id}", models.AuditEntry, locals())


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
    return make_paged_call("get-all-allocation GET allocation", models.Allocation, locals())


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
    return make_call("get-allocation GET allocation/{allocation_id}", models.Allocation, locals())


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
    return make_paged_call("get-all-tray-reservation GET tray-reservation", models.TrayReservation, locals())


def get_tray_reservation(tray_reservation_id: str) -> Call[models.TrayReservation]:
    """One reservation.

    GET /tray-reservation/{trayReservationId}
    """
    return make_call(
        "get-tray-reservation GET tray-reservation/{tray_reservation_id}", models.TrayReservation, locals()
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
    return make_paged_call(
        "get-all-nvlink-logical-partition GET nvlink-logical-partition",
        models.NVLinkLogicalPartition,
        locals(),
    )


def create_nvlink_logical_partition(
    body: models.LogicalPartitionCreate,
) -> Call[models.NVLinkLogicalPartition]:
    """Create a logical partition. A dry run only plans it.

    POST /nvlink-logical-partition
    """
    return make_call(
        "create-nvlink-logical-partition POST nvlink-logical-partition",
        models.NVLinkLogicalPartition,
        locals(),
    )


def create_nvlink_logical_partition_dry_run(
    body: models.LogicalPartitionCreate,
) -> Call[models.LogicalPartitionPlan]:
    """Create a logical partition. A dry run only plans it.

    POST /nvlink-logical-partition?dryRun=true
    """
    return make_call(
        "create-nvlink-logical-partition POST nvlink-logical-partition",
        models.LogicalPartitionPlan,
        locals() | {"dry_run": True},
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
    return make_call(
        "get-nvlink-logical-partition GET nvlink-logical-partition/{nv_link_logical_partition_id}",
        models.NVLinkLogicalPartition,
        locals(),
    )


def update_nvlink_logical_partition(
    nv_link_logical_partition_id: str, body: models.LogicalPartitionUpdate
) -> Call[models.NVLinkLogicalPartition]:
    """Change the name or description.

    PATCH /nvlink-logical-partition/{nvLinkLogicalPartitionId}
    """
    return make_call(
        "update-nvlink-logical-partition PATCH nvlink-logical-partition/{nv_link_logical_partition_id}",
        models.NVLinkLogicalPartition,
        locals(),
    )


def delete_nvlink_logical_partition(nv_link_logical_partition_id: str) -> Call[models.Message]:
    """Delete a logical partition that nothing refers to.

    DELETE /nvlink-logical-partition/{nvLinkLogicalPartitionId}
    """
    return make_call(
        "delete-nvlink-logical-partition DELETE nvlink-logical-partition/{nv_link_logical_partition_id}",
        models.Message,
        locals(),
    )


def get_nvlink_logical_partition_status_history(
    nv_link_logical_partition_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """The status history of the logical partition, newest first.

    GET /nvlink-logical-partition/{nvLinkLogicalPartitionId}/status-history
    """
    return make_paged_call(
        "get-nvlink-logical-partition-status-history GET nvlink-logical-partition/{nv_link_logical_partition_id}/status-history",
        models.StatusDetail,
        locals(),
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
    return make_paged_call("get-all-nvlink-interface GET nvlink-interface", models.NVLinkInterface, locals())


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
    return make_paged_call(
        "get-all-instance-nvlink-interface GET instance/{instance_id}/nvlink-interface",
        models.NVLinkInterface,
        locals(),
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
    return make_paged_call("get-all-vpc GET vpc", models.Vpc, locals())


def create_vpc(body: models.VpcCreate) -> Call[models.Vpc]:
    """Create a VPC. A dry run only plans it.

    POST /vpc
    """
    return make_call("create-vpc POST vpc", models.Vpc, locals())


def create_vpc_dry_run(body: models.VpcCreate) -> Call[models.VpcPlan]:
    """Create a VPC. A dry run only plans it.

    POST /vpc?dryRun=true
    """
    return make_call("create-vpc POST vpc", models.VpcPlan, locals() | {"dry_run": True})


def get_vpc(vpc_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Vpc]:
    """One VPC.

    GET /vpc/{vpcId}
    """
    return make_call("get-vpc GET vpc/{vpc_id}", models.Vpc, locals())


def update_vpc(vpc_id: str, body: models.VpcUpdate) -> Call[models.Vpc]:
    """Change a VPC.

    PATCH /vpc/{vpcId}
    """
    return make_call("update-vpc PATCH vpc/{vpc_id}", models.Vpc, locals())


def delete_vpc(vpc_id: str) -> Call[models.Message]:
    """Delete an empty VPC.

    DELETE /vpc/{vpcId}
    """
    return make_call("delete-vpc DELETE vpc/{vpc_id}", models.Message, locals())


def update_vpc_virtualization(vpc_id: str, body: models.VpcVirtualization) -> Call[models.Vpc]:
    """Change the network virtualization of an empty VPC.

    PATCH /vpc/{vpcId}/virtualization
    """
    return make_call("update-vpc-virtualization PATCH vpc/{vpc_id}/virtualization", models.Vpc, locals())


def get_vpc_status_history(vpc_id: str, *, order_by: str | None = None) -> PagedCall[models.StatusDetail]:
    """The status history of the VPC, newest first.

    GET /vpc/{vpcId}/status-history
    """
    return make_paged_call(
        "get-vpc-status-history GET vpc/{vpc_id}/status-history", models.StatusDetail, locals()
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
    return make_paged_call("get-all-instance GET instance", models.Instance, locals())


def create_instance(body: models.InstanceCreate, *, if_plan: str | None = None) -> Call[models.Instance]:
    """Create an instance. A dry run only plans it.

    POST /instance
    """
    return make_call("create-instance POST instance", models.Instance, locals())


def create_instance_dry_run(
    body: models.InstanceCreate, *, if_plan: str | None = None
) -> Call[models.InstancePlan]:
    """Create an instance. A dry run only plans it.

    POST /instance?dryRun=true
    """
    return make_call("create-instance POST instance", models.InstancePlan, locals() | {"dry_run": True})


def batch_create_instance(
    body: models.InstanceBatchCreate, *, if_plan: str | None = None
) -> Call[list[models.Instance]]:
    """Create several instances, all or none. A dry run only plans them.

    POST /instance/batch
    """
    return make_call("batch-create-instance POST instance/batch", list[models.Instance], locals())


def batch_create_instance_dry_run(
    body: models.InstanceBatchCreate, *, if_plan: str | None = None
) -> Call[models.InstancePlan]:
    """Create several instances, all or none. A dry run only plans them.

    POST /instance/batch?dryRun=true
    """
    return make_call(
        "batch-create-instance POST instance/batch", models.InstancePlan, locals() | {"dry_run": True}
    )


def get_instance(instance_id: str, *, include_relation: Many[str] | None = None) -> Call[models.Instance]:
    """One instance.

    GET /instance/{instanceId}
    """
    return make_call("get-instance GET instance/{instance_id}", models.Instance, locals())


def update_instance(instance_id: str, body: models.InstanceUpdate) -> Call[models.Instance]:
    """Change an instance. `nvLinkInterfaces` replaces the whole list.

    PATCH /instance/{instanceId}
    """
    return make_call("update-instance PATCH instance/{instance_id}", models.Instance, locals())


def delete_instance(instance_id: str) -> Call[models.Message]:
    """Release an instance.

    DELETE /instance/{instanceId}
    """
    return make_call("delete-instance DELETE instance/{instance_id}", models.Message, locals())


def get_instance_status_history(
    instance_id: str, *, order_by: str | None = None
) -> PagedCall[models.StatusDetail]:
    """The status history of the instance, newest first.

    GET /instance/{instanceId}/status-history
    """
    return make_paged_call(
        "get-instance-status-history GET instance/{instance_id}/status-history", models.StatusDetail, locals()
    )
