"""Changing and deleting machines over REST, and the hardware of machines."""

from typing import Any

import pytest
from tests.carve.conftest import DOMAINS

from rackloom.carve.api.auth import Role

ADMIN = {"role": Role.PROVIDER_ADMIN}
MACHINE = "machine/chassis0-1"
UNKNOWN = "11111111-1111-4111-8111-111111111111"


def change(api: Any, body: Any, status: int = 200) -> Any:
    answer = api.patch(MACHINE, body, **ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_labels_are_replaced_and_shown_to_the_provider_only(api: Any) -> None:
    assert change(api, {"labels": {"row": "7", "owner": "ops"}})["labels"] == {"row": "7", "owner": "ops"}
    assert change(api, {"labels": {}})["labels"] == {}
    change(api, {"labels": {"row": "8"}})
    assert api.get(MACHINE, **ADMIN).json()["labels"] == {"row": "8"}
    api.site.observe_all()
    vpc = api.vpc()
    for number in range(6):
        api.instance(vpc, f"vm {number}")
    assert api.get(MACHINE).json()["labels"] is None


def test_the_instance_type_is_set_and_cleared(api: Any) -> None:
    other = api.new("instance/type", {"name": "other", "siteId": api.site.site_id}, **ADMIN)["id"]
    assert change(api, {"instanceTypeId": other})["instanceTypeId"] == other
    assert change(api, {"instanceTypeId": other})["instanceTypeId"] == other
    assert change(api, {"clearInstanceType": True})["instanceTypeId"] is None
    assert change(api, {"clearInstanceType": True})["instanceTypeId"] is None
    change(api, {"instanceTypeId": UNKNOWN}, status=404)
    assert change(api, {"instanceTypeId": api.site.type_id})["instanceTypeId"] == api.site.type_id


def test_a_machine_in_use_keeps_its_type(api: Any) -> None:
    api.site.observe_all()
    machine = api.instance(api.vpc())["machineId"]
    refused = api.patch(f"machine/{machine}", {"clearInstanceType": True}, **ADMIN)
    assert (refused.status_code, "carries an Instance" in refused.json()["message"]) == (409, True)


def test_maintenance_is_a_cordon(api: Any) -> None:
    shown = change(api, {"setMaintenanceMode": True, "maintenanceMessage": "new fans"})
    assert (shown["status"], shown["maintenanceMessage"]) == ("Maintenance", "new fans")
    steps = api.get("operator-step", **ADMIN).json()
    assert [(step["step"], step["reason"]) for step in steps] == [("cordon", "new fans")]
    shown = change(api, {"setMaintenanceMode": True, "maintenanceMessage": "new pumps"})
    assert (shown["status"], shown["maintenanceMessage"]) == ("Maintenance", "new pumps")
    assert change(api, {"setMaintenanceMode": False})["status"] == "Ready"
    change(api, {"setMaintenanceMode": False}, status=409)
    api.post(f"{MACHINE}/drain", {"reason": "repair"}, **ADMIN)
    assert change(api, {"setMaintenanceMode": False}, status=409)["data"] == {
        "nearestFix": "end its drain first"
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reason": "why"},
        {"labels": {}, "clearInstanceType": True},
        {"clearInstanceType": False},
        {"setMaintenanceMode": True},
        {"setMaintenanceMode": True, "maintenanceMessage": "      "},
        {"setMaintenanceMode": False, "maintenanceMessage": "new fans"},
        {"labels": {}, "maintenanceMessage": "new fans"},
        {"labels": {str(number): "" for number in range(11)}},
    ],
)
def test_anything_but_one_change_is_refused(api: Any, body: Any) -> None:
    change(api, body, status=400)


def test_a_machine_is_deleted_when_its_controller_lists_it_no_longer(api: Any) -> None:
    api.site.observe_all()
    refused = api.delete(MACHINE, **ADMIN)
    assert refused.status_code == 409
    assert refused.json()["message"] == "Machine is listed by the switch controller of its NVLink domain"
    api.site.run(
        lambda conn: conn.exec_driver_sql("UPDATE machine SET missing_since = 1 WHERE id = 'chassis0-1'")
    )
    assert api.delete(MACHINE, **ADMIN).status_code == 202
    assert api.get(MACHINE, **ADMIN).status_code == 404
    steps = api.get("operator-step", **ADMIN).json()
    assert [(step["step"], step["subject"]) for step in steps] == [("delete-machine", "chassis0-1")]


@pytest.mark.parametrize("how", ["unreadable", "outdated"])
def test_a_missing_machine_of_an_unknown_domain_is_not_deleted(api: Any, how: str) -> None:
    domain = DOMAINS[0]
    change(api, {"setMaintenanceMode": True, "maintenanceMessage": "burnt power supply"})
    api.site.observe_all()
    api.site.unlisted = {api.site.guid(domain, 1, device) for device in range(4)}
    api.site.observe_all()
    if how == "unreadable":
        api.site.lose(domain)
    else:
        api.site.tick(10_000.0)
    refused = api.delete(MACHINE, **ADMIN)
    assert (refused.status_code, "is unknown" in refused.json()["message"]) == (409, True)
    api.site.unlisted = set()
    api.site.observe_all()
    shown = api.get(MACHINE, **ADMIN).json()
    assert (shown["status"], shown["maintenanceMessage"]) == ("Maintenance", "burnt power supply")


def test_a_machine_that_carries_an_instance_is_not_deleted(api: Any) -> None:
    api.site.observe_all()
    machine = api.instance(api.vpc())["machineId"]
    api.site.run(lambda conn: conn.exec_driver_sql("UPDATE machine SET missing_since = 1"))
    refused = api.delete(f"machine/{machine}", **ADMIN)
    assert (refused.status_code, "carries instance" in refused.json()["message"]) == (409, True)


def test_a_machine_that_was_never_observed_is_deleted(api: Any) -> None:
    assert api.delete(MACHINE, **ADMIN).status_code == 202
    assert len(api.get("machine", **ADMIN).json()) == 5


def test_capabilities_are_those_of_the_machines_that_the_caller_sees(api: Any) -> None:
    shown = api.get("machine-capability", **ADMIN)
    machines = api.get("machine", **ADMIN).json()
    assert shown.json() == machines[0]["machineCapabilities"]
    assert api.get("machine-capability?type=CPU", **ADMIN).json() == []
    name = shown.json()[0]["name"]
    assert api.get("machine-capability", params={"name": name}, **ADMIN).json() == shown.json()
    assert api.get(f"machine-capability?siteId={UNKNOWN}", **ADMIN).json() == []
    assert api.get("machine-capability?orderBy=STATUS_ASC", **ADMIN).status_code == 400
    assert api.get("machine-capability").json() == []
    api.site.observe_all()
    api.instance(api.vpc())
    assert api.get("machine-capability").json() == shown.json()
