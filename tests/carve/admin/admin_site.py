"""A small site, its admin server, and a client of it that may do everything."""

import grpc

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.tenancy import instance_creation, logical_partitions
from rackloom.carve.tenancy.instance_creation import InstanceRequest

Code = grpc.StatusCode


D0, D1 = "00000000-0000-4000-8000-00000000d001", "00000000-0000-4000-8000-00000000d002"


class AdminSite:
    """A small site, its admin server, and a client that may do everything."""

    def __init__(self, site, admin_server, client, refusal):
        self.site, self.server, self.refusal = site, admin_server, refusal
        self.forge, self.operator = client.forge, client.operator

    async def write(self, fn, *args, **kwargs):
        return await self.site.store.run(fn, *args, **kwargs)

    async def refused(self, call):
        error = await self.refusal(call)
        return error.code(), error.details()

    async def partition(self, name="lp", **fields):
        config = pb.NVLinkLogicalPartitionConfig(
            metadata=pb.Metadata(name=name, description="told"), tenant_organization_id="demo"
        )
        request = pb.NVLinkLogicalPartitionCreationRequest(config=config, **fields)
        return await self.forge.CreateNVLinkLogicalPartition(request)

    async def instance(self, name="one"):
        """An instance in a VPC without a default logical partition."""
        site = self.site
        vpc = await self.write(
            logical_partitions.create_vpc,
            site.tenant.id,
            logical_partitions.NewVpc(site_id=site.site_id, name=f"net-{name}"),
            now=site.tick(),
            ids=site.ids,
        )
        request = InstanceRequest(names=(name,), vpc_id=vpc, instance_type_id=site.type_id, one_domain=False)
        made = await self.write(
            instance_creation.create_instances, site.tenant, request, now=site.tick(), ids=site.ids
        )
        return made.value[0]

    async def join(self, instance, partition, devices=(0, 1, 2, 3)):
        specs = [
            pb.InstanceNVLinkGpuConfig(
                device_instance=device, logical_partition_id=ids_pb.NVLinkLogicalPartitionId(value=partition)
            )
            for device in devices
        ]
        config = pb.InstanceConfig(nvlink=pb.InstanceNVLinkConfig(gpu_configs=specs))
        request = pb.InstanceConfigUpdateRequest(instance_id=ids_pb.InstanceId(value=instance), config=config)
        return await self.forge.UpdateInstanceConfig(request)

    async def find(self, instance):
        request = pb.InstancesByIdsRequest(instance_ids=[ids_pb.InstanceId(value=instance)])
        (found,) = (await self.forge.FindInstancesByIds(request)).instances
        return found


def logical_id(value):
    return ids_pb.NVLinkLogicalPartitionId(value=value)
