"""Requests and expectations of clients generated from NVIDIA Infra Controller's published REST description.

Each fact was met by running such a client (docs/api.md lists them). The requests are in its exact JSON.
"""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from rackloom.carve.api.app import ROUTES, create_app
from rackloom.carve.api.auth import Role
from rackloom.carve.store.values import NAME_RULE

ADMIN = Role.PROVIDER_ADMIN
UNKNOWN = "11111111-1111-4111-8111-111111111111"
PUBLISHED_INSTANCE_STATUSES = {
    "Pending",
    "Provisioning",
    "Configuring",
    "Ready",
    "Updating",
    "Repairing",
    "Rebooting",
    "Terminating",
    "Error",
}
"""A generated client rejects a whole answer, and so a whole listing, for a status that is not here."""


def names(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()]


@pytest.fixture
def running(api: Any) -> Any:
    """An instance on the default of its VPC, as the fabric has it."""
    api.site.observe_all()
    made = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    return api.get(f"instance/{made['id']}").json()


def test_an_instance_in_the_words_of_a_generated_client(api: Any) -> None:
    partition = api.partition()
    body = {
        "name": "vm",
        "tenantId": api.get("tenant/current").json()["id"],
        "vpcId": api.vpc(),
        "instanceTypeId": api.site.type_id,
        "ipxeScript": "#!ipxe",
        "interfaces": [{"isPhysical": True}],
        "nvLinkInterfaces": [{"nvLinklogicalPartitionId": partition, "deviceInstance": 0}],
    }
    made = api.new("instance", body)
    (shown,) = made["nvLinkInterfaces"]
    assert shown["nvLinkLogicalPartitionId"] == shown["nvLinklogicalPartitionId"] == partition
    assert (made["ipxeScript"], made["interfaces"]) == ("#!ipxe", [{"isPhysical": True}])
    kept = api.patch(f"instance/{made['id']}", {"description": None, "triggerReboot": None, "name": "other"})
    assert (kept.status_code, kept.json()["name"]) == (200, "other")
    ended = api.call("DELETE", f"instance/{made['id']}", {})
    assert (ended.status_code, ended.json()) == (202, {"message": "Deletion request was accepted"})


def test_an_unobservable_instance_keeps_to_the_published_statuses(api: Any, running: Any) -> None:
    domain = running["nvLinkInterfaces"][0]["nvLinkDomainId"]
    assert running["unknownSince"] is None
    api.delete(f"nvlink-nmxc-endpoint/CHASSIS{list(api.site.partitions).index(domain)}", role=ADMIN)
    now = api.get(f"instance/{running['id']}").json()
    assert now["status"] in PUBLISHED_INSTANCE_STATUSES
    assert now["status"] != "Ready"
    assert now["unknownSince"] == now["statusHistory"][0]["created"]
    assert now["statusHistory"][0]["status"] == "Unknown"
    for status in (now["status"], "Unknown"):
        assert names(api.get(f"instance?status={status}")) == [running["name"]]
    assert names(api.get("instance?status=Ready")) == []
    summary = api.get("nvlink-interface?includeRelation=Instance").json()[0]["instance"]
    assert summary["status"] == now["status"]


@pytest.mark.parametrize("kind", ["subnet", "vpc-prefix"])
def test_a_client_that_looks_for_networks_at_its_start_finds_none(api: Any, kind: str) -> None:
    answer = api.get(f"{kind}?siteId={api.site.site_id}&vpcId={UNKNOWN}&pageSize=100")
    assert (answer.status_code, answer.json()) == (200, [])
    assert '"total":0' in answer.headers["x-pagination"]


def test_filters_may_be_repeated(api: Any) -> None:
    site, kind = api.site.site_id, api.site.type_id
    first, two = api.vpc("one"), api.vpc("two")
    api.instance(first, "first")
    api.instance(two, "second")
    assert names(api.get(f"instance?vpcId={first}&vpcId={two}&status=Pending&status=Provisioning")) == [
        "first",
        "second",
    ]
    assert names(api.get(f"instance?vpcId={first}&vpcId={UNKNOWN}")) == ["first"]
    assert names(api.get(f"instance?instanceTypeId={UNKNOWN}&instanceTypeId={kind}")) == ["first", "second"]
    assert names(api.get(f"vpc?siteId={UNKNOWN}&siteId={site}&status=Ready&status=Error")) == ["one", "two"]
    assert names(api.get("site?status=Pending&status=Registered")) == names(api.get("site"))
    both = api.get("machine?id=chassis0-0&id=chassis0-1&status=Ready&status=InUse", role=ADMIN).json()
    assert [machine["id"] for machine in both] == ["chassis0-0", "chassis0-1"]
    wanted = "constraintType=OnDemand&constraintType=Reserved&resourceType=IPBlock"
    assert api.get(f"allocation?{wanted}").json() == []
    assert api.get(f"allocation?{wanted}&resourceType=InstanceType&siteId={site}").json() != []


ORDERS = {
    "site": ("LOCATION", "CONTACT", "DESCRIPTION"),
    "machine": ("ID", "STATUS"),
    "instance": (
        "MACHINE_ID",
        "TENANT_ORG_DISPLAY_NAME",
        "INSTANCE_TYPE_NAME",
        "HAS_INFINIBAND",
        "NETWORK_SECURITY_GROUP_NAME",
    ),
    "allocation": (
        "SITE_NAME",
        "TENANT_ORG_DISPLAY_NAME",
        "INSTANCE_TYPE_NAME",
        "IP_BLOCK_NAME",
        "CONSTRAINT_VALUE",
    ),
}


@pytest.mark.parametrize("direction", ["ASC", "DESC"])
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in ORDERS for field in ORDERS[kind]])
def test_every_published_order_is_known(api: Any, kind: str, field: str, direction: str) -> None:
    answer = api.get(f"{kind}?orderBy={field}_{direction}")
    assert answer.status_code == 200, answer.text


def test_orders_by_what_is_joined(api: Any, running: Any) -> None:
    vpc = running["vpcId"]
    group, infiniband = {"networkSecurityGroupId": UNKNOWN}, {"infinibandInterfaces": [{"device": "x"}]}
    api.instance(vpc, "grouped", **group)
    api.instance(vpc, "fast", **infiniband)
    assert names(api.get("instance?orderBy=HAS_INFINIBAND_DESC"))[0] == "fast"
    assert names(api.get("instance?orderBy=NETWORK_SECURITY_GROUP_NAME_DESC"))[-1] != "grouped"
    ids = [machine["id"] for machine in api.get("machine?orderBy=ID_DESC", role=ADMIN).json()]
    assert ids == sorted(ids, reverse=True)
    past = api.get(f"instance/{running['id']}/status-history").json()
    turned = api.get(f"instance/{running['id']}/status-history?orderBy=CREATED_ASC").json()
    assert sorted(entry["created"] for entry in past) == [entry["created"] for entry in turned]
    refused = api.get(f"instance/{running['id']}/status-history?orderBy=NAME_ASC")
    assert (refused.status_code, list(refused.json()["data"])) == (400, ["orderBy"])


@pytest.mark.parametrize(
    ("path", "relation", "field"),
    [
        ("instance", "InfrastructureProvider", "infrastructureProvider"),
        ("instance", "VPC", "vpc"),
        ("instance", "Machine", "machine"),
        ("instance", "InstanceType", "instanceType"),
        ("instance", "OperatingSystem", None),
        ("instance", "NetworkSecurityGroup", None),
        ("instance", "Allocation", None),
        ("vpc", "InfrastructureProvider", None),
        ("vpc", "NetworkSecurityGroup", None),
        ("vpc", "Tenant", "tenant"),
    ],
)
def test_every_published_relation_is_known(
    api: Any, running: Any, path: str, relation: str, field: str | None
) -> None:
    (shown,) = api.get(f"{path}?includeRelation={relation}").json()
    assert set(shown) - set(api.get(path).json()[0]) == ({field} if field else set())
    assert api.get(f"{path}/{shown['id']}?includeRelation={relation}").json() == shown


def test_what_a_provider_says_of_its_site_is_kept(api: Any) -> None:
    path = f"site/{api.site.site_id}"
    texts = {
        "name": "sjc04",
        "description": "Datacenter 4",
        "serialConsoleHostname": "console.example",
        "isSerialConsoleEnabled": False,
        "serialConsoleIdleTimeout": 60,
        "serialConsoleMaxSessionLength": 600,
        "isSerialConsoleSSHKeysEnabled": True,
        "location": {"city": "San Jose", "state": "CA", "country": "USA"},
        "contact": {"email": "ops@example.com"},
    }
    before = api.get(path).json()
    answer = api.patch(path, {**texts, "renewRegistrationToken": False}, role=ADMIN)
    assert answer.status_code == 200, answer.text
    assert {name: answer.json()[name] for name in texts} == texts
    assert answer.json()["capabilities"] == before["capabilities"]
    moved = api.patch(path, {"location": {"city": "Zug"}, "name": None}, role=ADMIN).json()
    assert (moved["location"], moved["name"]) == ({"city": "Zug"}, "sjc04")
    assert api.get(path).json() == moved
    renewed = api.patch(path, {"renewRegistrationToken": True}, role=ADMIN)
    assert renewed.status_code == 400
    assert "renewRegistrationToken must be false" in renewed.json()["data"]["body"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "", None]
)
def test_a_body_of_another_kind_is_told_so(api: Any, kind: str | None) -> None:
    headers = {"Authorization": f"Bearer {api.token()}"} | ({} if kind is None else {"Content-Type": kind})
    answer = api.client.post("/v2/org/demo/nico/vpc", content=b'{"name": "net"}', headers=headers)
    assert answer.status_code == 415
    assert answer.json()["message"] == (
        "Request body is not JSON: send it with Content-Type: application/json"
    )


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/merge-patch+json"])
def test_json_by_any_of_its_names_is_read(api: Any, kind: str) -> None:
    headers = {"Authorization": f"Bearer {api.token()}", "Content-Type": kind}
    answer = api.client.patch(f"/v2/org/demo/nico/vpc/{api.vpc()}", content=b"{}", headers=headers)
    assert answer.status_code == 200


def test_a_request_without_a_body_needs_no_kind(api: Any) -> None:
    assert api.delete(f"vpc/{api.vpc()}").status_code == 202


@pytest.mark.parametrize("name", ["   ", " left", "right ", "tab\tinside", "line\n", "\u2003wide"])
@pytest.mark.parametrize("kind", ["vpc", "nvlink-logical-partition"])
def test_a_name_begins_and_ends_with_something_to_see(api: Any, kind: str, name: str) -> None:
    answer = api.post(kind, {"name": name, "siteId": api.site.site_id})
    assert (answer.status_code, answer.json()["data"]) == (
        400,
        {"name": NAME_RULE},
    )


def test_the_fix_of_a_refused_deletion_can_be_done(api: Any, running: Any) -> None:
    partition = running["nvLinkInterfaces"][0]["nvLinkLogicalPartitionId"]
    path, vpc = f"nvlink-logical-partition/{partition}", f"vpc/{running['vpcId']}"
    clear = 'send "nvLinkLogicalPartitionId": "" in a PATCH of each of these VPCs'
    busy = api.delete(path).json()["data"]["nearestFix"]
    assert busy == f"release Instances {running['id']}, then {clear}"
    held = api.patch(vpc, {"nvLinkLogicalPartitionId": ""})
    assert held.status_code == 403
    assert held.json()["data"]["nearestFix"] == f"release Instances {running['id']} first"
    assert api.patch(vpc, {"nvLinkLogicalPartitionId": None}).json()["nvLinkLogicalPartitionId"] == partition
    assert api.delete(f"instance/{running['id']}").status_code == 202
    api.site.converge()
    assert api.delete(path).json()["data"]["nearestFix"] == clear
    assert api.patch(vpc, {"nvLinkLogicalPartitionId": ""}).status_code == 200
    assert api.delete(path).status_code == 202


@pytest.mark.slow
def test_many_applications_share_one_table_of_routes(api: Any) -> None:
    before = len(ROUTES)
    for _ in range(3):
        another = TestClient(create_app(api.client.app.state.deps))
        assert another.get("/openapi.json").status_code == 200
    assert len(ROUTES) == before


def test_a_client_that_keeps_whole_objects_sends_back_what_it_read(api: Any, running: Any) -> None:
    """Terraform patches with every field of its state, of which one was changed."""
    api.woken.clear()
    specs = [
        {key: interface[key] for key in ("nvLinkLogicalPartitionId", "deviceInstance")}
        for interface in running["nvLinkInterfaces"]
    ]
    kept = ("name", "labels", "sshKeyGroupIds", "alwaysBootWithCustomIpxe", "phoneHomeEnabled")
    body = {key: running[key] for key in kept} | {"description": "new", "nvLinkInterfaces": specs}
    after = api.patch(f"instance/{running['id']}", body)
    assert after.status_code == 200, after.text
    assert (after.json()["description"], after.json()["status"]) == ("new", "Ready")
    assert after.json()["nvLinkInterfaces"] == running["nvLinkInterfaces"]
    assert set().union(*api.woken) == set()
    fewer = api.patch(f"instance/{running['id']}", {"nvLinkInterfaces": specs[1:]})
    assert fewer.status_code == 400

    vpc = api.get(f"vpc/{running['vpcId']}").json()
    same = {"name": vpc["name"], "description": "new", "labels": {"team": "a"}}
    same |= {"nvLinkLogicalPartitionId": vpc["nvLinkLogicalPartitionId"], "networkSecurityGroupId": ""}
    after = api.patch(f"vpc/{vpc['id']}", same)
    assert (after.status_code, after.json()["labels"]) == (200, {"team": "a"})

    path = f"instance/type/{api.site.type_id}"
    kind = api.get(path, role=ADMIN).json()
    same = {key: kind[key] for key in ("name", "labels", "machineCapabilities")} | {"description": "new"}
    after = api.patch(path, same, role=ADMIN)
    assert (after.status_code, after.json()["description"]) == (200, "new")

    path = f"nvlink-logical-partition/{specs[0]['nvLinkLogicalPartitionId']}"
    after = api.patch(path, {"name": api.get(path).json()["name"], "description": "new"})
    assert (after.status_code, after.json()["description"]) == (200, "new")


def test_a_client_that_reads_every_answer_as_an_object_deletes_and_lists(api: Any, running: Any) -> None:
    """Terraform parses the answer to a deletion, takes 404 as gone, and reads `total` of each page."""
    partition = running["nvLinkInterfaces"][0]["nvLinkLogicalPartitionId"]
    for path in (
        f"instance/{running['id']}",
        f"vpc/{running['vpcId']}",
        f"nvlink-logical-partition/{partition}",
    ):
        kind = path.split("/")[0]
        listed = api.get(f"{kind}?pageNumber=1&pageSize=100")
        assert len(listed.json()) == json.loads(listed.headers["X-Pagination"])["total"]
        gone = api.delete(path)
        assert gone.status_code == 202
        assert isinstance(gone.json(), dict), gone.text
        api.site.converge()
        assert api.get(path).status_code == 404
    # Its creations go to a path that only lists: 404 would be taken as a creation without an id.
    assert api.post("nvlink-interface", {"name": "created"}).status_code == 405
