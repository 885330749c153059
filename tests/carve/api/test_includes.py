"""What a client asks for besides is given or refused, never left out in silence."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.api.auth import Role
from rackloom.carve.store import schema
from rackloom.carve.tenancy import entitlements

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
