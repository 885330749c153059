"""What each RPC does, asked through the real door over a site whose fabric the test plays."""

import grpc
import pytest
import sqlalchemy as sa
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.plan.values import Blocked
from rackloom.carve.site import fabric_book, instance_creation, tables, vpcs
from rackloom.carve.site.instance_creation import InstanceRequest

Code = grpc.StatusCode
D0, D1 = "00000000-0000-4000-8000-00000000d001", "00000000-0000-4000-8000-00000000d002"


class Stage:
    """A small site, its door, and a client that may do everything."""

    def __init__(self, site, door, client, refusal):
        self.site, self.door, self.refusal = site, door, refusal
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
            vpcs.create,
            site.tenant.id,
            site_id=site.site_id,
            name=f"net-{name}",
            description=None,
            logical_partition_id=None,
            extra={},
            wanted_id=None,
            now=site.tick(),
            ids=site.ids,
        )
        request = InstanceRequest(names=(name,), vpc_id=vpc, instance_type_id=site.type_id, one_domain=False)
        made = await self.write(instance_creation.create, site.tenant, request, now=site.tick(), ids=site.ids)
        return made.value[0]

    async def join(self, instance, partition, devices=(0, 1, 2, 3)):
        wishes = [
            pb.InstanceNVLinkGpuConfig(
                device_instance=one, logical_partition_id=ids_pb.NVLinkLogicalPartitionId(value=partition)
            )
            for one in devices
        ]
        config = pb.InstanceConfig(nvlink=pb.InstanceNVLinkConfig(gpu_configs=wishes))
        request = pb.InstanceConfigUpdateRequest(instance_id=ids_pb.InstanceId(value=instance), config=config)
        return await self.forge.UpdateInstanceConfig(request)

    async def find(self, instance):
        request = pb.InstancesByIdsRequest(instance_ids=[ids_pb.InstanceId(value=instance)])
        (found,) = (await self.forge.FindInstancesByIds(request)).instances
        return found


@pytest.fixture
def on_stage(small_site, door, refusal):
    """Runs a scenario on a stage whose clock is the site's."""

    def run(scenario, **deps):
        async def play():
            given = door.deps(small_site.store, clock=lambda: small_site.tick(0.01), **deps)
            async with door.open(given), door.client() as client:
                return await scenario(Stage(small_site, door, client, refusal))

        return small_site.runner.run(play())

    return run


def _lp(value):
    return ids_pb.NVLinkLogicalPartitionId(value=value)


def test_endpoints(on_stage):
    async def scenario(stage):
        new = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://one:9370")
        moved = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://two")
        assert await stage.forge.CreateNvlinkNmxcEndpoint(new) == new
        assert (await stage.refused(stage.forge.CreateNvlinkNmxcEndpoint(moved)))[0] is Code.ALREADY_EXISTS
        assert await stage.forge.UpdateNvlinkNmxcEndpoint(moved) == moved
        listed = (await stage.forge.ListNvlinkNmxcEndpoints(Empty())).entries
        assert [one.chassis_serial for one in listed] == ["CHASSIS0", "CHASSIS1", "S1"]
        assert listed[2] == moved
        await stage.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1"))
        assert len((await stage.forge.ListNvlinkNmxcEndpoints(Empty())).entries) == 2
        assert stage.door.refreshed == 3
        for call in (
            stage.forge.UpdateNvlinkNmxcEndpoint(moved),
            stage.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1")),
        ):
            assert (await stage.refused(call))[0] is Code.NOT_FOUND

    on_stage(scenario)


@pytest.mark.parametrize(
    ("serial", "url"), [("", "https://one"), (" ", "https://one"), ("S1", ""), ("S1", "one:9370")]
)
def test_an_endpoint_needs_a_serial_and_a_url(on_stage, serial, url):
    async def scenario(stage):
        request = pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=url)
        assert (await stage.refused(stage.forge.CreateNvlinkNmxcEndpoint(request)))[
            0
        ] is Code.INVALID_ARGUMENT
        assert stage.door.refreshed == 0

    on_stage(scenario)


def test_logical_partitions(on_stage):
    async def scenario(stage):
        made = await stage.partition("first")
        assert made.status.state == pb.READY
        assert (made.config.metadata.name, made.config.tenant_organization_id) == ("first", "demo")
        assert made.created.seconds >= 1000
        chosen = await stage.partition("second", id=_lp("chosen-by-the-caller"))
        assert chosen.id.value == "chosen-by-the-caller"
        assert (await stage.refused(stage.partition("third", id=chosen.id)))[0] is Code.ALREADY_EXISTS
        assert (await stage.refused(stage.partition("first")))[0] is Code.ALREADY_EXISTS
        named = pb.NVLinkLogicalPartitionSearchFilter(name="second")
        assert list((await stage.forge.FindNVLinkLogicalPartitionIds(named)).partition_ids) == [chosen.id]
        every = pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[made.id, chosen.id, _lp("none")])
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
        missing = pb.NVLinkLogicalPartitionUpdateRequest(id=_lp("none"), config=renamed)
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
                pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=[_lp("x")] * count)
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


def test_an_instance_joins_and_leaves_and_says_only_what_was_seen(small_site, on_stage):
    small_site.observe_all()

    async def order(stage):
        partition = (await stage.partition()).id.value
        instance = await stage.instance()
        joined = await stage.join(instance, partition)
        assert [one.device_instance for one in joined.config.nvlink.gpu_configs] == [0, 1, 2, 3]
        assert joined.status.nvlink.configs_synced == pb.PENDING
        assert joined.status.tenant.state == pb.PROVISIONING
        assert all(not one.logical_partition_id.value for one in joined.status.nvlink.gpu_statuses)
        assert stage.door.woken[-1] == {D0} or stage.door.woken[-1] == {D1}
        return partition, instance

    partition, instance = on_stage(order)
    small_site.converge()

    async def look(stage):
        ready = await stage.find(instance)
        assert (ready.status.configs_synced, ready.status.tenant.state) == (pb.SYNCED, pb.READY)
        assert {one.logical_partition_id.value for one in ready.status.nvlink.gpu_statuses} == {partition}
        assert {one.domain_id.value for one in ready.status.nvlink.gpu_statuses} <= {D0, D1}
        machine = pb.MachinesByIdsRequest(machine_ids=[ready.machine_id])
        (seen,) = (await stage.forge.FindMachinesByIds(machine)).machines
        gpus = seen.nvlink_status_observation.gpu_status
        assert [one.device_instance for one in gpus] == [0, 1, 2, 3]
        assert {one.logical_partition_id.value for one in gpus} == {partition}
        (physical,) = (
            await stage.forge.NVLinkPartitionsForTenant(pb.TenantSearchQuery(tenantOrganizationId="demo"))
        ).partitions
        assert {one.partition_id.value for one in gpus} == {physical.id.value}
        by_id = pb.NVLinkPartitionsByIdsRequest(partition_ids=[physical.id])
        assert list((await stage.forge.FindNVLinkPartitionsByIds(by_id)).partitions) == [physical]
        by_machine = await stage.forge.FindInstanceByMachineID(ready.machine_id)
        assert list(by_machine.instances) == [ready]
        stale = pb.InstanceConfigUpdateRequest(
            instance_id=ready.id, if_version_match="V1-T1", config=pb.InstanceConfig()
        )
        assert (await stage.refused(stage.forge.UpdateInstanceConfig(stale)))[0] is Code.FAILED_PRECONDITION
        left = await stage.join(instance, partition, devices=())
        assert list(left.config.nvlink.gpu_configs) == []
        assert left.status.configs_synced == pb.PENDING
        return ready.machine_id.id

    machine = on_stage(look)
    for domain in (D0, D1):
        small_site.lose(domain)

    async def blind(stage):
        request = pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId(id=machine)])
        (unseen,) = (await stage.forge.FindMachinesByIds(request)).machines
        assert not unseen.HasField("nvlink_status_observation")
        assert unseen.HasField("nvlink_info")

    on_stage(blind)


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


def test_force_delete_first_releases_then_forgets(small_site, on_stage):
    small_site.observe_all()

    async def order(stage):
        partition = (await stage.partition()).id.value
        instance = await stage.instance()
        await stage.join(instance, partition)
        return (await stage.find(instance)).machine_id.id

    machine = on_stage(order)
    small_site.converge()

    async def delete(stage):
        request = pb.AdminForceDeleteMachineRequest(host_query=machine)
        reply = await stage.forge.AdminForceDeleteMachine(request)
        assert (reply.all_done, reply.managed_host_machine_id) == (False, machine)
        assert not (await stage.forge.AdminForceDeleteMachine(request)).all_done

    on_stage(delete)
    small_site.converge()

    async def finish(stage):
        request = pb.AdminForceDeleteMachineRequest(host_query=machine)
        assert (await stage.forge.AdminForceDeleteMachine(request)).all_done
        assert (await stage.refused(stage.forge.AdminForceDeleteMachine(request)))[0] is Code.NOT_FOUND
        ids = (await stage.forge.FindMachineIds(pb.MachineSearchConfig())).machine_ids
        assert machine not in [one.id for one in ids]
        assert len(ids) == 5

    on_stage(finish)


def test_a_gpu_mapping_is_repaired_and_the_next_observation_overrules_it(small_site, on_stage):
    small_site.observe_all()
    wrong, taken = 4711, small_site.guid(D1, 2, 0)

    def info(guid):
        place = {"tray_index": 0, "slot_id": 0}
        return pb.MachineNVLinkInfo(
            domain_uuid=ids_pb.NVLinkDomainId(value=D0),
            chassis_serial="CHASSIS0",
            gpus=[pb.NVLinkGpu(**place, device_id=one, guid=guid + one) for one in (1, 2, 3, 4)],
        )

    async def scenario(stage):
        machine = ids_pb.MachineId(id="chassis0-0")
        request = pb.UpdateMachineNvLinkInfoRequest(machine_id=machine, nvlink_info=info(wrong))
        await stage.forge.UpdateMachineNvLinkInfo(request)
        (shown,) = (
            await stage.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=[machine]))
        ).machines
        assert shown.nvlink_info == request.nvlink_info
        request.nvlink_info.CopyFrom(info(taken))
        code, details = await stage.refused(stage.forge.UpdateMachineNvLinkInfo(request))
        assert code is Code.ALREADY_EXISTS
        assert "chassis1-2" in details
        request.nvlink_info.chassis_serial = ""
        assert (await stage.refused(stage.forge.UpdateMachineNvLinkInfo(request)))[0] is Code.INVALID_ARGUMENT

    on_stage(scenario)
    small_site.observe(D0)
    rows = small_site.read(
        lambda conn: conn.execute(
            sa.select(tables.machine_gpu).where(tables.machine_gpu.c.machine_id == "chassis0-0")
        ).all()
    )
    assert [(int(row.guid), row.source) for row in rows] == [
        (small_site.guid(D0, 0, device), "nmx") for device in range(4)
    ]


@pytest.mark.parametrize("forgotten", [True, False])
def test_who_shares_memory_with_a_machine_that_is_no_more_is_told_at_once(small_site, on_stage, forgotten):
    """At rest a reading only confirms what is known, so nothing else would tell for ten minutes."""
    small_site.observe_all()

    async def order(stage):
        instance = await stage.instance()
        await stage.join(instance, (await stage.partition()).id.value)
        return instance

    instance = on_stage(order)
    small_site.converge()
    domain = next(one for one, held in small_site.partitions.items() if held)
    ((name, members),) = small_site.partitions[domain].items()
    mine = {guid >> 8 & 0xFF for guid in members}
    free = min(set(range(3)) - mine)
    guests = frozenset(small_site.guid(domain, free, device) for device in range(4))
    small_site.partitions[domain][name] = members | guests
    small_site.observe_all()
    small_site.observe_all()
    machine = f"chassis{list(small_site.partitions).index(domain)}-{free}"

    async def take_away(stage):
        assert (await stage.find(instance)).status.tenant.state == pb.READY
        if forgotten:
            request = pb.AdminForceDeleteMachineRequest(host_query=machine)
            assert (await stage.forge.AdminForceDeleteMachine(request)).all_done
        else:
            gpus = [pb.NVLinkGpu(slot_id=9, device_id=one, guid=one) for one in (1, 2, 3, 4)]
            info = pb.MachineNVLinkInfo(chassis_serial="ELSEWHERE", gpus=gpus)
            await stage.forge.UpdateMachineNvLinkInfo(
                pb.UpdateMachineNvLinkInfoRequest(machine_id=ids_pb.MachineId(id=machine), nvlink_info=info)
            )

    on_stage(take_away)
    small_site.observe_all()

    async def look(stage):
        assert (await stage.find(instance)).status.tenant.state == pb.CONFIGURING

    on_stage(look)


def test_machines_are_imported_all_or_none(on_stage):
    def record(**fields):
        return ours.MachineRecord(**({"chassis_serial": "NEW", "rack": "r9", "gpus": 4} | fields))

    async def scenario(stage):
        both = ours.ImportRequest(machines=[record(slot=1), record(slot=2, id="my-own-id")])
        reply = await stage.operator.ImportMachines(both)
        assert (list(reply.created), list(reply.unchanged)) == (["new-1", "my-own-id"], [])
        again = await stage.operator.ImportMachines(both)
        assert (list(again.created), list(again.unchanged)) == ([], ["new-1", "my-own-id"])
        clash = ours.ImportRequest(machines=[record(slot=3), record(slot=9, id="my-own-id")])
        assert (await stage.refused(stage.operator.ImportMachines(clash)))[0] is Code.ALREADY_EXISTS
        ids = (await stage.forge.FindMachineIds(pb.MachineSearchConfig())).machine_ids
        assert len(ids) == 8
        sources = await stage.site.store.read(
            lambda conn: (
                conn.execute(
                    sa.select(tables.machine_gpu.c.source).where(tables.machine_gpu.c.machine_id == "new-1")
                )
                .scalars()
                .all()
            )
        )
        assert sources == ["declared"] * 4

    on_stage(scenario)


def test_a_site_may_take_no_files(on_stage):
    async def scenario(stage):
        code, _ = await stage.refused(stage.operator.ImportMachines(ours.ImportRequest()))
        assert code is Code.FAILED_PRECONDITION

    on_stage(scenario, imports=False)


def test_credentials_are_kept_and_only_those_of_nmx_m(on_stage):
    async def scenario(stage):
        create = pb.CredentialCreationRequest(credential_type=pb.NmxM, username="root", password="hush")
        await stage.forge.CreateCredential(create)
        assert stage.door.kept.fields == {"nmxm/default/auth": {"username": "root", "password": "hush"}}
        await stage.forge.DeleteCredential(pb.CredentialDeletionRequest(credential_type=pb.NmxM))
        assert stage.door.kept.fields == {}
        for wrong in (
            pb.CredentialCreationRequest(credential_type=pb.UFM, username="root", password="hush"),
            pb.CredentialCreationRequest(credential_type=pb.NmxM, password="hush"),
        ):
            assert (await stage.refused(stage.forge.CreateCredential(wrong)))[0] is Code.INVALID_ARGUMENT

    on_stage(scenario)


def test_pause_cordon_and_drain_are_recorded_with_the_name_of_the_certificate(small_site, on_stage):
    small_site.observe_all()

    async def scenario(stage):
        domain = ours.DomainRequest(domain=D0, reason="firmware")
        tray = ours.TrayRequest(machine_id="chassis0-0", reason="fan")
        await stage.operator.PauseDomain(domain)
        await stage.operator.ResumeDomain(domain)
        assert (await stage.refused(stage.operator.ResumeDomain(domain)))[0] is Code.FAILED_PRECONDITION
        await stage.operator.CordonTray(tray)
        await stage.operator.DrainTray(tray)
        await stage.operator.UncordonTray(tray)
        steps = await stage.site.store.read(
            lambda conn: conn.execute(
                sa.select(tables.operator_step.c.step, tables.operator_step.c.asked_by).order_by(
                    tables.operator_step.c.id
                )
            ).all()
        )
        assert [tuple(one) for one in steps] == [
            (step, "admin") for step in ("pause", "resume", "cordon", "drain", "end-drain", "uncordon")
        ]
        missing = ours.DomainRequest(domain="nowhere", reason="typo")
        assert (await stage.refused(stage.operator.PauseDomain(missing)))[0] is Code.NOT_FOUND

    on_stage(scenario)


def test_a_domain_is_shown_with_its_age_its_pause_and_what_is_blocked(small_site, on_stage):
    small_site.observe_all()
    seen = small_site.now - 0.5
    guid = small_site.guid(D0, 2, 3)
    told = [Blocked(guids=(guid,), reason="no room", fix=None)]
    small_site.run(fabric_book.record_blocked, D0, told, small_site.now)
    small_site.lose(D0, "no route")

    async def scenario(stage):
        await stage.operator.PauseDomain(ours.DomainRequest(domain=D1, reason="firmware"))
        lost, read = (await stage.operator.ShowDomains(ours.DomainsRequest())).domains
        assert (lost.domain, lost.HasField("observed_at"), lost.HasField("pause_reason")) == (
            D0,
            False,
            False,
        )
        assert "no route" in lost.doubt
        (blocked,) = lost.blocked
        assert (blocked.guid, blocked.reason, blocked.HasField("fix")) == (guid, "no room", False)
        assert (read.domain, read.pause_reason, read.doubt, len(read.blocked)) == (D1, "firmware", "", 0)
        assert read.observed_at.ToMicroseconds() / 1e6 == pytest.approx(seen)
        (only,) = (await stage.operator.ShowDomains(ours.DomainsRequest(domain=D1))).domains
        assert only == read
        code, _ = await stage.refused(stage.operator.ShowDomains(ours.DomainsRequest(domain="nowhere")))
        assert code is Code.NOT_FOUND

    on_stage(scenario)


def test_no_plan_without_an_observation(on_stage):
    async def scenario(stage):
        code, details = await stage.refused(stage.operator.MakePlan(ours.PlanRequest(domain=D0)))
        assert code is Code.FAILED_PRECONDITION
        assert D0 in details
        code, _ = await stage.refused(stage.operator.ApplyPlan(ours.ApplyRequest(plan="{}")))
        assert code is Code.INVALID_ARGUMENT

    on_stage(scenario)


def test_the_first_call_of_every_client_is_answered(on_stage):
    async def scenario(stage):
        told = await stage.forge.Version(pb.VersionRequest(display_config=True))
        assert told.build_version.startswith("rackloom ")
        assert told.build_hostname == ""

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
