"""The loop against a switch controller on a real socket: down, back, refusing, changed behind its back."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager, suppress

import pytest
import sqlalchemy as sa

from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory import enrolment, maintenance
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.observation import latest
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.tenancy import entitlements, instance_creation, instances, logical_partitions
from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PROFILE = profiles.load_rack("gb200-nvl72")
PATIENCE = 20.0
_numbers = itertools.count(1)


def new_id():
    return f"00000000-0000-4000-8000-{next(_numbers):012}"


class Plane:
    """A store, a reconciler and one simulated rack that a test can switch off."""

    def __init__(self, store, server):
        self.store = store
        self.server = server
        self.reconciler = Reconciler(
            store, lambda endpoint: NmxcDriver(endpoint.url, clock=time.time), time.time, interval=30.0
        )

    @property
    def domain(self):
        return self.server.fabric.domain

    async def order(self, count=2):
        tenant = await self.store.read(entitlements.get_tenant, "demo")
        row = await self.store.read(lambda conn: conn.execute(sa.select(schema.instance_type)).one())
        partition = await self.store.run(
            logical_partitions.create_logical_partition,
            tenant.id,
            logical_partitions.NewLogicalPartition(row.site_id, f"p{next(_numbers)}"),
            now=time.time(),
            ids=new_id,
        )
        vpc = await self.store.run(
            logical_partitions.create_vpc,
            tenant.id,
            logical_partitions.NewVpc(
                site_id=row.site_id, name=f"v{next(_numbers)}", logical_partition_id=partition
            ),
            now=time.time(),
            ids=new_id,
        )
        changed = await self.store.run(
            instance_creation.create_instances,
            tenant,
            instance_creation.InstanceRequest(
                names=tuple(f"i{next(_numbers)}" for _ in range(count)),
                vpc_id=vpc,
                instance_type_id=row.id,
                one_domain=False,
            ),
            now=time.time(),
            ids=new_id,
        )
        self.reconciler.wake(changed.domains)
        return changed.value

    async def statuses(self):
        rows = await self.store.read(
            lambda conn: conn.execute(sa.select(schema.instance.c.status)).scalars().all()
        )
        return sorted(rows)

    async def until(self, look):
        async with asyncio.timeout(PATIENCE):
            while not (seen := await look()):
                await asyncio.sleep(0.02)
        return seen

    async def doubt(self):
        return (await self.store.read(latest.latest_of_domain, self.domain)).doubt

    def partitions(self):
        return {
            partition.name: len(partition.guids) for partition in self.server.fabric.snapshot().partitions
        }


@asynccontextmanager
async def plane():
    """A site of one rack with a listening switch controller. Its reconciler doesn't run yet."""
    names = SeededNames("test")
    site = build_site(PROFILE, 1, names)
    (fabric,) = fabrics_of(site, "test")
    store = Store.inline()
    async with NmxcServer(fabric) as server:
        await store.run(
            seed_embedded_site, site, PROFILE, {fabric.domain: server.url}, now=time.time(), ids=new_id
        )
        yield Plane(store, server)
    await store.close()


@asynccontextmanager
async def reconciling(reconciler):
    running = asyncio.create_task(reconciler.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def test_first_contact_removes_the_factory_default_and_nothing_else():
    async def scenario():
        async with plane() as site:
            fabric = site.server.fabric
            assert [partition.id for partition in fabric.snapshot().partitions] == [DEFAULT_PARTITION_ID]
            async with reconciling(site.reconciler):
                await site.reconciler.first_passes()
                assert site.partitions() == {}

    asyncio.run(scenario())


def test_a_change_wakes_the_domain_and_ready_means_seen():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            await site.order(2)
            await site.until(lambda: _all(site, "Ready", 2))
            assert list(site.partitions().values()) == [8]

    asyncio.run(scenario())


def test_a_controller_that_is_down_at_start_is_unknown_since_then_and_heals_by_itself():
    async def scenario():
        async with plane() as site:
            await site.server.go_away()
            async with reconciling(site.reconciler):
                await site.reconciler.first_passes()
                await site.order(2)
                assert await site.statuses() == ["Pending", "Pending"]
                assert "no switch controller has reported this machine yet" in await _reasons(site)
                await site.server.come_back()
                await site.until(lambda: _all(site, "Ready", 2))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_controller_that_goes_away_takes_ready_back_and_returns_it():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            await site.order(2)
            await site.until(lambda: _all(site, "Ready", 2))
            await site.server.go_away()
            site.reconciler.wake(frozenset({site.domain}))
            await site.until(lambda: _all(site, "Unknown", 2))
            assert (await site.doubt()).startswith("unknown since ")
            await site.server.come_back()
            await site.until(lambda: _all(site, "Ready", 2))

    asyncio.run(scenario())


@pytest.mark.parametrize("code", ["NOT_READY", "RESOURCE_IN_USE", "GENERIC_ERROR"])
def test_a_refused_operation_is_recorded_as_refused_and_tried_again(code):
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            site.server.faults.refuse_next("CreatePartition", code)
            await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            rows = await _operations(site, "create-partition")
            assert [(row.state, row.code) for row in rows] == [("refused", code), ("done", None)]

    asyncio.run(scenario())


def test_a_lost_answer_is_not_asked_for_twice():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            site.server.faults.drop_reply_of_next("CreatePartition")
            await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            rows = await _operations(site, "create-partition")
            assert [row.state for row in rows] == ["unknown"]
            assert list(site.partitions().values()) == [4]

    asyncio.run(scenario())


def test_the_fabric_wakes_the_loop_when_somebody_else_changes_it():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            (partition,) = site.server.fabric.snapshot().partitions
            site.server.fabric.delete(partition.id)
            await site.until(lambda: _operation_count(site, "create-partition", 2))
            await site.until(lambda: _all(site, "Ready", 1))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_foreign_partition_is_left_alone():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            fabric = site.server.fabric
            guids = [gpu.guid for gpu in fabric.snapshot().gpus[-4:]]
            fabric.create("somebody-elses", guids)
            await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            assert site.partitions()["somebody-elses"] == 4

    asyncio.run(scenario())


def test_instances_get_the_clean_trays_beside_a_partition_that_was_made_by_hand():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            held = [gpu.guid for gpu in site.server.fabric.snapshot().gpus if gpu.slot < 9]
            site.server.fabric.create("by-hand", held)
            await site.until(lambda: _foreign_trays(site, 9))
            await site.order(9)
            await site.until(lambda: _all(site, "Ready", 9))
            assert site.partitions()["by-hand"] == len(held) == 36
            with pytest.raises(Refused, match=r"requested 1, available 0; passed over .*, 6 more"):
                await site.order(1)

    asyncio.run(scenario())


def test_a_removal_that_is_refused_for_ever_keeps_nobody_else_waiting():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            await site.reconciler.first_passes()
            (old,) = await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            for _ in range(1000):
                site.server.faults.refuse_next("DeletePartition", "GENERIC_ERROR")
            tenant = await site.store.read(entitlements.get_tenant, "demo")
            released = await site.store.run(instances.delete_instance, tenant.id, old, time.time())
            site.reconciler.wake(released.domains)
            await site.until(lambda: _operation_count(site, "delete-partition", 2))
            await site.order(1)
            await site.until(lambda: _are(site, ["Ready", "Terminating"]))
            blocked = await site.store.read(intent.blocked_gpus_of_domain, site.domain)
            assert len(blocked) == 4
            assert all("refused delete-partition" in row.reason for row in blocked)

    asyncio.run(scenario())


def test_a_machine_that_is_removed_after_its_instance_leaves_no_partition_of_its_tray():
    async def scenario():
        async with plane() as site, reconciling(site.reconciler):
            keep_with_tray = sa.update(schema.site).values(default_partition="tray", updated=time.time())
            await site.store.run(lambda conn: conn.execute(keep_with_tray))
            await site.reconciler.first_passes()
            (made,) = await site.order(1)
            await site.until(lambda: _all(site, "Ready", 1))
            (machine,) = await site.store.read(
                lambda conn: conn.execute(sa.select(schema.instance.c.machine_id)).scalars().all()
            )
            order = OperatorOrder("op", "scrapped", time.time())
            freed = await site.store.run(maintenance.force_delete_instance, machine, order)
            assert freed.value == made
            site.reconciler.wake(freed.domains)
            await site.until(lambda: _are(site, []))
            # Its GPUs are free again, and share memory within their tray.
            await site.until(lambda: _stands(site, f"rl-tray-{machine}"))
            site.reconciler.wake(await site.store.run(enrolment.remove_machine, machine, time.time()))
            await site.until(lambda: _is_gone(site, f"rl-tray-{machine}"))
            assert len(site.partitions()) == PROFILE.trays_per_domain - 1
            blocked = await site.store.read(intent.blocked_gpus_of_domain, site.domain)
            assert blocked == []

    asyncio.run(scenario())


async def _foreign_trays(site, count):
    return len(await site.store.read(ownership.foreign_trays, None)) == count


async def _stands(site, name):
    return name.lower() in {known.lower() for known in site.partitions()}


async def _is_gone(site, name):
    return not await _stands(site, name)


async def _are(site, statuses):
    return await site.statuses() == statuses


async def _all(site, status, count):
    return await site.statuses() == [status] * count


async def _reasons(site):
    rows = await site.store.read(
        lambda conn: conn.execute(sa.select(schema.nvlink_interface.c.reason)).scalars().all()
    )
    return set(rows)


async def _operations(site, kind):
    table = schema.operation
    chosen = sa.select(table).where(table.c.kind == kind).order_by(table.c.id)
    return await site.store.read(lambda conn: conn.execute(chosen).all())


async def _operation_count(site, kind, count):
    return len(await _operations(site, kind)) >= count
