"""RPCs about partitions, those that tenants want and those that switches hold, through a real server."""

import pytest
from tests.carve.admin.admin_site import D0, Code, logical_id

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours


def test_logical_partitions(run_on_site):
    async def scenario(admin):
        made = await admin.partition("first")
        assert made.status.state == pb.READY
        assert (made.config.metadata.name, made.config.tenant_organization_id) == ("first", "demo")
        assert made.created.seconds >= 1000
        chosen = await admin.partition("second", id=logical_id("chosen-by-the-caller"))
        assert chosen.id.value == "chosen-by-the-caller"
        assert (await admin.refused(admin.partition("third", id=chosen.id)))[0] is Code.ALREADY_EXISTS
        assert (await admin.refused(admin.partition("first")))[0] is Code.ALREADY_EXISTS
        named = pb.NVLinkLogicalPartitionSearchFilter(name="second")
        assert list((await admin.forge.FindNVLinkLogicalPartitionIds(named)).partition_ids) == [chosen.id]
        every = pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[made.id, chosen.id, logical_id("none")])
        found = (await admin.forge.FindNVLinkLogicalPartitionsByIds(every)).partitions
        assert list(found) == [made, chosen]
        of_tenant = await admin.forge.NVLinkLogicalPartitionsForTenant(
            pb.TenantSearchQuery(tenantOrganizationId="demo")
        )
        assert list(of_tenant.partitions) == [made, chosen]

    run_on_site(scenario)


def test_a_logical_partition_is_updated_from_the_version_that_was_read(run_on_site):
    async def scenario(admin):
        made = await admin.partition()
        renamed = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name="other", description="new"))
        request = pb.NVLinkLogicalPartitionUpdateRequest(
            id=made.id, config=renamed, if_version_match=made.config_version
        )
        await admin.forge.UpdateNVLinkLogicalPartition(request)
        code, details = await admin.refused(admin.forge.UpdateNVLinkLogicalPartition(request))
        assert code is Code.FAILED_PRECONDITION
        assert "ConcurrentModification" in details
        renamed.tenant_organization_id = "rival"
        stolen = pb.NVLinkLogicalPartitionUpdateRequest(id=made.id, config=renamed)
        assert await admin.refused(admin.forge.UpdateNVLinkLogicalPartition(stolen)) == (
            Code.INVALID_ARGUMENT,
            "Tenant organization ID should not be updated",
        )
        missing = pb.NVLinkLogicalPartitionUpdateRequest(id=logical_id("none"), config=renamed)
        assert (await admin.refused(admin.forge.UpdateNVLinkLogicalPartition(missing)))[0] is Code.NOT_FOUND

    run_on_site(scenario)


def test_a_logical_partition_in_use_is_not_deleted(run_on_site):
    async def scenario(admin):
        made = await admin.partition()
        instance = await admin.instance()
        await admin.join(instance, made.id.value)
        delete = pb.NVLinkLogicalPartitionDeletionRequest(id=made.id)
        code, details = await admin.refused(admin.forge.DeleteNVLinkLogicalPartition(delete))
        assert (code, "Instances" in details) == (Code.INVALID_ARGUMENT, True)
        await admin.forge.ReleaseInstance(pb.InstanceReleaseRequest(id=ids_pb.InstanceId(value=instance)))
        await admin.forge.DeleteNVLinkLogicalPartition(delete)

    run_on_site(scenario)


@pytest.mark.parametrize("count", [0, 101])
def test_ids_are_asked_for_in_handfuls(run_on_site, count):
    async def scenario(admin):
        for call in (
            admin.forge.FindNVLinkLogicalPartitionsByIds(
                pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[logical_id("x")] * count)
            ),
            admin.forge.FindNVLinkPartitionsByIds(
                pb.NVLinkPartitionsByIdsRequest(partition_ids=[ids_pb.NVLinkPartitionId()] * count)
            ),
            admin.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId()] * count)),
            admin.forge.FindInstancesByIds(
                pb.InstancesByIdsRequest(instance_ids=[ids_pb.InstanceId()] * count)
            ),
        ):
            assert (await admin.refused(call))[0] is Code.INVALID_ARGUMENT

    run_on_site(scenario)


def test_a_foreign_partition_is_shown_without_an_owner_and_can_be_released(small_site, run_on_site):
    small_site.partitions[D0]["theirs"] = frozenset({small_site.guid(D0, 0, 0)})
    small_site.observe_all()

    async def scenario(admin):
        named = pb.NVLinkPartitionSearchFilter(name="theirs")
        ids = (await admin.forge.FindNVLinkPartitionIds(named)).partition_ids
        (found,) = (
            await admin.forge.FindNVLinkPartitionsByIds(pb.NVLinkPartitionsByIdsRequest(partition_ids=ids))
        ).partitions
        assert (found.name, found.domain_uuid.value) == ("theirs", D0)
        assert not found.HasField("logical_partition_id")
        release = ours.ReleaseRequest(domain=D0, partition_name="theirs", reason="left over")
        assert "released" in (await admin.operator.ReleasePartition(release)).message
        assert (await admin.refused(admin.operator.ReleasePartition(release)))[0] is Code.FAILED_PRECONDITION
        plan = (await admin.operator.MakePlan(ours.PlanRequest(domain=D0))).plan
        assert '"delete-partition"' in plan

    run_on_site(scenario)


@pytest.mark.parametrize("name", ["", "x", "   ", " left", "right ", "a\tb", "a\u202eb", "line\n", "n" * 257])
def test_a_name_follows_the_rule_of_every_door(run_on_site, name):
    async def scenario(admin):
        code, why = await admin.refused(admin.partition(name))
        assert (code, "name" in why) == (Code.INVALID_ARGUMENT, True)
        made = await admin.partition("good")
        config = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name=name))
        again = admin.forge.UpdateNVLinkLogicalPartition(
            pb.NVLinkLogicalPartitionUpdateRequest(id=made.id, config=config)
        )
        # On this wire no name is an empty one: it stays.
        if name:
            assert (await admin.refused(again))[0] == Code.INVALID_ARGUMENT
        else:
            await again

    run_on_site(scenario)


def test_a_description_holds_nothing_that_hides_text(run_on_site):
    async def scenario(admin):
        made = await admin.partition("good")
        metadata = pb.Metadata(name="good", description="a\u2066b")
        again = admin.forge.UpdateNVLinkLogicalPartition(
            pb.NVLinkLogicalPartitionUpdateRequest(
                id=made.id, config=pb.NVLinkLogicalPartitionConfig(metadata=metadata)
            )
        )
        code, why = await admin.refused(again)
        assert (code, "description" in why) == (Code.INVALID_ARGUMENT, True)

    run_on_site(scenario)
