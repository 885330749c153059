"""Sites, instance types, machines, allocations, and who the caller is."""

from typing import Any

import pytest

from rackloom.carve.api.auth import Role

BOTH_STORES = True

UNKNOWN = "11111111-1111-4111-8111-111111111111"
ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


def test_who_am_i(api: Any) -> None:
    assert api.get("metadata").json()["version"]
    tenant = api.get("tenant/current").json()
    assert (tenant["org"], tenant["capabilities"]) == ("demo", {"targetedInstanceCreation": False})
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
    assert [one["name"] for one in sites] == ["small"]
    (given,) = api.get("allocation", org="newcomer").json()
    assert [one["constraintValue"] for one in given["allocationConstraints"]] == [6]
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
    (found,) = api.get("instance/type?includeMachineAssignment=true").json()
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
    assert [one["machineId"] for one in same.json()] == ["chassis0-0"]
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
    one = api.instance(api.vpc())
    assert [found["id"] for found in api.get("machine").json()] == [one["machineId"]]
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
    assert api.get(f"machine/{one['machineId']}", org="rival").status_code == 404


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
