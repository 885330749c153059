"""Where new instances go: dry runs, one domain, warnings, racks, and the room that is left."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.api.auth import Role
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import GpuHealth

ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


@pytest.fixture(autouse=True)
def observed(api: Any) -> None:
    api.site.observe_all()


def body(api: Any, vpc: str, **fields: Any) -> dict[str, Any]:
    return {"name": "vm", "vpcId": vpc, "instanceTypeId": api.site.type_id, **fields}


def batch(api: Any, vpc: str, count: int, **fields: Any) -> dict[str, Any]:
    made = body(api, vpc, namePrefix="job", count=count, **fields)
    del made["name"]
    return made


def fill(api: Any, vpc: str, count: int, tag: str = "filler") -> list[Any]:
    return [api.instance(vpc, f"{tag} {number}") for number in range(count)]


@pytest.mark.parametrize("count", [None, 3])
def test_a_dry_run_says_what_would_be_made_and_makes_nothing(api: Any, count: int | None) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    path, wanted = ("instance", body(api, vpc)) if count is None else ("instance/batch", batch(api, vpc, 3))
    woken = len(api.woken)
    answer = api.post(f"{path}?dryRun=true", wanted)
    assert answer.status_code == 200
    plan = answer.json()
    assert plan["dryRun"] is True
    assert "tightest fit" in plan["reason"]
    assert len(plan["nvLinkDomainIds"]) == 1
    assert [len(instance["nvLinkInterfaces"]) for instance in plan["instances"]] == [4] * (count or 1)
    assert api.get("instance").json() == []
    assert len(api.woken) == woken
    made = api.new(path, wanted)
    made = [made] if count is None else made
    assert [instance["machineId"] for instance in made] == [
        instance["machineId"] for instance in plan["instances"]
    ]


def test_a_dry_run_refuses_what_would_be_refused(api: Any) -> None:
    answer = api.post("instance/batch?dryRun=true", batch(api, api.vpc(), 4))
    assert (answer.status_code, answer.json()["data"]) == (400, {"count": "must be between 2 and 3"})


def test_new_members_land_where_the_partition_lives_when_required(api: Any) -> None:
    partition = api.partition()
    vpc, plain = api.vpc(partition=partition), api.vpc("plain")
    home = api.instance(vpc)["nvLinkInterfaces"][0]["nvLinkDomainId"]
    near = api.new("instance", body(api, vpc, name="near", requireSameDomain=True))
    assert near["nvLinkInterfaces"][0]["nvLinkDomainId"] == home
    refused = api.post("instance/batch", batch(api, vpc, 2, requireSameDomain=True))
    assert refused.status_code == 409
    assert (
        f"NVLink domain {home}, where the logical partition lives, has 1 free machines of 2"
        in (refused.json()["message"])
    )
    assert refused.json()["data"]["nearestFix"].startswith("set requireSameDomain to false")
    assert api.post("instance/batch", batch(api, vpc, 2, requireSameDomain=False)).status_code == 201
    assert len(fill(api, plain, 2)) == 2


def test_a_full_home_is_not_left_when_the_same_domain_is_required(api: Any) -> None:
    vpc = api.vpc(partition=api.partition())
    (home,) = {instance["nvLinkInterfaces"][0]["nvLinkDomainId"] for instance in fill(api, vpc, 3)}
    refused = api.post("instance", body(api, vpc, requireSameDomain=True))
    assert refused.status_code == 409
    assert f"NVLink domain {home}, where the logical partition lives, has 0 free" in refused.json()["message"]


def test_a_partition_that_spans_domains_is_warned_about(api: Any) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    inside = fill(api, vpc, 3)
    assert [instance["warnings"] for instance in inside] == [[], [], []]
    plan = api.post("instance?dryRun=true", body(api, vpc)).json()
    spilled = api.new("instance", body(api, vpc))
    assert plan["warnings"] == spilled["warnings"]
    assert [warning["type"] for warning in spilled["warnings"]] == ["LogicalPartitionSpansDomains"]
    assert "share no memory" in spilled["warnings"][0]["message"]
    api.site.converge()
    # The spill is a second physical partition in another rack. Both are whole.
    owned = api.get(f"nvlink-partition?nvLinkLogicalPartitionId={partition}", role=VIEWER).json()
    assert sorted(len(partition["gpuGuids"]) for partition in owned) == [4, 12]
    assert {instance["status"] for instance in api.get("instance").json()} == {"Ready"}


def test_a_split_tray_is_warned_about(api: Any) -> None:
    first, second = api.partition("first"), api.partition("second")

    def specs(*partitions: str) -> list[dict[str, Any]]:
        return [
            {"nvLinkLogicalPartitionId": partition, "deviceInstance": device}
            for device, partition in enumerate(partitions)
        ]

    made = api.instance(api.vpc(), nvLinkInterfaces=specs(first, first, first, first))
    assert made["warnings"] == []
    for wanted in (specs(first, second, first, first), specs(first, first)):
        changed = api.patch(f"instance/{made['id']}", {"nvLinkInterfaces": wanted}).json()
        assert [warning["type"] for warning in changed["warnings"]] == ["TraySplit"]
        assert "nvidia.com/gpu.clique" in changed["warnings"][0]["message"]
    assert "warnings" not in api.get(f"instance/{made['id']}").json()
    gone = api.patch(f"instance/{made['id']}", {"nvLinkInterfaces": []}).json()
    assert gone["warnings"] == []


def test_a_degraded_gpu_is_avoided_and_named(api: Any) -> None:
    domain = next(iter(api.site.partitions))
    api.site.health[api.site.guid(domain, 0, 2)] = GpuHealth.DEGRADED_BANDWIDTH
    api.site.observe_all()
    made = api.instance(api.vpc())
    assert made["machineId"] != "chassis0-0"
    assert made["placementReason"].endswith("passed over chassis0-0 (gpu-2 degraded bandwidth)")


def test_a_chosen_machine_is_healthy_and_in_the_required_domain(api: Any) -> None:
    first, second = api.site.partitions
    vpc = api.vpc(partition=api.partition())
    chosen = {"name": "vm", "vpcId": vpc, "machineId": "chassis0-0", "requireSameDomain": True}
    assert api.post("instance", chosen).status_code == 201
    far = api.post("instance", chosen | {"name": "far", "machineId": "chassis1-0"})
    assert far.status_code == 409
    assert first in far.json()["message"]
    assert second in far.json()["message"]
    api.site.health[api.site.guid(first, 1, 0)] = GpuHealth.NO_NVLINK
    api.site.observe_all()
    sick = chosen | {"name": "sick", "machineId": "chassis0-1"}
    refused = api.post("instance", sick)
    assert (refused.status_code, refused.json()["message"]) == (
        409,
        "Machine specified in request is unhealthy: gpu-0 no nvlink",
    )
    assert api.post("instance", sick | {"allowUnhealthyMachine": True}).status_code == 201


def test_a_type_of_one_racks_machines_keeps_placement_in_that_rack(api: Any) -> None:
    machines = [f"chassis1-{slot}" for slot in range(3)]
    for machine in machines:
        path = f"instance/type/{api.site.type_id}/machine/{machine}"
        assert api.delete(path, role=ADMIN).status_code == 202
    capability = {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
    kind = {"name": "rack1", "siteId": api.site.site_id, "machineCapabilities": [capability]}
    rack = api.new("instance/type", kind, role=ADMIN)["id"]
    api.new(f"instance/type/{rack}/machine", {"machineIds": machines}, role=ADMIN)
    share = {"resourceType": "InstanceType", "resourceTypeId": rack, "constraintType": "Reserved"}
    given = {"name": "rack", "tenantId": api.site.tenant.id, "siteId": api.site.site_id}
    given["allocationConstraints"] = [share | {"constraintValue": 9}]
    api.new("allocation", given, role=ADMIN)
    vpc = api.vpc()
    made = api.new("instance/batch", batch(api, vpc, 3, instanceTypeId=rack))
    assert {instance["machineId"] for instance in made} == set(machines)
    assert api.post("instance", body(api, vpc, instanceTypeId=rack)).status_code == 409


def test_room_is_shown_per_domain_and_tells_nothing_of_others(api: Any) -> None:
    partition = api.partition()
    mine = api.instance(api.vpc(partition=partition))
    domain = mine["nvLinkInterfaces"][0]["nvLinkDomainId"]
    theirs = api.new(
        "instance",
        body(api, api.vpc("theirs", org="rival")),
        org="rival",
    )
    api.site.observe_all()
    found = {domain["id"]: domain for domain in api.get("nvlink-domain").json()}
    assert found.keys() == api.site.partitions.keys()
    home = found[domain]
    assert (home["status"], home["unknownSince"], home["isPaused"]) == ("Observed", None, False)
    assert (home["totalTrays"], home["ownInstances"], home["ownGpus"]) == (3, 1, 4)
    assert home["ownLogicalPartitions"] == [{"id": partition, "gpus": 4}]
    assert sum(domain["freeTrays"] for domain in found.values()) == 4
    assert home["largestBatch"] == home["freeTrays"]
    assert theirs["id"] not in api.get("nvlink-domain").text
    rivals = {domain["id"]: domain for domain in api.get("nvlink-domain", org="rival").json()}
    assert sum(rival["ownInstances"] for rival in rivals.values()) == 1
    assert partition not in str(rivals)


def test_room_is_bounded_by_the_quota_and_the_state_of_trays(api: Any) -> None:
    domain = next(iter(api.site.partitions))
    api.site.run(lambda conn: conn.execute(sa.update(schema.allocation_constraint).values(value=1)))
    shown = api.get(f"nvlink-domain/{domain}").json()
    assert (shown["freeTrays"], shown["largestBatch"]) == (3, 1)
    assert shown["fragmentation"] == pytest.approx(2 / 3)
    api.site.health[api.site.guid(domain, 0, 0)] = GpuHealth.DEGRADED
    api.site.observe_all()
    api.post("machine/chassis0-1/cordon", {"reason": "dust"}, role=ADMIN)
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()
    assert (shown["freeTrays"], shown["unhealthyTrays"], shown["closedTrays"]) == (1, 1, 1)
    assert (shown["largestBatch"], shown["fragmentation"]) == (1, 0.0)


def test_a_domain_that_cannot_be_read_says_since_when(api: Any) -> None:
    domain = next(iter(api.site.partitions))
    api.site.lose(domain, "no route")
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()
    assert (shown["status"], shown["observedAt"], shown["observationAgeSeconds"]) == ("Unknown", None, None)
    assert shown["unknownSince"]
    assert "no route" in shown["statusMessage"]


@pytest.mark.parametrize("count", [None, 2])
def test_a_request_that_names_its_plan_gets_that_or_nothing(api: Any, count: int | None) -> None:
    vpc = api.vpc(partition=api.partition())
    path, wanted = ("instance", body(api, vpc)) if count is None else ("instance/batch", batch(api, vpc, 2))
    plan = api.post(f"{path}?dryRun=true", wanted).json()
    again = api.post(f"{path}?dryRun=true&ifPlan={plan['planId']}", wanted)
    assert again.json()["planId"] == plan["planId"]
    # A machine of the plan gets another instance.
    api.instance(api.vpc("other"), "first")
    moved = api.post(f"{path}?dryRun=true", wanted).json()
    assert moved["planId"] != plan["planId"]
    for query in ("", "dryRun=true&"):
        refused = api.post(f"{path}?{query}ifPlan={plan['planId']}", wanted)
        assert refused.status_code == 409
        assert refused.json()["data"]["nearestFix"].startswith("make a new plan")
    assert [found["name"] for found in api.get("instance").json()] == ["first"]
    made = api.new(f"{path}?ifPlan={moved['planId']}", wanted)
    machines = [each["machineId"] for each in ([made] if count is None else made)]
    assert machines == [each["machineId"] for each in moved["instances"]]


@pytest.mark.parametrize("plan", ["", "0" * 64, "x" * 65])
def test_no_request_is_carried_out_for_a_plan_that_was_never_made(api: Any, plan: str) -> None:
    answer = api.post(f"instance?ifPlan={plan}", body(api, api.vpc()))
    assert answer.status_code == (400 if len(plan) > 64 else 409)
    assert api.get("instance").json() == []
