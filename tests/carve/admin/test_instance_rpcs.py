"""RPCs about instances: the wanted state, the observed state and the release, through a real server."""

from tests.carve.admin.admin_site import D0, D1, Code

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS


def test_an_instance_joins_and_leaves_and_says_only_what_was_seen(small_site, run_on_site):
    small_site.observe_all()

    async def order(admin):
        partition = (await admin.partition()).id.value
        instance = await admin.instance()
        joined = await admin.join(instance, partition)
        assert [config.device_instance for config in joined.config.nvlink.gpu_configs] == [0, 1, 2, 3]
        assert joined.status.nvlink.configs_synced == pb.PENDING
        assert joined.status.tenant.state == pb.PROVISIONING
        assert all(not status.logical_partition_id.value for status in joined.status.nvlink.gpu_statuses)
        assert admin.server.woken[-1] == {D0} or admin.server.woken[-1] == {D1}
        return partition, instance

    partition, instance = run_on_site(order)
    small_site.converge()

    async def look(admin):
        ready = await admin.find(instance)
        assert (ready.status.configs_synced, ready.status.tenant.state) == (pb.SYNCED, pb.READY)
        assert {status.logical_partition_id.value for status in ready.status.nvlink.gpu_statuses} == {
            partition
        }
        assert {status.domain_id.value for status in ready.status.nvlink.gpu_statuses} <= {D0, D1}
        machine = pb.MachinesByIdsRequest(machine_ids=[ready.machine_id])
        (seen,) = (await admin.forge.FindMachinesByIds(machine)).machines
        gpus = seen.nvlink_status_observation.gpu_status
        assert [gpu.device_instance for gpu in gpus] == [0, 1, 2, 3]
        assert {gpu.logical_partition_id.value for gpu in gpus} == {partition}
        (physical,) = (
            await admin.forge.NVLinkPartitionsForTenant(pb.TenantSearchQuery(tenantOrganizationId="demo"))
        ).partitions
        assert {gpu.partition_id.value for gpu in gpus} == {physical.id.value}
        by_id = pb.NVLinkPartitionsByIdsRequest(partition_ids=[physical.id])
        assert list((await admin.forge.FindNVLinkPartitionsByIds(by_id)).partitions) == [physical]
        by_machine = await admin.forge.FindInstanceByMachineID(ready.machine_id)
        assert list(by_machine.instances) == [ready]
        stale = pb.InstanceConfigUpdateRequest(
            instance_id=ready.id, if_version_match="V1-T1", config=pb.InstanceConfig()
        )
        assert (await admin.refused(admin.forge.UpdateInstanceConfig(stale)))[0] is Code.FAILED_PRECONDITION
        left = await admin.join(instance, partition, devices=())
        assert list(left.config.nvlink.gpu_configs) == []
        assert left.status.configs_synced == pb.PENDING
        return ready.machine_id.id

    machine = run_on_site(look)
    for domain in (D0, D1):
        small_site.lose(domain)

    async def blind(admin):
        request = pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId(id=machine)])
        (unseen,) = (await admin.forge.FindMachinesByIds(request)).machines
        assert not unseen.HasField("nvlink_status_observation")
        assert unseen.HasField("nvlink_info")

    run_on_site(blind)


def test_what_was_read_too_long_ago_is_claimed_of_nothing(small_site, run_on_site):
    small_site.observe_all()

    async def order(admin):
        instance = await admin.instance()
        await admin.join(instance, (await admin.partition()).id.value)
        return instance

    instance = run_on_site(order)
    small_site.converge()
    small_site.tick(DEFAULT_VALID_SECONDS + 2.0)

    async def look(admin):
        shown = await admin.find(instance)
        assert (shown.status.configs_synced, shown.status.tenant.state) == (pb.PENDING, pb.CONFIGURING)
        assert shown.status.tenant.state_details.startswith("unknown since ")
        assert shown.status.nvlink.configs_synced == pb.PENDING
        assert {status.logical_partition_id.value for status in shown.status.nvlink.gpu_statuses} == {""}
        request = pb.MachinesByIdsRequest(machine_ids=[shown.machine_id])
        (seen,) = (await admin.forge.FindMachinesByIds(request)).machines
        assert not seen.HasField("nvlink_status_observation")
        found = await admin.forge.FindNVLinkPartitionIds(pb.NVLinkPartitionSearchFilter())
        assert list(found.partition_ids) == []
        for domain in (await admin.operator.ShowDomains(ours.DomainsRequest())).domains:
            assert domain.doubt.startswith("unknown since ")
            plan = admin.operator.MakePlan(ours.PlanRequest(domain=domain.domain))
            assert (await admin.refused(plan))[0] is Code.FAILED_PRECONDITION

    run_on_site(look)


def test_force_delete_first_releases_then_forgets(small_site, run_on_site):
    small_site.observe_all()

    async def order(admin):
        partition = (await admin.partition()).id.value
        instance = await admin.instance()
        await admin.join(instance, partition)
        return (await admin.find(instance)).machine_id.id

    machine = run_on_site(order)
    small_site.converge()

    async def delete(admin):
        request = pb.AdminForceDeleteMachineRequest(host_query=machine)
        reply = await admin.forge.AdminForceDeleteMachine(request)
        assert (reply.all_done, reply.managed_host_machine_id) == (False, machine)
        assert not (await admin.forge.AdminForceDeleteMachine(request)).all_done

    run_on_site(delete)
    small_site.converge()

    async def finish(admin):
        request = pb.AdminForceDeleteMachineRequest(host_query=machine)
        assert (await admin.forge.AdminForceDeleteMachine(request)).all_done
        assert (await admin.refused(admin.forge.AdminForceDeleteMachine(request)))[0] is Code.NOT_FOUND
        ids = (await admin.forge.FindMachineIds(pb.MachineSearchConfig())).machine_ids
        assert machine not in [row.id for row in ids]
        assert len(ids) == 5

    run_on_site(finish)
