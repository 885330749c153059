"""Instances: the rules of NVLink interfaces, placement, change and release, over the real application."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.partitions.status_rules import WAITING_REASON

BOTH_STORES = True

UNKNOWN = "11111111-1111-4111-8111-111111111111"


def spec(partition: str, device: int, key: str = "nvLinkLogicalPartitionId") -> dict[str, Any]:
    return {key: partition, "deviceInstance": device}


def refused(api: Any, status: int, **fields: Any) -> Any:
    body = {"name": "vm", "instanceTypeId": api.site.type_id, **fields}
    answer = api.post("instance", body)
    assert answer.status_code == status, answer.text
    assert api.get("instance").json() == []
    return answer.json()


@pytest.mark.slow
def test_network_and_system_fields_are_kept_and_returned(api: Any) -> None:
    extra = {
        "operatingSystemId": UNKNOWN,
        "ipxeScript": "#!ipxe",
        "interfaces": [{"subnetId": UNKNOWN, "isPhysical": True}],
        "labels": {"a": "b"},
        "sshKeyGroupIds": [UNKNOWN],
        "somethingNew": {"deep": [1, 2.5, None]},
    }
    made = api.instance(api.vpc(), **extra)
    assert {key: made[key] for key in extra} == extra
    assert made["nvLinkInterfaces"] == []
    assert made["status"] == "Pending"
    assert made["infrastructureProviderId"]
    assert "NVLink domain is not yet observed" in made["placementReason"]
    changed = api.patch(f"instance/{made['id']}", {"userData": "x", "labels": {}}).json()
    assert (changed["userData"], changed["labels"], changed["ipxeScript"]) == ("x", {}, "#!ipxe")
    assert [row["id"] for row in api.get(f"instance?operatingSystemId={UNKNOWN}").json()] == [made["id"]]
    assert api.get(f"instance?networkSecurityGroupId={UNKNOWN}").json() == []


def test_the_default_of_the_vpc_fills_in_every_gpu(api: Any) -> None:
    partition = api.partition()
    made = api.instance(api.vpc(partition=partition))
    assert [(interface["deviceInstance"], interface["status"]) for interface in made["nvLinkInterfaces"]] == [
        (device, "Pending") for device in range(4)
    ]
    assert {interface["nvLinkLogicalPartitionId"] for interface in made["nvLinkInterfaces"]} == {partition}
    assert all(interface["statusMessage"] for interface in made["nvLinkInterfaces"])


def test_an_empty_list_asks_for_no_interfaces_even_with_a_default(api: Any) -> None:
    assert api.instance(api.vpc(partition=api.partition()), nvLinkInterfaces=[])["nvLinkInterfaces"] == []


@pytest.mark.parametrize("key", ["nvLinkLogicalPartitionId", "nvLinklogicalPartitionId"])
def test_both_spellings_are_read_and_shown(api: Any, key: str) -> None:
    partition = api.partition()
    made = api.instance(api.vpc(), nvLinkInterfaces=[spec(partition, 2, key)])
    (shown,) = made["nvLinkInterfaces"]
    assert shown["nvLinkLogicalPartitionId"] == shown["nvLinklogicalPartitionId"] == partition


def test_spellings_that_contradict_each_other_are_refused(api: Any) -> None:
    both = spec(api.partition(), 0) | {"nvLinklogicalPartitionId": UNKNOWN}
    assert "nvLinkInterfaces.0" in refused(api, 400, vpcId=api.vpc(), nvLinkInterfaces=[both])["data"]


def test_different_gpus_may_join_different_partitions(api: Any) -> None:
    first, second = api.partition("first"), api.partition("second")
    made = api.instance(api.vpc(), nvLinkInterfaces=[spec(first, 0), spec(second, 3)])
    assert [interface["nvLinkLogicalPartitionId"] for interface in made["nvLinkInterfaces"]] == [
        first,
        second,
    ]


@pytest.mark.parametrize("devices", [[4], [-1], [0, 0], [10**30], [0, 1, 2, 3, 0]])
def test_devices_are_within_the_machine_and_unique(api: Any, devices: list[int]) -> None:
    partition = api.partition()
    answer = refused(
        api, 400, vpcId=api.vpc(), nvLinkInterfaces=[spec(partition, device) for device in devices]
    )
    assert "deviceInstance must be" in answer["message"]


@pytest.mark.parametrize("device", ["0", 1.5, None, True])
def test_a_device_is_a_number(api: Any, device: Any) -> None:
    answer = refused(api, 400, vpcId=api.vpc(), nvLinkInterfaces=[spec(api.partition(), device)])
    assert list(answer["data"]) == ["nvLinkInterfaces.0.deviceInstance"]


def test_interfaces_must_agree_with_the_default_of_the_vpc(api: Any) -> None:
    partition, other = api.partition(), api.partition("other")
    answer = refused(api, 400, vpcId=api.vpc(partition=partition), nvLinkInterfaces=[spec(other, 0)])
    assert "does not match NVLink Logical Partition of VPC" in answer["message"]


def test_interfaces_must_name_a_ready_partition_of_the_tenant(api: Any) -> None:
    vpc = api.vpc()
    theirs = api.partition("theirs", org="rival")
    for partition in (UNKNOWN, theirs):
        answer = refused(api, 400, vpcId=vpc, nvLinkInterfaces=[spec(partition, 0)])
        assert answer["message"] == f"Could not find NVLink Logical Partition {partition} of Tenant"


def test_a_type_without_nvlink_gpus_has_no_interfaces(api: Any) -> None:
    partition = api.partition()
    api.site.run(lambda conn: conn.execute(sa.update(schema.instance_type).values(capabilities=[])))
    refused(api, 400, vpcId=api.vpc(), nvLinkInterfaces=[spec(partition, 0)])
    assert api.instance(api.vpc("default", partition))["nvLinkInterfaces"] == []


def test_references_must_be_the_callers(api: Any) -> None:
    theirs = api.vpc("theirs", org="rival")
    refused(api, 400, vpcId=theirs)
    refused(api, 400, vpcId=UNKNOWN)
    refused(api, 400, vpcId=api.vpc(), instanceTypeId=UNKNOWN)
    refused(api, 400, vpcId=api.vpc("net b"), instanceTypeId=None)
    refused(api, 400, vpcId=api.vpc("net c"), machineId="both")


def test_a_chosen_machine_needs_the_capability(api: Any) -> None:
    theirs = api.vpc(org="rival")
    wanted = {"name": "vm", "vpcId": theirs, "machineId": "chassis0-1"}
    assert api.post("instance", wanted, org="rival").status_code == 403
    vpc = api.vpc()
    refused(api, 400, vpcId=vpc, instanceTypeId=None, machineId="nowhere")
    made = api.new("instance", {"name": "vm", "vpcId": vpc, "machineId": "chassis0-1"})
    assert made["machineId"] == "chassis0-1"
    again = api.post("instance", {"name": "vm2", "vpcId": vpc, "machineId": "chassis0-1"})
    assert again.status_code == 409


def test_names_are_unique_at_the_site(api: Any) -> None:
    vpc = api.vpc()
    made = api.instance(vpc, "same")
    clash = api.post("instance", {"name": "same", "vpcId": vpc, "instanceTypeId": api.site.type_id})
    assert (clash.status_code, clash.json()["data"]) == (409, {"id": made["id"]})
    other = api.instance(vpc, "other")
    assert api.patch(f"instance/{other['id']}", {"name": "same"}).status_code == 409


def test_quota_and_room_are_different_refusals(api: Any) -> None:
    vpc = api.vpc()
    api.site.run(lambda conn: conn.execute(sa.update(schema.allocation_constraint).values(value=1)))
    api.instance(vpc, "first")
    body = {"name": "second", "vpcId": vpc, "instanceTypeId": api.site.type_id}
    answer = api.post("instance", body)
    assert answer.status_code == 403
    assert answer.json()["message"].endswith("Current: 1, Requested: 1, Max: 1")
    api.site.run(lambda conn: conn.execute(sa.update(schema.allocation_constraint).values(value=99)))
    api.site.run(lambda conn: conn.execute(sa.update(schema.machine).values(status="Maintenance")))
    answer = api.post("instance", body)
    assert (answer.status_code, answer.json()["message"]) == (
        409,
        "Insufficient machines available: requested 1, available 0",
    )


def test_new_instances_come_near_the_members_of_their_partition(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    first = api.instance(vpc, "first")
    second = api.instance(vpc, "second")
    domain = first["nvLinkInterfaces"][0]["nvLinkDomainId"]
    assert second["nvLinkInterfaces"][0]["nvLinkDomainId"] == domain
    assert second["placementReason"] == (
        f"in NVLink domain {domain}: it already holds 4 GPUs of the logical partition (1 free machines left)"
    )


def test_sick_machines_are_passed_over_unless_allowed(api: Any) -> None:
    for domain in api.site.partitions:
        for slot in range(3):
            api.site.health[api.site.guid(domain, slot, 1)] = GpuHealth.NO_NVLINK
    api.site.observe_all()
    vpc = api.vpc()
    refused(api, 409, vpcId=vpc)
    assert api.instance(vpc, allowUnhealthyMachine=True)["machineId"]


def test_a_list_of_interfaces_replaces_the_whole(api: Any) -> None:
    api.site.observe_all()
    first, second = api.partition("first"), api.partition("second")
    instance = api.instance(api.vpc(), nvLinkInterfaces=[spec(first, 0), spec(first, 1)])
    api.site.converge()
    body = {"nvLinkInterfaces": [spec(first, 0), spec(second, 1)]}
    changed = api.patch(f"instance/{instance['id']}", body).json()
    assert changed["status"] == "Configuring"
    assert changed["isUpdatePending"] is True
    rows = [(row["deviceInstance"], row["status"]) for row in changed["nvLinkInterfaces"]]
    assert sorted(rows) == [(0, "Ready"), (1, "Deleting"), (1, "Pending")]
    assert len(api.woken[-1]) == 1
    api.site.converge()
    settled = api.get(f"instance/{instance['id']}").json()
    assert settled["status"] == "Ready"
    assert settled["isUpdatePending"] is False
    assert [row["nvLinkLogicalPartitionId"] for row in settled["nvLinkInterfaces"]] == [first, second]


def test_an_empty_list_detaches_every_gpu(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    instance = api.instance(api.vpc(), nvLinkInterfaces=[spec(partition, 0), spec(partition, 1)])
    api.site.converge()
    changed = api.patch(f"instance/{instance['id']}", {"nvLinkInterfaces": []}).json()
    assert {row["status"] for row in changed["nvLinkInterfaces"]} == {"Deleting"}
    api.site.converge()
    settled = api.get(f"instance/{instance['id']}").json()
    assert (settled["status"], settled["nvLinkInterfaces"]) == ("Ready", [])


def test_interfaces_under_a_default_are_fixed_once_there(api: Any) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    instance = api.instance(vpc)
    for specs in ([], [spec(partition, 0)]):
        answer = api.patch(f"instance/{instance['id']}", {"nvLinkInterfaces": specs})
        assert answer.status_code == 400
        assert answer.json()["message"].startswith("Cannot update NVLink Interfaces if VPC has default")
    bare = api.instance(vpc, "bare", nvLinkInterfaces=[])
    answer = api.patch(f"instance/{bare['id']}", {"nvLinkInterfaces": [spec(partition, 0)]})
    assert answer.status_code == 200


def test_a_bad_change_changes_nothing(api: Any) -> None:
    partition = api.partition()
    instance = api.instance(api.vpc(), nvLinkInterfaces=[spec(partition, 0)])
    before = api.get(f"instance/{instance['id']}").json()
    body = {"name": "renamed", "nvLinkInterfaces": [spec(UNKNOWN, 0)]}
    assert api.patch(f"instance/{instance['id']}", body).status_code == 400
    assert api.get(f"instance/{instance['id']}").json() == before


def test_a_terminating_instance_takes_no_changes_and_may_be_deleted_again(api: Any) -> None:
    api.site.observe_all()
    instance = api.instance(api.vpc())
    assert api.delete(f"instance/{instance['id']}").status_code == 202
    assert api.patch(f"instance/{instance['id']}", {"name": "late"}).status_code == 409
    assert api.delete(f"instance/{instance['id']}").status_code == 202


def test_a_terminating_instance_claims_nothing_of_its_gpus(api: Any) -> None:
    api.site.observe_all()
    instance = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    assert api.delete(f"instance/{instance['id']}").status_code == 202
    shown = api.get(f"instance/{instance['id']}").json()["nvLinkInterfaces"]
    assert {row["status"] for row in shown} == {"Deleting"}
    assert {row["statusMessage"] for row in shown} == {WAITING_REASON}
    api.site.observe_all()
    shown = api.get(f"instance/{instance['id']}").json()["nvLinkInterfaces"]
    (name,) = {name for held in api.site.partitions.values() for name in held}
    assert {(row["status"], row["statusMessage"]) for row in shown} == {
        ("Deleting", f"the GPU is still in partition {name}")
    }
    domain = shown[0]["nvLinkDomainId"]
    api.site.lose(domain, "no route")
    shown = api.get(f"instance/{instance['id']}").json()["nvLinkInterfaces"]
    assert all(latest.UNREADABLE_REASON in row["statusMessage"] for row in shown)
    api.site.converge()
    assert api.get(f"instance/{instance['id']}").status_code == 404


def test_the_history_is_paged_newest_first(api: Any) -> None:
    api.site.observe_all()
    instance = api.instance(api.vpc())
    api.site.converge()
    answer = api.get(f"instance/{instance['id']}/status-history?pageSize=1")
    assert [entry["status"] for entry in answer.json()] == ["Ready"]
    assert '"total":3' in answer.headers["x-pagination"]


def test_instances_are_listed_by_every_filter(api: Any) -> None:
    api.site.observe_all()
    vpc = api.vpc()
    first, two = api.instance(vpc, "vm one"), api.instance(api.vpc("net b"), "vm two")
    for query in (
        f"vpcId={vpc}",
        f"machineId={first['machineId']}",
        "name=vm one",
        "query=ONE",
    ):
        assert [found["id"] for found in api.get(f"instance?{query}").json()] == [first["id"]], query
    both = {first["id"], two["id"]}
    for query in (
        f"siteId={api.site.site_id}",
        f"instanceTypeId={api.site.type_id}",
        f"infrastructureProviderId={first['infrastructureProviderId']}",
        "status=Provisioning",
    ):
        assert {found["id"] for found in api.get(f"instance?{query}").json()} == both, query
    related = api.get("instance?includeRelation=Vpc&includeRelation=InstanceType&orderBy=NAME_ASC").json()
    assert [found["vpc"]["name"] for found in related] == ["net", "net b"]
    assert related[0]["instanceType"]["name"] == "small-rack"


def batch(api: Any, vpc: str, count: Any, query: str = "", **fields: Any) -> Any:
    body = {"namePrefix": "job", "count": count, "vpcId": vpc, "instanceTypeId": api.site.type_id}
    return api.post(f"instance/batch{query}", {**body, **fields})


def test_a_batch_is_in_one_domain_and_named_after_its_prefix(api: Any) -> None:
    api.site.observe_all()
    made = batch(api, api.vpc(partition=api.partition()), 3).json()
    assert len({instance["nvLinkInterfaces"][0]["nvLinkDomainId"] for instance in made}) == 1
    prefixes = {instance["name"].rpartition("-")[0] for instance in made}
    assert len(prefixes) == 1
    assert [instance["name"].rpartition("-")[2] for instance in made] == ["1", "2", "3"]


@pytest.mark.parametrize("query", ["", "?dryRun=true"])
def test_a_batch_names_no_single_address(api: Any, query: str) -> None:
    """One address cannot serve several instances."""
    api.site.observe_all()
    named = [{"subnetId": "s"}, {"subnetId": "t", "ipAddress": "10.0.0.7"}]
    refused = batch(api, api.vpc(), 2, query, interfaces=named)
    assert refused.status_code == 400
    assert "ipAddress" in refused.text
    assert api.get("instance").json() == []


def test_a_batch_may_send_interfaces_without_an_address(api: Any) -> None:
    api.site.observe_all()
    unnamed = [{"subnetId": "s", "ipAddress": None}, {"subnetId": "t"}]
    assert batch(api, api.vpc(), 2, interfaces=unnamed).status_code == 201


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 0, -1, 4, 10**9])
def test_a_batch_is_at_most_the_largest_domain(api: Any, count: int) -> None:
    api.site.observe_all()
    answer = batch(api, api.vpc(), count)
    assert (answer.status_code, answer.json()["data"]) == (400, {"count": "must be between 2 and 3"})


def test_a_batch_is_all_or_nothing_and_names_the_fix(api: Any) -> None:
    api.site.observe_all()
    vpc = api.vpc()
    for number in range(4):
        api.instance(vpc, f"vm {number}")
    api.site.run(lambda conn: conn.execute(sa.update(schema.allocation_constraint).values(value=99)))
    answer = batch(api, vpc, 3)
    assert answer.status_code == 409
    assert answer.json()["message"] == "Insufficient machines available: requested 3, available 2"
    assert len(api.get("instance").json()) == 4


def test_a_batch_that_fits_no_domain_says_so_and_spreads_when_allowed(api: Any) -> None:
    api.site.observe_all()
    vpc, anchored = api.vpc(), {}
    for number in range(2):
        instance = api.instance(vpc, f"vm {number}")
        anchored[instance["id"]] = instance
    api.site.run(
        lambda conn: conn.execute(
            sa.update(schema.machine).where(schema.machine.c.id == "chassis1-0").values(status="Maintenance")
        )
    )
    answer = batch(api, vpc, 3)
    assert answer.status_code == 409
    assert answer.json()["message"] == (
        "Topology optimization requires all 3 machines on same NVLink domain,"
        " but best domain only has 2 available"
    )
    assert "topologyOptimized" in answer.json()["data"]["nearestFix"]
    spread = batch(api, vpc, 3, topologyOptimized=False)
    assert spread.status_code == 201
    assert "no memory shared" in spread.json()[0]["placementReason"]


def test_a_batch_beyond_the_quota_makes_nothing(api: Any) -> None:
    api.site.observe_all()
    api.site.run(lambda conn: conn.execute(sa.update(schema.allocation_constraint).values(value=2)))
    answer = batch(api, api.vpc(), 3)
    assert answer.status_code == 403
    assert answer.json()["message"].endswith("Current: 0, Requested: 3, Max: 2")
    assert api.get("instance").json() == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", '[[[1, {"deep": 1e999}]]]'])
def test_a_number_that_no_database_keeps_is_refused(api: Any, number: str) -> None:
    """PostgreSQL takes no Infinity for JSON, and no client would read it."""
    api.site.observe_all()
    body = (
        f'{{"name": "vm", "vpcId": "{api.vpc()}", "instanceTypeId": "{api.site.type_id}", "kept": {number}}}'
    )
    headers = {"Authorization": f"Bearer {api.token()}", "content-type": "application/json"}
    answer = api.client.post("/v2/org/demo/nico/instance", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert api.get("instance").json() == []
