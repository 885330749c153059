"""RPCs about partitions, those that tenants want and those that switches hold, through the real door."""

import pytest
from tests.carve.admin.stage import D0, Code, logical_id

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours


def test_logical_partitions(on_stage):
    async def scenario(stage):
        made = await stage.partition("first")
        assert made.status.state == pb.READY
        assert (made.config.metadata.name, made.config.tenant_organization_id) == ("first", "demo")
        assert made.created.seconds >= 1000
        chosen = await stage.partition("second", id=logical_id("chosen-by-the-caller"))
        assert chosen.id.value == "chosen-by-the-caller"
        assert (await stage.refused(stage.partition("third", id=chosen.id)))[0] is Code.ALREADY_EXISTS
        assert (await stage.refused(stage.partition("first")))[0] is Code.ALREADY_EXISTS
        named = pb.NVLinkLogicalPartitionSearchFilter(name="second")
        assert list((await stage.forge.FindNVLinkLogicalPartitionIds(named)).partition_ids) == [chosen.id]
        every = pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[made.id, chosen.id, logical_id("none")])
        found = (await stage.forge.FindNVLinkLogicalPartitionsByIds(every)).partitions
        assert list(found) == [made, chosen]
        of_tenant = await stage.forge.NVLinkLogicalPartitionsForTenant(
            pb.TenantSearchQuery(tenantOrganizationId="demo")
        )
        assert list(of_tenant.partitions) == [made, chosen]

    on_stage(scenario)


def test_a_logical_partition_is_updated_from_the_version_that_was_read(on_stage):
    async def scenario(stage):
        made = await stage.partition()
        renamed = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name="other", description="new"))
        request = pb.NVLinkLogicalPartitionUpdateRequest(
            id=made.id, config=renamed, if_version_match=made.config_version
        )
        await stage.forge.UpdateNVLinkLogicalPartition(request)
        code, details = await stage.refused(stage.forge.UpdateNVLinkLogicalPartition(request))
        assert code is Code.FAILED_PRECONDITION
        assert "ConcurrentModification" in details
        renamed.tenant_organization_id = "rival"
        stolen = pb.NVLinkLogicalPartitionUpdateRequest(id=made.id, config=renamed)
        assert await stage.refused(stage.forge.UpdateNVLinkLogicalPartition(stolen)) == (
            Code.INVALID_ARGUMENT,
            "Tenant organization ID should not be updated",
        )
        missing = pb.NVLinkLogicalPartitionUpdateRequest(id=logical_id("none"), config=renamed)
        assert (await stage.refused(stage.forge.UpdateNVLinkLogicalPartition(missing)))[0] is Code.NOT_FOUND

    on_stage(scenario)


def test_a_logical_partition_in_use_is_not_deleted(on_stage):
    async def scenario(stage):
        made = await stage.partition()
        instance = await stage.instance()
        await stage.join(instance, made.id.value)
        delete = pb.NVLinkLogicalPartitionDeletionRequest(id=made.id)
        code, details = await stage.refused(stage.forge.DeleteNVLinkLogicalPartition(delete))
        assert (code, "Instances" in details) == (Code.INVALID_ARGUMENT, True)
        await stage.forge.ReleaseInstance(pb.InstanceReleaseRequest(id=ids_pb.InstanceId(value=instance)))
        await stage.forge.DeleteNVLinkLogicalPartition(delete)

    on_stage(scenario)


@pytest.mark.parametrize("count", [0, 101])
def test_ids_are_asked_for_in_handfuls(on_stage, count):
    async def scenario(stage):
        for call in (
            stage.forge.FindNVLinkLogicalPartitionsByIds(
                pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[logical_id("x")] * count)
            ),
            stage.forge.FindNVLinkPartitionsByIds(
                pb.NVLinkPartitionsByIdsRequest(partition_ids=[ids_pb.NVLinkPartitionId()] * count)
            ),
            stage.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId()] * count)),
            stage.forge.FindInstancesByIds(
                pb.InstancesByIdsRequest(instance_ids=[ids_pb.InstanceId()] * count)
            ),
        ):
            assert (await stage.refused(call))[0] is Code.INVALID_ARGUMENT

    on_stage(scenario)


def test_a_foreign_partition_is_shown_without_an_owner_and_can_be_released(small_site, on_stage):
    small_site.partitions[D0]["theirs"] = frozenset({small_site.guid(D0, 0, 0)})
    small_site.observe_all()

    async def scenario(stage):
        named = pb.NVLinkPartitionSearchFilter(name="theirs")
        ids = (await stage.forge.FindNVLinkPartitionIds(named)).partition_ids
        (found,) = (
            await stage.forge.FindNVLinkPartitionsByIds(pb.NVLinkPartitionsByIdsRequest(partition_ids=ids))
        ).partitions
        assert (found.name, found.domain_uuid.value) == ("theirs", D0)
        assert not found.HasField("logical_partition_id")
        release = ours.ReleaseRequest(domain=D0, partition_name="theirs", reason="left over")
        assert "released" in (await stage.operator.ReleasePartition(release)).message
        assert (await stage.refused(stage.operator.ReleasePartition(release)))[0] is Code.FAILED_PRECONDITION
        plan = (await stage.operator.MakePlan(ours.PlanRequest(domain=D0))).plan
        assert '"delete-partition"' in plan

    on_stage(scenario)


@pytest.mark.parametrize("name", ["", "x", "   ", " left", "right ", "a\tb", "n" * 257])
def test_a_name_follows_the_rule_of_every_door(on_stage, name):
    async def scenario(stage):
        code, why = await stage.refused(stage.partition(name))
        assert (code, "name" in why) == (Code.INVALID_ARGUMENT, True)
        made = await stage.partition("good")
        config = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name=name))
        again = stage.forge.UpdateNVLinkLogicalPartition(
            pb.NVLinkLogicalPartitionUpdateRequest(id=made.id, config=config)
        )
        # On this wire no name is an empty one: it stays.
        if name:
            assert (await stage.refused(again))[0] == Code.INVALID_ARGUMENT
        else:
            await again

    on_stage(scenario)
