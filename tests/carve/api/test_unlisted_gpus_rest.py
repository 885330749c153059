"""Trays with a GPU that their controller does not list: no instance is placed there, and they are named."""

from typing import Any

import pytest

from rackloom.app.snapshot.records import read_records
from rackloom.carve.api.auth import Role

VIEWER = Role.PROVIDER_VIEWER
WHY = ["gpu-1 not listed by the switch controller"] * 2


@pytest.fixture
def domain(api: Any) -> str:
    """The first domain. Its controller doesn't list one GPU of slots 0 and 1."""
    first = str(min(api.site.partitions))
    api.site.observe_all()
    api.site.unlisted = {api.site.guid(first, slot, 1) for slot in (0, 1)}
    api.site.observe_all()
    return first


def test_no_instance_is_placed_on_such_a_tray_and_a_dry_run_names_it(api: Any, domain: str) -> None:
    body = {"name": "vm", "vpcId": api.vpc(), "instanceTypeId": api.site.type_id}
    plan = api.post("instance?dryRun=true", body | {"allowUnhealthyMachine": True}).json()
    assert plan["instances"][0]["machineId"] == "chassis0-2"
    assert plan["reason"].endswith(f"passed over chassis0-0 ({WHY[0]}), chassis0-1 ({WHY[1]})")
    for number in range(4):
        api.new("instance", body | {"name": f"vm {number}"})
    refused = api.post("instance", body)
    assert refused.status_code == 409
    assert f"chassis0-1 ({WHY[1]})" in refused.json()["message"]
    assert "do not list all GPUs" in refused.json()["data"]["nearestFix"]


def test_such_trays_are_counted_for_all_and_named_for_operators(api: Any, domain: str) -> None:
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()
    assert (shown["freeTrays"], shown["unlistedTrays"], shown["unhealthyTrays"]) == (1, 2, 0)
    assert shown["traysWithUnlistedGpus"] == [
        {"machineId": f"chassis0-{slot}", "deviceInstances": [1]} for slot in (0, 1)
    ]
    tenants = api.get(f"nvlink-domain/{domain}").json()
    assert (tenants["unlistedTrays"], tenants["traysWithUnlistedGpus"]) == (2, None)
    usable = {found["id"]: found["isUsableByTenant"] for found in api.get("machine", role=VIEWER).json()}
    assert [machine for machine, is_usable in sorted(usable.items()) if not is_usable] == [
        "chassis0-0",
        "chassis0-1",
    ]
    (kind,) = api.get("instance/type?includeAllocationStats=true").json()
    assert (kind["allocationStats"]["unused"], kind["allocationStats"]["unusedUsable"]) == (6, 4)
    known = {found.id: found.health for found in api.site.read(read_records, api.site.now).machines}
    assert known["chassis0-0"] == "rack0/slot-0/gpu-1 is not listed by its switch controller"
    assert known["chassis0-2"] == ""


def test_the_tray_is_free_when_its_gpus_are_listed_again(api: Any, domain: str) -> None:
    api.site.lose(domain)
    assert api.get(f"nvlink-domain/{domain}").json()["unlistedTrays"] == 2
    api.site.unlisted.clear()
    api.site.observe_all()
    shown = api.get(f"nvlink-domain/{domain}").json()
    assert (shown["freeTrays"], shown["unlistedTrays"]) == (3, 0)


def test_a_missing_tray_is_missing_and_not_unlisted(api: Any, domain: str) -> None:
    api.site.unlisted |= {api.site.guid(domain, 0, device) for device in range(4)}
    api.site.observe_all()
    shown = api.get(f"nvlink-domain/{domain}").json()
    assert (shown["freeTrays"], shown["unlistedTrays"], shown["closedTrays"]) == (1, 1, 1)


def test_a_chosen_machine_with_an_unlisted_gpu_is_not_available(api: Any, domain: str) -> None:
    api.site.run(lambda conn: conn.exec_driver_sql("UPDATE tenant SET targeted_instance_creation = true"))
    body = {"name": "vm", "vpcId": api.vpc(), "machineId": "chassis0-0", "allowUnhealthyMachine": True}
    refused = api.post("instance", body)
    assert (refused.status_code, WHY[0] in refused.text) == (409, True), refused.text
