"""Each include that a client requests is given or refused, never silently left out."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.api.auth import Role
from rackloom.carve.store import schema
from rackloom.carve.tenancy import entitlements
from rackloom.core.partitions.domain import GpuHealth

TENANT, VIEWER = Role.TENANT_ADMIN, Role.PROVIDER_VIEWER
PROVIDER_FLAGS = [
    ("instance/type", "includeMachineAssignment"),
    ("instance/type/{type}", "includeMachineAssignment"),
    ("instance/type", "includeMachineAssociation"),
    ("instance/type/{type}", "includeMachineAssociation"),
    ("site", "includeMachineStats"),
    ("site", "includeGpuStats"),
    ("machine", "includeMetadata"),
    ("machine/chassis0-0", "includeMetadata"),
]


HAVE_THEM = {("site", "includeMachineStats"), ("instance/type", "includeMachineAssociation")}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in (
            "machine", "instance/type", "site", "nvlink-logical-partition", "metadata", "nvlink-domain",
            "subnet",
        )
        for name in ("includeMachineStats", "includeMachineAssociation", "INCLUDEstats", "include")
        if (path, name) not in HAVE_THEM
    ],
)  # fmt: skip
def test_an_include_that_does_not_exist_is_refused(api: Any, path: str, name: str) -> None:
    answer = api.get(f"{path}?{name}=true")
    assert (answer.status_code, answer.json()["data"]) == (
        400,
        {name: "is not a parameter of this operation"},
    )


@pytest.mark.parametrize(
    "path",
    ["site/{site}/status-history", "nvlink-domain", "nvlink-operation", "operator-step", "nvlink-drain"],
)
def test_relations_are_refused_where_there_are_none(api: Any, path: str) -> None:
    asked = path.format(site=api.site.site_id)
    assert api.get(f"{asked}?includeRelation=Site", role=VIEWER).status_code == 400


@pytest.mark.parametrize("kind", ["interface", "infiniband-interface"])
def test_kept_interfaces_have_relations(api: Any, kind: str) -> None:
    kept = {"interfaces": [{"subnetId": "s"}], "infinibandInterfaces": [{"device": "d"}]}
    instance = api.instance(api.vpc(), **kept)
    (shown,) = api.get(f"instance/{instance['id']}/{kind}?includeRelation=Instance").json()
    assert shown["instance"]["name"] == instance["name"]
    assert api.get(f"instance/{instance['id']}/{kind}?includeRelation=Moon").status_code == 400


def test_machines_of_a_type_have_relations(api: Any) -> None:
    path = f"instance/type/{api.site.type_id}/machine?includeRelation=Machine&includeRelation=InstanceType"
    shown = api.get(path, role=VIEWER).json()[0]
    assert (shown["machine"]["id"], shown["instanceType"]["id"]) == (shown["machineId"], api.site.type_id)


@pytest.mark.parametrize(("path", "flag"), PROVIDER_FLAGS)
def test_what_only_a_provider_may_include(api: Any, path: str, flag: str) -> None:
    api.instance(api.vpc())
    asked = path.format(type=api.site.type_id)
    for value in ("true", "1", "yes"):
        refused = api.get(f"{asked}?{flag}={value}")
        assert (refused.status_code, refused.json()["message"]) == (
            403,
            f"Only Provider Admin or Provider Viewer can specify query param `{flag}`",
        )
        assert api.get(f"{asked}?{flag}={value}", role=VIEWER).status_code == 200
    assert api.get(f"{asked}?{flag}=false&{flag}=true").status_code == 403
    assert api.get(f"{asked}?{flag}=False").text == api.get(asked).text


def test_a_tenant_reads_its_own_share_of_a_type(api: Any) -> None:
    api.site.other_tenant()
    api.instance(api.vpc())
    rivals_machine(api)
    ours = entitlements_of(api, "demo")
    api.patch(ours, {"constraintValue": 4}, role=Role.PROVIDER_ADMIN)
    for path in ("instance/type", f"instance/type/{api.site.type_id}"):
        found = api.get(f"{path}?includeAllocationStats=true").json()
        (kind,) = found if isinstance(found, list) else (found,)
        assert kind["allocationStats"] == {
            "assigned": None,
            "total": 4,
            "used": 1,
            "unused": 3,
            "unusedUsable": 3,
            "maxAllocatable": None,
        }
    (kind,) = api.get("instance/type?includeAllocationStats=true", role=VIEWER).json()
    assert kind["allocationStats"]["total"] == 10


def rivals_machine(api: Any) -> None:
    """The rival has an instance."""
    body = {"name": "theirs", "vpcId": api.vpc(org="rival"), "instanceTypeId": api.site.type_id}
    api.new("instance", body, org="rival")


def entitlements_of(api: Any, org: str) -> str:
    """The path of the constraint of an org's allocation."""
    (given,) = api.get("allocation", org=org).json()
    return f"allocation/{given['id']}/constraint/{given['allocationConstraints'][0]['id']}"


def test_a_provider_that_is_a_tenant_elsewhere_includes_only_its_own(api: Any) -> None:
    api.site.other_tenant()
    made = api.site.run(entitlements.ensure_provider, "rival", api.site.now, api.site.ids)
    row = {"id": api.site.ids(), "provider_id": made.id, "name": "other site", "status": "Registered"}
    row |= {"capabilities": {}, "default_partition": "none", "created": 0.0, "updated": 0.0}
    api.site.run(lambda conn: conn.execute(sa.insert(schema.site).values(**row)))
    rivals_machine(api)
    token = api.issuer.mint("rival", [TENANT, VIEWER], api.site.now, 60)
    for path in ("instance/type?includeMachineAssignment=true", "machine?includeMetadata=true"):
        answer = api.client.get(f"/v2/org/rival/nico/{path}", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        assert len(answer.json()) == 1
        assert {"machineInstanceTypes", "metadata"}.isdisjoint(answer.json()[0])


def test_another_tenants_allocation_is_no_filter(api: Any) -> None:
    rival = api.site.other_tenant()
    assert api.get(f"instance/type?tenantId={rival.id}").json() == []
    assert len(api.get(f"instance/type?tenantId={api.site.tenant.id}").json()) == 1
    assert len(api.get(f"instance/type?tenantId={rival.id}", role=VIEWER).json()) == 1


def test_a_tenant_cannot_search_for_a_rack(api: Any) -> None:
    api.instance(api.vpc())
    for text in ("rack0", "CHASSIS0"):
        assert len(api.get(f"machine?query={text}", role=VIEWER).json()) == 3
    assert api.get("machine?query=rack").json() == []
    assert len(api.get("machine?query=chassis0").json()) == 1, "the id of the machine, not the serial number"


def machine_stats(api: Any) -> Any:
    (site,) = api.get("site?includeMachineStats=true", role=VIEWER).json()
    return site["machineStats"]


def test_the_machines_of_a_site_by_status_health_and_allocation(api: Any) -> None:
    api.site.observe_all()
    total = len(api.get("machine", role=VIEWER).json())
    api.instance(api.vpc())
    assert machine_stats(api) == {
        "total": total,
        "totalByStatus": {"InUse": 1, "Ready": total - 1},
        "totalByHealth": {"healthy": total, "unhealthy": 0},
        "totalByStatusAndHealth": {
            "InUse": {"healthy": 1, "unhealthy": 0},
            "Ready": {"healthy": total - 1, "unhealthy": 0},
        },
        "totalByAllocation": {"allocatedInUse": 1, "allocatedNotInUse": total - 1, "unallocated": 0},
    }
    api.patch(entitlements_of(api, "demo"), {"constraintValue": 2}, role=Role.PROVIDER_ADMIN)
    assert machine_stats(api)["totalByAllocation"] == {
        "allocatedInUse": 1,
        "allocatedNotInUse": 1,
        "unallocated": total - 2,
    }


def test_allocations_beyond_the_machines_of_a_site_are_left_out(api: Any) -> None:
    api.site.other_tenant()
    total = len(api.get("machine", role=VIEWER).json())
    assert machine_stats(api)["totalByAllocation"] == {
        "allocatedInUse": 0,
        "allocatedNotInUse": total,
        "unallocated": 0,
    }


def test_a_machine_whose_domain_is_unknown_is_neither_healthy_nor_unhealthy(api: Any) -> None:
    api.site.observe_all()
    before = machine_stats(api)["totalByHealth"]["healthy"]
    api.delete("nvlink-nmxc-endpoint/CHASSIS0", role=Role.PROVIDER_ADMIN)
    numbers = machine_stats(api)
    unknown = before - numbers["totalByHealth"]["healthy"]
    assert 0 < unknown < numbers["total"] == before
    assert numbers["totalByHealth"]["unhealthy"] == 0


def test_an_unhealthy_gpu_makes_its_machine_unhealthy(api: Any) -> None:
    api.site.observe_all()
    sick = sa.update(schema.machine_gpu).where(
        schema.machine_gpu.c.machine_id == "chassis0-0", schema.machine_gpu.c.module_id == 1
    )
    api.site.run(lambda conn: conn.execute(sick.values(health=int(GpuHealth.DEGRADED))))
    numbers = machine_stats(api)
    assert numbers["totalByHealth"] == {"healthy": numbers["total"] - 1, "unhealthy": 1}
    assert numbers["totalByStatusAndHealth"]["Ready"] == numbers["totalByHealth"]


def test_the_gpus_of_a_site(api: Any) -> None:
    (site,) = api.get("site?includeGpuStats=true", role=VIEWER).json()
    assert site["gpuStats"] == api.get(f"machine/gpu/stats?siteId={site['id']}", role=VIEWER).json() != []
    assert "gpuStats" not in api.get("site", role=VIEWER).json()[0]


def test_numbers_of_a_site_are_for_its_own_provider(api: Any) -> None:
    api.site.other_tenant()
    api.site.run(entitlements.ensure_provider, "rival", api.site.now, api.site.ids)
    token = api.issuer.mint("rival", [TENANT, VIEWER], api.site.now, 60)
    asked = "/v2/org/rival/nico/site?includeMachineStats=true&includeGpuStats=true"
    (site,) = api.client.get(asked, headers={"Authorization": f"Bearer {token}"}).json()
    assert {"machineStats", "gpuStats"}.isdisjoint(site)


def test_sites_and_allocations_of_a_tenant(api: Any) -> None:
    rival, ours = api.site.other_tenant(), api.site.tenant
    (given,) = api.get("allocation").json()
    for tenant, role, number in ((ours, TENANT, 1), (rival, TENANT, 0), (rival, VIEWER, 1)):
        assert len(api.get(f"site?tenantId={tenant.id}", role=role).json()) == number
    path = f"allocation/{given['id']}"
    assert api.get(f"{path}?tenantId={ours.id}").json() == given
    assert api.get(f"{path}?tenantId={rival.id}").status_code == 404
    provider = given["infrastructureProviderId"]
    assert api.get(f"{path}?infrastructureProviderId={provider}").json() == given
    assert api.get(f"{path}?infrastructureProviderId={rival.id}").status_code == 404


@pytest.mark.parametrize("kind", ["subnet", "vpc-prefix"])
def test_relations_of_networks_are_those_of_the_contract(api: Any, kind: str) -> None:
    assert api.get(f"{kind}?includeRelation=VPC&includeUsageStats=true").json() == []
    assert api.get(f"{kind}?includeRelation=Moon").status_code == 400


def test_who_uses_too_much_takes_nothing_from_what_another_was_promised(api: Any) -> None:
    api.site.observe_all()
    rival = api.site.other_tenant()
    body = {"vpcId": api.vpc(org="rival"), "instanceTypeId": api.site.type_id}
    for number in range(3):
        api.new("instance", body | {"name": f"vm {number}"}, org="rival")
    api.patch(entitlements_of(api, "demo"), {"constraintValue": 2}, role=Role.PROVIDER_ADMIN)
    of_rival = sa.select(schema.allocation.c.id).where(schema.allocation.c.tenant_id == rival.id)
    # An older version let a tenant use more than it was allocated.
    less = sa.update(schema.allocation_constraint).values(value=1)
    less = less.where(schema.allocation_constraint.c.allocation_id.in_(of_rival))
    api.site.run(lambda conn: conn.execute(less))
    assert machine_stats(api)["totalByAllocation"] == {
        "allocatedInUse": 3,
        "allocatedNotInUse": 2,
        "unallocated": 1,
    }
    (kind,) = api.get("machine/instance-type/stats", role=VIEWER).json()
    assert kind["maxAllocatable"] == 1
    shown = [tenant["instanceTypes"] for tenant in api.get("tenant/instance-type/stats", role=VIEWER).json()]
    assert [types[0]["maxAllocatable"] for types in shown] == [1, 1]
    (kind,) = api.get("instance/type?includeAllocationStats=true", role=VIEWER).json()
    numbers = kind["allocationStats"]
    assert (numbers["used"], numbers["unused"], numbers["maxAllocatable"]) == (3, 2, 1)
