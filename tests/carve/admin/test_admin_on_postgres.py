"""The operator's queries on PostgreSQL, which is stricter than SQLite about types and grouping."""

import asyncio

import pytest

from rackloom.app import site_counts
from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import instances, logical_partitions, machines, operators, partitions
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.machine_book import enrol_observed
from rackloom.carve.admin.site_book import ensure_site
from rackloom.carve.plan.values import DefaultPartition, GpuHealth, Limits, Observation, ObservedGpu
from rackloom.carve.site import allocations, endpoint_registry, fabric_book, instance_types, tenants
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.store import Store

DOMAIN = "00000000-0000-4000-8000-00000000d001"


@pytest.fixture
def observation():
    gpus = [
        ObservedGpu(
            guid=(0xDB << 56) + module,
            chassis_serial="C0",
            slot=0,
            tray_index=0,
            module_id=module,
            health=GpuHealth.HEALTHY,
        )
        for module in (1, 2, 3, 4)
    ]
    return Observation(domain=DOMAIN, gpus=tuple(gpus), partitions=(), limits=Limits(), observed_at=20.0)


def test_what_an_operator_asks(postgres_url, door, observation):
    async def furnish(store):
        site = await store.run(ensure_site, "lab", "acme", DefaultPartition.NONE, 1.0, door.ids)
        assert await store.run(ensure_site, "lab", "acme", DefaultPartition.KEEP, 2.0, door.ids) == site
        provider = await store.read(tenants.provider_of, "acme")
        await store.run(
            instance_types.create,
            provider.id,
            site_id=site,
            name="rack",
            description=None,
            labels={},
            capabilities=[],
            now=3.0,
            ids=door.ids,
        )
        tenant = await store.run(tenants.ensure, "demo", 3.0, door.ids)
        await store.run(allocations.grant_everything, tenant.id, 3.0, door.ids)
        await store.run(endpoint_registry.create, "C0", "https://s", Order("t", "", 4.0), lambda: "e1")
        created = await store.run(enrol_observed, site, observation, "Ready", 5.0)
        assert created == ["c0-0"]
        await store.run(fabric_book.record_observation, "e1", observation, 21.0)

    async def ask(deps: AdminDeps):
        config = pb.NVLinkLogicalPartitionConfig(
            metadata=pb.Metadata(name="job"), tenant_organization_id="demo"
        )
        await logical_partitions.create(deps, pb.NVLinkLogicalPartitionCreationRequest(config=config))
        assert (await partitions.find_ids(deps, pb.NVLinkPartitionSearchFilter())).partition_ids == []
        found = await machines.find_by_ids(
            deps, pb.MachinesByIdsRequest(machine_ids=[ids_pb.MachineId(id="c0-0")])
        )
        assert [gpu.guid >> 56 for gpu in found.machines[0].nvlink_info.gpus] == [0xDB] * 4
        assert (
            await instances.find_ids(deps, pb.InstanceSearchFilter(tenant_org_id="demo"))
        ).instance_ids == []
        plan = await operators.make(deps, ours.PlanRequest(domain=DOMAIN))
        assert '"operations":[]' in plan.plan
        await operators.pause(deps, ours.DomainRequest(domain=DOMAIN, reason="test"))
        await operators.drain(deps, ours.TrayRequest(machine_id="c0-0", reason="test"))
        gone = await machines.force_delete(deps, pb.AdminForceDeleteMachineRequest(host_query="c0-0"))
        assert gone.all_done

    async def scenario():
        store = await Store.connect(postgres_url)
        try:
            await furnish(store)
            await ask(door.deps(store, clock=lambda: 30.0))
            counts = await store.read(site_counts.count, 0)
            assert (counts.logical_partitions, counts.endpoints["known"]) == (1, 1)
            assert counts.domains[0].gpus == {"healthy": 4}
        finally:
            await store.close()

    asyncio.run(scenario())
