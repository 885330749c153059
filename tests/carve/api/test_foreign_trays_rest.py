"""Trays in partitions that the site did not make: no instance is placed there, and they are named."""

from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.inventory import enrolment
from rackloom.carve.store import schema

ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


def tray(site: Any, domain: str, slot: int) -> frozenset[int]:
    return frozenset(site.guid(domain, slot, device) for device in range(4))


@pytest.fixture
def domain(api: Any) -> str:
    """The first domain. Slots 0 and 1 are in a foreign partition."""
    first = str(next(iter(api.site.partitions)))
    api.site.partitions[first]["theirs"] = tray(api.site, first, 0) | tray(api.site, first, 1)
    api.site.observe_all()
    return first


def test_no_instance_is_placed_on_a_foreign_tray_and_a_dry_run_names_it(api: Any, domain: str) -> None:
    held = "in partition 1, which the site did not make"
    body = {"name": "vm", "vpcId": api.vpc(), "instanceTypeId": api.site.type_id}
    plan = api.post("instance?dryRun=true", body).json()
    # The tightest fit is the one free tray beside the foreign ones.
    assert plan["instances"][0]["machineId"] == "chassis0-2"
    assert plan["reason"].endswith(f"passed over chassis0-0 ({held}), chassis0-1 ({held})")
    made = api.new("instance", body)
    assert made["machineId"] == "chassis0-2"
    assert made["placementReason"] == plan["reason"]


def test_a_request_that_only_foreign_trays_could_serve_is_refused(api: Any, domain: str) -> None:
    vpc = api.vpc()
    for number in range(4):
        machine = api.instance(vpc, f"vm {number}")["machineId"]
        assert machine not in ("chassis0-0", "chassis0-1")
    body = {"name": "more", "vpcId": vpc, "instanceTypeId": api.site.type_id}
    refused = api.post("instance", body)
    assert refused.status_code == 409
    assert refused.json()["message"].startswith("Insufficient machines available: requested 1, available 0")
    assert "chassis0-0 (in partition 1, which the site did not make)" in refused.json()["message"]
    assert "adopt or release" in refused.json()["data"]["nearestFix"]


def test_foreign_trays_are_counted_for_all_and_named_for_operators(api: Any, domain: str) -> None:
    other = list(api.site.partitions)[1]
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()
    assert (shown["freeTrays"], shown["foreignTrays"], shown["closedTrays"]) == (1, 2, 0)
    assert shown["largestBatch"] == 1
    assert shown["traysInForeignPartitions"] == [
        {"machineId": f"chassis0-{slot}", "partitionId": 1, "partitionName": "theirs"} for slot in (0, 1)
    ]
    clean = api.get(f"nvlink-domain/{other}", role=VIEWER).json()
    assert (clean["freeTrays"], clean["foreignTrays"], clean["traysInForeignPartitions"]) == (3, 0, [])
    machines = {machine["id"]: machine for machine in api.get("machine", role=VIEWER).json()}
    assert machines["chassis0-0"]["foreignPartitionIds"] == [1]
    assert machines["chassis0-0"]["isUsableByTenant"] is False
    assert machines["chassis0-2"]["foreignPartitionIds"] == []
    assert machines["chassis0-2"]["isUsableByTenant"] is True
    (kind,) = api.get("instance/type?includeAllocationStats=true", role=VIEWER).json()
    assert "theirs" not in api.get("machine", role=VIEWER).text
    assert (kind["allocationStats"]["unused"], kind["allocationStats"]["unusedUsable"]) == (6, 4)


def test_a_tenant_reads_the_number_of_foreign_trays_and_no_name(api: Any, domain: str) -> None:
    rival = api.new("vpc", {"name": "theirs net", "siteId": api.site.site_id}, org="rival")
    answer = api.get(f"nvlink-domain/{domain}", org="rival")
    assert answer.json()["foreignTrays"] == 2
    assert answer.json()["traysInForeignPartitions"] is None
    body = {"name": "vm", "vpcId": rival["id"], "instanceTypeId": api.site.type_id}
    plan = api.post("instance?dryRun=true", body, org="rival")
    assert "passed over chassis0-0 (in partition 1" in plan.json()["reason"]
    assert "theirs" not in answer.text
    assert "theirs)" not in plan.text


def test_a_released_partition_frees_its_trays_and_an_adopted_one_does(api: Any, domain: str) -> None:
    api.site.partitions[domain]["more"] = tray(api.site, domain, 2)
    api.site.observe_all()

    def free() -> int:
        return int(api.get(f"nvlink-domain/{domain}", role=VIEWER).json()["freeTrays"])

    assert free() == 0
    order = {"nvLinkDomainId": domain, "name": "theirs", "reason": "left over"}
    assert api.post("nvlink-partition/release", order, role=ADMIN).status_code == 200
    assert free() == 2
    partition = api.partition()
    chosen = {"name": "vm", "vpcId": api.vpc(partition=partition), "machineId": "chassis0-2"}
    made = api.new("instance", chosen)
    assert [warning["type"] for warning in made["warnings"]] == ["ForeignPartition"]
    assert "adopts or releases" in made["warnings"][0]["message"]
    order = {**order, "name": "more", "nvLinkLogicalPartitionId": partition}
    assert api.post("nvlink-partition/adopt", order, role=ADMIN).status_code == 200
    api.site.observe_all()
    assert api.get(f"instance/{made['id']}").json()["status"] == "Ready"
    assert api.get("machine/chassis0-2", role=VIEWER).json()["foreignPartitionIds"] == []


def test_trays_are_foreign_until_the_partition_is_gone(api: Any, domain: str) -> None:
    api.site.lose(domain)
    assert api.get(f"nvlink-domain/{domain}").json()["foreignTrays"] == 2
    api.site.partitions[domain] = {"theirs": tray(api.site, domain, 0)}
    api.site.observe_all()
    assert api.get(f"nvlink-domain/{domain}").json()["foreignTrays"] == 1
    api.site.partitions[domain] = {}
    api.site.observe_all()
    assert api.get(f"nvlink-domain/{domain}").json()["foreignTrays"] == 0


def test_the_factory_partition_and_the_sites_own_hold_no_tray_back(api: Any) -> None:
    first, second = api.site.partitions
    api.site.partitions[second]["Default Partition"] = tray(api.site, second, 0)
    api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    for uuid in (first, second):
        assert api.get(f"nvlink-domain/{uuid}").json()["foreignTrays"] == 0


def test_after_the_restore_of_an_older_backup_younger_partitions_are_foreign(
    api: Any, site_template: Any
) -> None:
    """The backup has records of neither the instance nor its partition. The fabric has both."""
    made = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    assert api.get(f"instance/{made['id']}").json()["status"] == "Ready"
    site_template.restore()
    api.site.observe_all()
    again = api.instance(api.vpc(partition=api.partition()))
    assert again["machineId"] != made["machineId"]
    assert f"passed over {made['machineId']} (in partition" in again["placementReason"]


def test_a_machine_on_a_foreign_tray_can_be_removed(api: Any, domain: str) -> None:
    def rows() -> int:
        return int(api.site.read(lambda conn: len(conn.execute(schema.foreign_tray.select()).all())))

    assert rows() == 2
    api.site.run(enrolment.remove_machine, "chassis0-0", api.site.tick())
    assert rows() == 1
