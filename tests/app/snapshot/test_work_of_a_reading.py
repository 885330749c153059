"""A reading decodes only changed objects again, for any size of the site."""

import msgspec
import pytest
import sqlalchemy as sa
from tests.app.snapshot.test_fabric_reading import DOMAIN, FRESH, NOW, observed, seeded
from tests.app.snapshot.test_remembering import Cluster, assigned_to, told_of

from rackloom.app.snapshot import devices, fabric
from rackloom.app.snapshot import records as snapshot_records
from rackloom.app.snapshot.cache import ReadCache
from rackloom.app.snapshot.cluster import read_cluster
from rackloom.app.snapshot.fabric import read_fabrics
from rackloom.app.snapshot.records import read_records
from rackloom.carve.inventory import endpoints, maintenance
from rackloom.carve.reconcile import records
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.prepared import insert_row
from rackloom.carve.store.schema import (
    blocked_gpu,
    instance,
    logical_partition,
    machine,
    nvlink_interface,
    reserved_tray,
    tray_reservation,
)
from rackloom.carve.tenancy import entitlements
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.core.partitions.domain import GpuHealth

pytestmark = pytest.mark.anyio
NODES = 5


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def store():
    store = Store.inline()
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    yield store
    await store.close()


def counted(monkeypatch, module, name):
    """The first argument of every later call of a function."""
    calls, does = [], getattr(module, name)

    def counting(first, *rest):
        calls.append(first)
        return does(first, *rest)

    monkeypatch.setattr(module, name, counting)
    return calls


async def test_one_gpu_that_falls_sick_is_one_chassis_fetched_and_made_again(store, monkeypatch):
    await store.run(_stand_elsewhere, DOMAIN.trays[0].slot)
    known, made = ReadCache(), counted(monkeypatch, snapshot_records, "_machine")
    first = await store.survey(lambda conn: read_records(conn, 0.0, known))
    assert len(made) == len(DOMAIN.trays)
    fetched = counted(monkeypatch, snapshot_records, "_in_groups")
    assert await store.survey(lambda conn: read_records(conn, 0.0, known)) == first
    assert (len(fetched), len(made)) == (0, len(DOMAIN.trays))
    await store.run(told_of, DOMAIN.trays[2].slot, 2, GpuHealth.DEGRADED)
    later = await store.survey(lambda conn: read_records(conn, 0.0, known))
    beside = len(DOMAIN.trays) - 1
    assert ([len(rows) for rows in fetched], len(made)) == ([4 * beside], len(DOMAIN.trays) + beside)
    sick = [machine.health for machine in later.machines if machine.health]
    assert sick == ["rack-01/slot-2/gpu-1 is DEGRADED"]
    assert (
        next(machine for machine in later.machines if machine.chassis_serial == "elsewhere")
        is first.machines[-1]
    )
    assert later == await store.survey(lambda conn: read_records(conn, 0.0))


async def test_a_frequent_reader_compares_the_chassis_that_a_journal_names(store, monkeypatch):
    await store.run(_stand_elsewhere, DOMAIN.trays[0].slot)
    known, compared = ReadCache(), []
    follow = snapshot_records._named_chassis

    def following(*seen):
        marks, named = follow(*seen)
        compared.append(named)
        return marks, named

    monkeypatch.setattr(snapshot_records, "_named_chassis", following)

    async def read(at):
        return await store.survey(
            lambda conn: (read_fabrics(conn, FRESH, known), read_records(conn, at, known))[1]
        )

    first = await read(NOW)
    assert await read(NOW + 5) == first
    assert compared == [None, set()]
    await store.run(
        records.record_observation, (await store.read(endpoints.all_endpoints))[0].id, observed(NOW), NOW
    )
    assert (await read(NOW + 6), compared[-1]) == (first, set())
    sick = observed(NOW + 1, health=GpuHealth.DEGRADED)
    await store.run(
        records.record_observation, (await store.read(endpoints.all_endpoints))[0].id, sick, NOW + 1
    )
    later = await read(NOW + 7)
    assert [machine.health for machine in later.machines if machine.health]
    assert DOMAIN.trays[0].chassis_serial in compared[-1]
    free = next(machine.id for machine in later.machines if machine.chassis_serial == "elsewhere")
    await store.run(maintenance.cordon_machine, free, OperatorOrder("op", "by hand", NOW + 8))
    cordoned = await read(NOW + 9)
    assert [machine.id for machine in cordoned.machines if machine.cordoned] == [free]
    assert "elsewhere" in compared[-1]
    assert cordoned == await store.survey(lambda conn: read_records(conn, NOW + 9))


async def test_a_reading_that_failed_is_made_up_for(store, monkeypatch):
    known = ReadCache()
    await store.survey(lambda conn: read_records(conn, NOW, known))
    await store.run(told_of, DOMAIN.trays[2].slot, 2, GpuHealth.DEGRADED)
    with monkeypatch.context() as broken:
        broken.setattr(snapshot_records, "_in_groups", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await store.survey(lambda conn: read_records(conn, NOW, known))
    later = await store.survey(lambda conn: read_records(conn, NOW, known))
    assert [machine.health for machine in later.machines if machine.health]


async def test_what_no_journal_names_is_shown_within_half_a_minute(store):
    known = ReadCache()
    first = await store.survey(lambda conn: read_records(conn, NOW, known))
    await store.run(_stand_elsewhere, DOMAIN.trays[0].slot)
    assert await store.survey(lambda conn: read_records(conn, NOW + 29, known)) == first
    later = await store.survey(lambda conn: read_records(conn, NOW + 30, known))
    assert later == await store.survey(lambda conn: read_records(conn, NOW + 30)) != first


def _stand_elsewhere(conn, slot):
    conn.execute(sa.update(machine).where(machine.c.slot == slot).values(chassis_serial="elsewhere"))


async def test_a_fabric_that_shows_what_it_showed_is_not_made_again(store, monkeypatch):
    known, reported = ReadCache(), counted(monkeypatch, fabric, "_decoded")
    for _ in range(3):
        await store.survey(lambda conn: read_fabrics(conn, FRESH, known))
    assert len(reported) == 1


def published(cluster, node, devices=2):
    reported = [{"name": f"gpu-{n}", "attributes": {"type": {"string": "gpu"}}} for n in range(devices)]
    spec = {"driver": "gpu.nvidia.com", "nodeName": node, "pool": {"name": node, "generation": 1}}
    cluster.put(RESOURCE_SLICE, node, spec=spec | {"devices": reported})


async def test_one_node_that_publishes_anew_is_one_node_read_again(monkeypatch):
    cluster, known = Cluster(), ReadCache()
    for node in range(NODES):
        published(cluster, f"node-{node}")
    read = counted(monkeypatch, devices, "devices_of")
    first = await read_cluster(cluster, known)
    assert len(read) == NODES
    again = await read_cluster(cluster, known)
    assert (len(read), again.devices) == (NODES, first.devices)
    assert again.devices is first.devices
    published(cluster, "node-3", devices=1)
    later = await read_cluster(cluster, known)
    assert len(read) == NODES + 1
    assert [
        len([device for device in later.devices if device.node == f"node-{n}"]) for n in range(NODES)
    ] == [
        2,
        2,
        2,
        1,
        2,
    ]
    cluster.drop(RESOURCE_SLICE, "node-0")
    assert {device.node for device in (await read_cluster(cluster, known)).devices} == {
        f"node-{n}" for n in range(1, NODES)
    }
    assert len(read) == NODES + 1


async def test_a_reservation_is_shown_until_its_time_and_makes_no_other_machine_again(store, monkeypatch):
    known, made = ReadCache(), counted(monkeypatch, snapshot_records, "_machine")
    first = await store.survey(lambda conn: read_records(conn, NOW, known))
    reserved = first.machines[0].id
    await store.run(_reserve, reserved, NOW + 60.0)
    made.clear()
    later = await store.survey(lambda conn: read_records(conn, NOW, known))
    assert [machine.id for machine in later.machines if machine.reservation] == [reserved]
    assert later.machines[0].reservation.startswith("reserved for acme until ")
    again = await store.survey(lambda conn: read_records(conn, NOW + 59.0, known))
    assert again.machines[0] is later.machines[0]
    assert await store.survey(lambda conn: read_records(conn, NOW + 60.0, known)) == msgspec.structs.replace(
        first, tenants=later.tenants
    )
    assert made == []


def _reserve(conn, machine_id, until):
    """Keep a machine for a new tenant."""
    row = conn.execute(sa.select(machine).where(machine.c.id == machine_id)).one()
    times = {"created": NOW, "updated": NOW}
    made = entitlements.ensure_tenant(conn, "acme", NOW, lambda: "acme's id")
    insert_row(
        conn, tray_reservation, id="kept", tenant_id=made.id, site_id=row.site_id,
        instance_type_id=row.instance_type_id, reason="a job", asked_by="op", until=until, **times,
    )  # fmt: skip
    insert_row(conn, reserved_tray, machine_id=machine_id, reservation_id="kept")


async def test_the_fix_of_a_blocked_gpu_comes_and_goes_with_its_plan(store):
    tray = DOMAIN.trays[0]
    guid = next(gpu.guid for gpu in observed().gpus if (gpu.slot, gpu.module_id) == (tray.slot, 2))
    await store.run(assigned_to, tray.slot, "acme")
    await store.run(_with_interfaces, [0, 1])
    known, fixes = ReadCache(), []
    for change in (lambda _: None, _blocked(guid, "release foreign"), lambda conn: conn.execute(UNBLOCK)):
        await store.run(change)
        for cache in (known, None):
            now = await store.survey(lambda conn, cache=cache: read_records(conn, 0.0, cache))
            fixes.append([(gpu.module_id, gpu.fix) for gpu in now.instance_gpus])
    unblocked, blocked = [(1, ""), (2, "")], [(1, ""), (2, "release foreign")]
    assert fixes == [unblocked, unblocked, blocked, blocked, unblocked, unblocked]


UNBLOCK = sa.delete(blocked_gpu)


def _blocked(guid, fix):
    row = {"guid": str(guid), "domain": DOMAIN.uuid, "reason": "foreign", "fix": fix, "since": NOW}
    return lambda conn: conn.execute(sa.insert(blocked_gpu).values(row))


def _with_interfaces(conn, devices):
    (whose,) = conn.execute(sa.select(instance.c.tenant_id, instance.c.site_id)).mappings()
    times = {"status": "Pending", "created": NOW, "updated": NOW}
    conn.execute(sa.insert(logical_partition).values(id="logical", name="logical", **whose, **times))
    row = {"instance_id": "instance", "logical_partition_id": "logical", "intent_at": NOW, **times}
    rows = [{"id": f"interface-{device}", "device_instance": device, **row} for device in devices]
    conn.execute(sa.insert(nvlink_interface), rows)
