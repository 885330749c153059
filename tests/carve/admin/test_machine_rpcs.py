"""RPCs about machines: their GPUs, files of them, and their trays, through a real server."""

import pytest
import sqlalchemy as sa
from tests.carve.admin.admin_site import D0, D1, Code

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.store import schema


def test_a_gpu_mapping_is_repaired_and_the_next_observation_overrules_it(small_site, run_on_site):
    small_site.observe_all()
    wrong, taken = 4711, small_site.guid(D1, 2, 0)

    def info(guid):
        place = {"tray_index": 0, "slot_id": 0}
        return pb.MachineNVLinkInfo(
            domain_uuid=ids_pb.NVLinkDomainId(value=D0),
            chassis_serial="CHASSIS0",
            gpus=[pb.NVLinkGpu(**place, device_id=module, guid=guid + module) for module in (1, 2, 3, 4)],
        )

    async def scenario(admin):
        machine = ids_pb.MachineId(id="chassis0-0")
        request = pb.UpdateMachineNvLinkInfoRequest(machine_id=machine, nvlink_info=info(wrong))
        await admin.forge.UpdateMachineNvLinkInfo(request)
        (shown,) = (
            await admin.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=[machine]))
        ).machines
        assert shown.nvlink_info == request.nvlink_info
        request.nvlink_info.CopyFrom(info(taken))
        code, details = await admin.refused(admin.forge.UpdateMachineNvLinkInfo(request))
        assert code is Code.ALREADY_EXISTS
        assert "chassis1-2" in details
        request.nvlink_info.chassis_serial = ""
        assert (await admin.refused(admin.forge.UpdateMachineNvLinkInfo(request)))[0] is Code.INVALID_ARGUMENT

    run_on_site(scenario)
    small_site.observe(D0)
    rows = small_site.read(
        lambda conn: conn.execute(
            sa.select(schema.machine_gpu).where(schema.machine_gpu.c.machine_id == "chassis0-0")
        ).all()
    )
    assert [(int(row.guid), row.source) for row in rows] == [
        (small_site.guid(D0, 0, device), "nmx") for device in range(4)
    ]


def test_where_an_uncertain_gpu_is_is_not_told(small_site, run_on_site):
    certain, doubtful = (small_site.guid(D0, 0, device) for device in (0, 1))
    small_site.partitions[D0]["by-hand"] = frozenset({certain, doubtful})
    small_site.uncertain = frozenset({doubtful})
    small_site.observe_all()

    async def scenario(admin):
        request = pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId(id="chassis0-0")])
        (shown,) = (await admin.forge.FindMachinesByIds(request)).machines
        reported = {gpu.guid: gpu.partition_id.value for gpu in shown.nvlink_status_observation.gpu_status}
        assert reported.pop(certain)
        assert doubtful not in reported
        assert set(reported.values()) == {""}

    run_on_site(scenario)


@pytest.mark.parametrize("forgotten", [True, False])
def test_who_shares_memory_with_a_machine_that_is_no_more_is_told_at_once(small_site, run_on_site, forgotten):
    """At rest a reading only confirms the records, so no other event would follow for ten minutes."""
    small_site.observe_all()

    async def order(admin):
        instance = await admin.instance()
        await admin.join(instance, (await admin.partition()).id.value)
        return instance

    instance = run_on_site(order)
    small_site.converge()
    domain = next(uuid for uuid, held in small_site.partitions.items() if held)
    ((name, members),) = small_site.partitions[domain].items()
    mine = {guid >> 8 & 0xFF for guid in members}
    free = min(set(range(3)) - mine)
    guests = frozenset(small_site.guid(domain, free, device) for device in range(4))
    small_site.partitions[domain][name] = members | guests
    small_site.observe_all()
    small_site.observe_all()
    machine = f"chassis{list(small_site.partitions).index(domain)}-{free}"

    async def take_away(admin):
        assert (await admin.find(instance)).status.tenant.state == pb.READY
        if forgotten:
            request = pb.AdminForceDeleteMachineRequest(host_query=machine)
            assert (await admin.forge.AdminForceDeleteMachine(request)).all_done
        else:
            gpus = [pb.NVLinkGpu(slot_id=9, device_id=module, guid=module) for module in (1, 2, 3, 4)]
            info = pb.MachineNVLinkInfo(chassis_serial="ELSEWHERE", gpus=gpus)
            await admin.forge.UpdateMachineNvLinkInfo(
                pb.UpdateMachineNvLinkInfoRequest(machine_id=ids_pb.MachineId(id=machine), nvlink_info=info)
            )

    run_on_site(take_away)
    small_site.observe_all()

    async def look(admin):
        assert (await admin.find(instance)).status.tenant.state == pb.CONFIGURING

    run_on_site(look)


def test_machines_are_imported_all_or_none(run_on_site):
    def record(**fields):
        return ours.MachineRecord(**({"chassis_serial": "NEW", "rack": "r9", "gpus": 4} | fields))

    async def scenario(admin):
        both = ours.ImportRequest(machines=[record(slot=1), record(slot=2, id="my-own-id")])
        reply = await admin.operator.ImportMachines(both)
        assert (list(reply.created), list(reply.unchanged)) == (["new-1", "my-own-id"], [])
        again = await admin.operator.ImportMachines(both)
        assert (list(again.created), list(again.unchanged)) == ([], ["new-1", "my-own-id"])
        clash = ours.ImportRequest(machines=[record(slot=3), record(slot=9, id="my-own-id")])
        assert (await admin.refused(admin.operator.ImportMachines(clash)))[0] is Code.ALREADY_EXISTS
        ids = (await admin.forge.FindMachineIds(pb.MachineSearchConfig())).machine_ids
        assert len(ids) == 8
        sources = await admin.site.store.read(
            lambda conn: (
                conn.execute(
                    sa.select(schema.machine_gpu.c.source).where(schema.machine_gpu.c.machine_id == "new-1")
                )
                .scalars()
                .all()
            )
        )
        assert sources == ["declared"] * 4
        # The database counted its rows after the import: eight of one site and domain. No table is small.
        counted = "SELECT stat FROM sqlite_stat1 WHERE idx = 'ix_machine_site_id_domain'"
        rows = await admin.site.store.read(lambda conn: conn.exec_driver_sql(counted).scalar_one())
        assert rows == "10000 8 8"

    run_on_site(scenario)


def test_a_site_may_take_no_files(run_on_site):
    async def scenario(admin):
        code, _ = await admin.refused(admin.operator.ImportMachines(ours.ImportRequest()))
        assert code is Code.FAILED_PRECONDITION

    run_on_site(scenario, imports=False)


@pytest.mark.parametrize(
    "name",
    [
        "chassis0-1",
        "rack0/slot-1",
        "rack0/slot-1/gpu-3",
        "rack0 slot 1",
        "GPU 2 of rack0 slot 1",
        "CHASSIS0 slot 1 module 2",
        "slot 1 of CHASSIS0",
        "0x{guid:x}",
        "{guid}",
    ],
)
def test_a_machine_is_found_by_every_name_of_its_place(small_site, run_on_site, name):
    small_site.observe_all()
    guid = small_site.guid(D0, 1, 0)

    async def scenario(admin):
        machine = ids_pb.MachineId(id=name.format(guid=guid))
        found = (await admin.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=[machine]))).machines
        assert [row.id.id for row in found] == ["chassis0-1"]

    run_on_site(scenario)


@pytest.mark.parametrize("name", ["rack0", "rack0/slot-99", "rack9/slot-1", "0x1", "", "gpu-1"])
def test_what_names_no_tray_finds_no_machine(small_site, run_on_site, name):
    async def scenario(admin):
        machine = ids_pb.MachineId(id=name)
        request = pb.MachinesByIdsRequest(machine_ids=[machine])
        assert not (await admin.forge.FindMachinesByIds(request)).machines

    run_on_site(scenario)
