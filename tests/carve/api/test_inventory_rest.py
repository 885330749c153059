"""Sites, instance types, machines, allocations, and who the caller is."""

import json
from typing import Any

import msgspec
import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.reconcile import records

BOTH_STORES = True

UNKNOWN = "11111111-1111-4111-8111-111111111111"
ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


def test_who_am_i(api: Any) -> None:
    metadata = api.get("metadata").json()
    assert (metadata["version"], metadata["contracts"]) == ("2.0.0", ["1.6.0", "2.0.0"])
    assert metadata["implementation"].startswith("rackloom ")
    assert metadata["buildTime"].endswith("Z")
    tenant = api.get("tenant/current").json()
    assert (tenant["org"], tenant["capabilities"]) == ("demo", {"targetedInstanceCreation": True})
    provider = api.get("infrastructure-provider/current", role=VIEWER).json()
    account = api.get("service-account/current").json()
    assert account == {
        "enabled": True,
        "infrastructureProviderId": provider["id"],
        "tenantId": tenant["id"],
    }
    assert api.get("infrastructure-provider/current", org="rival", role=VIEWER).status_code == 400
    assert api.get("service-account/current", org="rival").json()["enabled"] is False


def test_an_org_becomes_a_tenant_at_first_use(api: Any) -> None:
    sites = api.get("site", org="newcomer").json()
    assert [site["name"] for site in sites] == ["small"]
    (given,) = api.get("allocation", org="newcomer").json()
    assert [constraint["constraintValue"] for constraint in given["allocationConstraints"]] == [6]
    assert given["tenantId"] == api.get("tenant/current", org="newcomer").json()["id"]


def test_a_site_switches_one_capability_and_leaves_the_others(api: Any) -> None:
    path = f"site/{api.site.site_id}"
    assert api.get("site?isNVLinkPartitionEnabled=true").json()[0]["capabilities"]["nvLinkPartition"] is True
    changed = api.patch(path, {"capabilities": {"nvLinkPartition": False, "flow": True}}, role=ADMIN).json()
    assert (changed["capabilities"]["nvLinkPartition"], changed["capabilities"]["flow"]) == (False, True)
    api.patch(path, {"capabilities": {"flow": None}}, role=ADMIN)
    assert api.get(path).json()["capabilities"]["flow"] is True
    assert api.get("site?isNVLinkPartitionEnabled=true").json() == []
    assert len(api.get("site?isNVLinkPartitionEnabled=false").json()) == 1
    assert api.get(f"site/{UNKNOWN}").status_code == 404
    assert api.patch(path, {"capabilities": {}}, role=VIEWER).status_code == 403
    assert api.patch(path, {"capabilities": {}}, role=ADMIN, org="rival").status_code == 400


def test_instance_types_with_their_machines(api: Any) -> None:
    (found,) = api.get("instance/type?includeMachineAssignment=true", role=VIEWER).json()
    assert found["machineCapabilities"] == [
        {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
    ]
    assert len(found["machineInstanceTypes"]) == 6
    assert api.get(f"instance/type/{found['id']}").json()["name"] == "small-rack"
    assert api.get(f"instance/type/{UNKNOWN}").status_code == 404


@pytest.mark.parametrize(
    ("capability", "accepted"),
    [
        ({"type": "GPU", "name": "NVIDIA GB300", "count": 4, "deviceType": "NVLink"}, True),
        ({"type": "Network", "name": "a NIC", "deviceType": "DPU"}, True),
        ({"type": "CPU", "name": "a CPU", "cores": 72}, True),
        ({"type": "GPU", "name": "a GPU", "deviceType": "DPU"}, False),
        ({"type": "CPU", "name": "a CPU", "deviceType": "NVLink"}, False),
        ({"type": "Quantum", "name": "a qubit"}, False),
    ],
)
def test_device_types_fit_their_capability(api: Any, capability: dict[str, Any], accepted: bool) -> None:
    body = {"name": "kind", "siteId": api.site.site_id, "machineCapabilities": [capability]}
    answer = api.post("instance/type", body, role=ADMIN)
    assert answer.status_code == (201 if accepted else 400)
    if accepted:
        assert answer.json()["machineCapabilities"] == [capability]
        assert api.post("instance/type", body, role=ADMIN).status_code == 409


def test_machines_are_given_to_a_type_once(api: Any) -> None:
    kind = api.new("instance/type", {"name": "kind", "siteId": api.site.site_id}, role=ADMIN)["id"]
    answer = api.post(f"instance/type/{kind}/machine", {"machineIds": ["chassis0-0"]}, role=ADMIN)
    assert answer.status_code == 409
    answer = api.post(f"instance/type/{kind}/machine", {"machineIds": ["nowhere"]}, role=ADMIN)
    assert answer.json()["data"] == {"machineIds": "nowhere"}
    same = api.post(f"instance/type/{api.site.type_id}/machine", {"machineIds": ["chassis0-0"]}, role=ADMIN)
    assert [row["machineId"] for row in same.json()] == ["chassis0-0"]
    assert same.json()[0]["instanceTypeId"] == api.site.type_id


def test_machines_show_what_was_learnt_and_nothing_before(api: Any) -> None:
    path = "machine/chassis0-1?includeMetadata=true"
    before = api.get(path, role=VIEWER).json()["metadata"]["nvLinkInfo"]
    assert before["domainUuid"] is None
    assert [gpu["guid"] for gpu in before["gpus"]] == [None] * 4
    api.site.observe_all()
    after = api.get(path, role=VIEWER).json()["metadata"]["nvLinkInfo"]
    domain = next(iter(api.site.partitions))
    assert after["domainUuid"] == domain
    assert [gpu["guid"] for gpu in after["gpus"]] == [
        str(api.site.guid(domain, 1, index)) for index in range(4)
    ]
    assert {gpu["source"] for gpu in after["gpus"]} == {"nmx"}
    assert "metadata" not in api.get("machine/chassis0-1", role=VIEWER).json()


def test_machines_are_listed_by_every_filter_and_shown_to_their_user_only(api: Any) -> None:
    instance = api.instance(api.vpc())
    assert [found["id"] for found in api.get("machine").json()] == [instance["machineId"]]
    for query, count in (
        ("", 6),
        ("status=InUse", 1),
        ("status=Ready", 5),
        ("hasInstance=true", 1),
        ("hasInstance=false", 5),
        ("hasInstanceType=false", 0),
        (f"instanceTypeId={api.site.type_id}", 6),
        (f"siteId={UNKNOWN}", 0),
        ("id=chassis0-0&id=chassis0-1", 2),
    ):
        assert len(api.get(f"machine?{query}", role=VIEWER).json()) == count, query
    assert api.get("machine/nowhere", role=VIEWER).status_code == 404
    assert api.get(f"machine/{instance['machineId']}", org="rival").status_code == 404


def test_an_org_that_is_neither_provider_nor_user_sees_no_inventory(api: Any) -> None:
    api.instance(api.vpc())
    for listing in ("site", "instance/type", "machine", "allocation"):
        assert api.get(listing, org="stranger", role=VIEWER).json() == [], listing


def test_a_provider_gives_a_tenant_a_share(api: Any) -> None:
    tenant = api.get("tenant/current", org="rival").json()["id"]
    constraint = {
        "resourceType": "InstanceType",
        "resourceTypeId": api.site.type_id,
        "constraintType": "Reserved",
        "constraintValue": 2,
    }
    body = {
        "name": "share",
        "tenantId": tenant,
        "siteId": api.site.site_id,
        "allocationConstraints": [constraint],
    }
    made = api.new("allocation", body, role=ADMIN)
    assert made["allocationConstraints"][0]["constraintValue"] == 2
    assert api.get(f"allocation/{made['id']}", org="rival").status_code == 200
    assert api.get(f"allocation/{made['id']}", org="stranger").status_code == 404
    clash = api.post("allocation", body, role=ADMIN)
    assert (clash.status_code, clash.json()["data"]) == (409, {"id": made["id"]})
    assert api.post("allocation", body | {"name": "b2", "tenantId": UNKNOWN}, role=ADMIN).status_code == 400
    wrong = [constraint | {"resourceTypeId": UNKNOWN}]
    answer = api.post("allocation", body | {"name": "b3", "allocationConstraints": wrong}, role=ADMIN)
    assert (answer.status_code, answer.json()["data"]) == (400, {"resourceTypeId": UNKNOWN})
    assert api.get(f"allocation?tenantId={tenant}", role=VIEWER).json()[0]["tenantId"] == tenant


def test_an_instance_type_is_changed_and_deleted_when_nothing_uses_it(api: Any) -> None:
    body = {"name": "kind", "siteId": api.site.site_id, "labels": {"a": "b"}}
    path = f"instance/type/{api.new('instance/type', body, role=ADMIN)['id']}"
    changed = api.patch(
        path, {"name": "kin", "machineCapabilities": [{"type": "CPU", "name": "x1"}]}, role=ADMIN
    )
    assert changed.json()["name"] == "kin"
    assert changed.json()["labels"] == {"a": "b"}
    assert api.patch(path, {"name": "small-rack"}, role=ADMIN).status_code == 409
    wrong = [{"type": "CPU", "name": "x1", "deviceType": "DPU"}]
    assert api.patch(path, {"machineCapabilities": wrong}, role=ADMIN).status_code == 400
    answer = api.delete(path, role=ADMIN)
    assert (answer.status_code, answer.json()) == (202, {"message": "Deletion request was accepted"})
    assert api.get(path, role=ADMIN).status_code == 404
    used = api.delete(f"instance/type/{api.site.type_id}", role=ADMIN)
    assert (used.status_code, used.json()["message"][:10]) == (409, "6 Machines")


def test_a_machine_leaves_its_type_only_when_empty(api: Any) -> None:
    base = f"instance/type/{api.site.type_id}"
    listed = api.get(f"{base}/machine?pageSize=2", role=VIEWER)
    assert [row["machineId"] for row in listed.json()] == ["chassis0-0", "chassis0-1"]
    assert '"total":6' in listed.headers["x-pagination"]
    carrying = api.instance(api.vpc())["machineId"]
    assert api.delete(f"{base}/machine/{carrying}", role=ADMIN).status_code == 409
    assert api.delete(f"{base}/machine/nowhere", role=ADMIN).status_code == 404
    free = next(row["machineId"] for row in listed.json() if row["machineId"] != carrying)
    assert api.delete(f"{base}/machine/{free}", role=ADMIN).status_code == 202
    assert api.get(f"machine/{free}", role=VIEWER).json()["instanceTypeId"] is None
    assert [machine["id"] for machine in api.get("machine?hasInstanceType=false", role=VIEWER).json()] == [
        free
    ]


def test_the_numbers_of_a_type(api: Any) -> None:
    api.instance(api.vpc())
    api.post("machine/chassis1-2/cordon", {"reason": "dust"}, role=ADMIN)
    path = "instance/type?includeAllocationStats=true&excludeUnallocated=true"
    (kind,) = api.get(path, role=VIEWER).json()
    assert kind["allocationStats"] == {
        "assigned": 6,
        "total": 6,
        "used": 1,
        "unused": 5,
        "unusedUsable": 4,
        "maxAllocatable": 0,
    }
    assert api.get(f"instance/type?tenantId={UNKNOWN}").json() == []


def test_an_allocation_is_changed_and_taken_back_unless_it_is_used(api: Any) -> None:
    (given,) = api.get("allocation", role=VIEWER).json()
    path = f"allocation/{given['id']}"
    constraint = f"{path}/constraint/{given['allocationConstraints'][0]['id']}"
    api.instance(api.vpc())
    assert api.patch(constraint, {"constraintValue": 3}, role=ADMIN).json()["constraintValue"] == 3
    for number in range(2):
        api.instance(api.vpc(f"net {number}"), f"vm {number}")
    fewer = api.patch(constraint, {"constraintValue": 2}, role=ADMIN)
    assert fewer.status_code == 409
    assert "release Instances" in fewer.json()["data"]["nearestFix"]
    assert api.delete(path, role=ADMIN).status_code == 409
    assert api.patch(path, {"name": "share", "description": "d"}, role=ADMIN).json()["name"] == "share"
    for query in (
        f"resourceTypeId={api.site.type_id}",
        "constraintValue=3",
        f"id={given['id']}",
        "query=SHARE",
    ):
        assert len(api.get(f"allocation?{query}", role=VIEWER).json()) == 1, query
    for query in (f"resourceTypeId={UNKNOWN}", "constraintValue=4", f"id={UNKNOWN}", "status=Error"):
        assert api.get(f"allocation?{query}", role=VIEWER).json() == [], query
    for instance in api.get("instance").json():
        api.delete(f"instance/{instance['id']}")
    api.site.observe_all()
    assert api.delete(path, role=ADMIN).status_code == 202
    assert api.get("nvlink-domain").json() == []


def test_machines_by_what_they_have_and_what_they_lack(api: Any) -> None:
    api.site.observe_all()
    for query, count in (
        ("capabilityType=GPU", 6),
        ("capabilityType=CPU", 0),
        ("capabilityName=NVIDIA GB200", 6),
        ("capabilityType=GPU&capabilityName=other", 0),
        ("hwSkuDeviceType=gpu", 6),
        ("hwSkuDeviceType=cpu", 0),
        ("isMissingOnSite=true", 0),
        (f"tenantId={api.site.tenant.id}", 0),
        ("query=CHASSIS1", 3),
    ):
        assert len(api.get(f"machine?{query}", role=VIEWER).json()) == count, query
    assert api.get("machine/gpu/stats", role=VIEWER).json() == [
        {"name": "NVIDIA GB200", "gpus": 24, "machines": 6}
    ]
    assert api.get(f"machine/gpu/stats?siteId={UNKNOWN}", role=VIEWER).json() == []


def test_a_machine_that_its_controller_no_longer_lists_is_missing_and_gets_nothing(api: Any) -> None:
    api.site.observe_all()
    domain = next(iter(api.site.partitions))
    seen = api.site.observation(domain, at=api.site.tick())
    gpus = tuple(gpu for gpu in seen.gpus if gpu.slot != 0)
    short = msgspec.structs.replace(seen, gpus=gpus)
    api.site.run(records.record_observation, api.site.endpoint[domain], short, api.site.tick())
    (missing,) = api.get("machine?isMissingOnSite=true", role=VIEWER).json()
    assert (missing["id"], missing["isUsableByTenant"]) == ("chassis0-0", False)
    assert api.instance(api.vpc())["machineId"] != "chassis0-0"
    api.site.observe(domain)
    assert api.get("machine?isMissingOnSite=true", role=VIEWER).json() == []


def test_relations_and_histories_of_the_inventory(api: Any) -> None:
    provider = api.get("infrastructure-provider/current", role=VIEWER).json()["id"]
    for listing in ("site", "instance/type", "machine", "allocation"):
        found = api.get(f"{listing}?includeRelation=InfrastructureProvider", role=VIEWER).json()
        assert found[0]["infrastructureProvider"]["id"] == provider, listing
    history = api.get(f"site/{api.site.site_id}/status-history").json()
    assert [entry["status"] for entry in history] == ["Registered"]
    assert api.get(f"site/{UNKNOWN}/status-history").status_code == 404
    assert api.get(f"site?infrastructureProviderId={UNKNOWN}").json() == []
    assert api.get("site?isFlowEnabled=true").json() == []


def test_network_interfaces_are_listed_as_they_were_asked_for(api: Any) -> None:
    wanted = [{"subnetId": UNKNOWN, "isPhysical": True, "ipAddress": "10.1.2.3"}, {"vpcPrefixId": UNKNOWN}]
    made = api.instance(api.vpc(), interfaces=wanted, infinibandInterfaces=[{"device": "ib0"}])
    path = f"instance/{made['id']}"
    shown = api.get(f"{path}/interface").json()
    assert [row.get("ipAddress") for row in shown] == ["10.1.2.3", None]
    assert {row["instanceId"] for row in shown} == {made["id"]}
    assert {row["status"] for row in shown} == {"Pending"}
    assert len({row["id"] for row in shown}) == 2
    assert shown == api.get(f"{path}/interface?status=Pending").json()
    assert api.get(f"{path}/interface?status=Ready").json() == []
    assert api.get(f"{path}/infiniband-interface").json()[0]["device"] == "ib0"
    assert api.get(f"{path}/interface", org="rival").status_code == 403
    assert [instance["id"] for instance in api.get("instance?ipAddress=10.1.2.3").json()] == [made["id"]]
    assert api.get("instance?ipAddress=10.1.2.30").json() == []
    assert api.get("instance?ipAddress=here").status_code == 400


def test_the_virtualization_of_an_empty_vpc_is_kept(api: Any) -> None:
    vpc = api.vpc()
    path = f"vpc/{vpc}/virtualization"
    assert api.patch(path, {"networkVirtualizationType": "FLAT"}).status_code == 400
    changed = api.patch(path, {"networkVirtualizationType": "FNN"}).json()
    assert changed["networkVirtualizationType"] == "FNN"
    assert changed["org"] == "demo"
    api.instance(vpc)
    assert api.patch(path, {"networkVirtualizationType": "FNN"}).status_code == 400
    assert [entry["status"] for entry in api.get(f"vpc/{vpc}/status-history").json()] == ["Ready"]


def test_text_that_no_database_takes_is_refused(api: Any) -> None:
    vpc = api.vpc()
    for bad in ("a\x00b", "\ud800"):
        raw = json.dumps({"userData": {"deep": [bad]}})
        headers = {"Authorization": f"Bearer {api.token()}", "Content-Type": "application/json"}
        answer = api.client.patch(f"/v2/org/demo/nico/vpc/{vpc}", content=raw, headers=headers)
        assert answer.status_code == 400, bad
