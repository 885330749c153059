"""The operator's queries on PostgreSQL, which is stricter than SQLite about types and grouping."""

import asyncio

import pytest

from rackloom.app.site import record_counts
from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import instances, logical_partitions, machines, operators, partitions
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import enrol_observed_machines, ensure_site
from rackloom.carve.reconcile import records
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.tenancy import catalog, entitlements
from rackloom.core.partitions.domain import (
    DefaultPartitionPolicy,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
)

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
    return DomainObservation(
        domain=DOMAIN, gpus=tuple(gpus), partitions=(), limits=DomainLimits(), observed_at=20.0
    )


@pytest.mark.slow
def test_what_an_operator_asks(postgres_url, admin_server, observation):
    async def furnish(store):
        site = await store.run(ensure_site, "lab", "acme", DefaultPartitionPolicy.NONE, 1.0, admin_server.ids)
        assert (
            await store.run(ensure_site, "lab", "acme", DefaultPartitionPolicy.KEEP, 2.0, admin_server.ids)
            == site
        )
        provider = await store.read(entitlements.get_provider, "acme")
        await store.run(
            catalog.create_instance_type,
            provider.id,
            catalog.NewInstanceType(site, "rack", None, {}, []),
            now=3.0,
            ids=admin_server.ids,
        )
        tenant = await store.run(entitlements.ensure_tenant, "demo", 3.0, admin_server.ids)
        await store.run(entitlements.grant_everything, tenant.id, 3.0, admin_server.ids)
        await store.run(
            endpoints.create_chassis_endpoint, "C0", "https://s", OperatorOrder("t", "", 4.0), lambda: "e1"
        )
        created = await store.run(enrol_observed_machines, site, observation, "Ready", 5.0)
        assert created == ["c0-0"]
        await store.run(records.record_observation, "e1", observation, 21.0)

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
        plan = await operators.make_domain_plan(deps, ours.PlanRequest(domain=DOMAIN))
        assert '"operations":[]' in plan.plan
        await operators.pause(deps, ours.DomainRequest(domain=DOMAIN, reason="test"))
        await operators.drain(deps, ours.TrayRequest(machine_id="c0-0", reason="test"))
        gone = await machines.force_delete(deps, pb.AdminForceDeleteMachineRequest(host_query="c0-0"))
        assert gone.all_done

    async def scenario():
        store = await Store.connect(postgres_url)
        try:
            await furnish(store)
            await ask(admin_server.deps(store, clock=lambda: 30.0))
            counts = await store.read(record_counts.count_site_records, 0)
            assert (counts.logical_partitions, counts.endpoints["known"]) == (1, 1)
            assert counts.domains[0].gpus == {"healthy": 4}
        finally:
            await store.close()

    asyncio.run(scenario())
