"""Operators over REST: pauses, cordons, drains, force-deletes, found partitions, endpoints, audit."""

from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.reconcile import records
from rackloom.core.partitions.domain import BlockedGpus

ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER
WHY = {"reason": "the fan is loud"}


def step(api: Any, path: str, status: int = 200, body: Any = WHY) -> Any:
    answer = api.post(path, body, role=ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
def running(api: Any) -> dict[str, Any]:
    """An instance with its four GPUs joined."""
    api.site.observe_all()
    made = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    found: dict[str, Any] = api.get(f"instance/{made['id']}").json()
    assert found["status"] == "Ready"
    return found


@pytest.mark.slow
def test_a_pause_is_shown_kept_and_ended(api: Any) -> None:
    api.site.observe_all()
    domain = next(iter(api.site.partitions))
    assert step(api, f"nvlink-domain/{domain}/pause")["isPaused"] is True
    again = step(api, f"nvlink-domain/{domain}/pause", body={"reason": "another"})
    assert again["pauseReason"] == WHY["reason"]
    assert api.woken[0] == {domain}
    mine = api.get(f"nvlink-domain/{domain}").json()
    assert (mine["isPaused"], mine["pauseReason"], mine["freeTrays"]) == (True, None, 0)
    assert step(api, f"nvlink-domain/{domain}/resume")["isPaused"] is False
    step(api, f"nvlink-domain/{domain}/resume", 409)
    step(api, "nvlink-domain/nowhere/pause", 404)
    steps = [row["step"] for row in api.get("operator-step", role=VIEWER).json()]
    assert steps == ["pause", "resume"]


def test_the_operator_sees_which_gpus_are_blocked_and_the_tenant_does_not(api: Any) -> None:
    api.site.observe_all()
    domain, other = api.site.partitions
    guid = api.site.guid(domain, 0, 1)
    blocked = [
        BlockedGpus(guids=(guid,), reason="in somebody else's partition", fix="adopt it, or release it")
    ]
    since = api.site.tick()
    api.site.run(records.record_blocked, domain, blocked, since)
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()["blockedGpus"]
    assert shown == [
        {
            "gpuGuid": str(guid),
            "reason": "in somebody else's partition",
            "fix": "adopt it, or release it",
            "since": rfc3339(since),
        }
    ]
    listed = {domain["id"]: domain["blockedGpus"] for domain in api.get("nvlink-domain", role=ADMIN).json()}
    assert listed == {domain: shown, other: []}
    assert {domain["id"]: domain["blockedGpus"] for domain in api.get("nvlink-domain").json()} == {
        domain: None,
        other: None,
    }
    api.site.run(records.record_blocked, domain, [], api.site.tick())
    assert api.get(f"nvlink-domain/{domain}", role=VIEWER).json()["blockedGpus"] == []


def test_nothing_is_placed_in_a_paused_domain(api: Any) -> None:
    api.site.observe_all()
    first, second = api.site.partitions
    step(api, f"nvlink-domain/{first}/pause")
    made = api.instance(api.vpc(partition=api.partition()))
    assert made["nvLinkInterfaces"][0]["nvLinkDomainId"] == second


def test_a_reason_is_required(api: Any) -> None:
    api.site.observe_all()
    for body in ({}, {"reason": ""}, {"reason": "\x00"}):
        answer = api.post("machine/chassis0-0/cordon", body, role=ADMIN)
        assert (answer.status_code, list(answer.json()["data"])) == (400, ["reason"])


def test_a_cordoned_tray_gets_nothing_new(api: Any) -> None:
    api.site.observe_all()
    for slot in range(3):
        assert step(api, f"machine/chassis0-{slot}/cordon")["status"] == "Maintenance"
    vpc = api.vpc()
    machines = {api.instance(vpc, f"vm {number}")["machineId"] for number in range(3)}
    assert machines == {f"chassis1-{slot}" for slot in range(3)}
    full = api.post("instance", {"name": "vm", "vpcId": vpc, "instanceTypeId": api.site.type_id})
    assert full.status_code == 409
    shown = step(api, "machine/chassis0-1/uncordon")
    assert (shown["status"], shown["maintenanceMessage"], shown["isUsableByTenant"]) == ("Ready", None, True)
    step(api, "machine/chassis0-1/uncordon", 409)
    assert api.instance(vpc, "late")["machineId"] == "chassis0-1"
    history = api.get("machine/chassis0-1/status-history", role=VIEWER).json()
    assert [entry["message"] for entry in history] == ["uncordoned", "cordoned: the fan is loud"]


def test_a_drain_takes_the_gpus_out_and_gives_them_back(api: Any, running: dict[str, Any]) -> None:
    machine, path = running["machineId"], f"instance/{running['id']}"
    made = step(api, f"machine/{machine}/drain", 201)
    assert (made["status"], made["instanceId"], made["askedBy"]) == ("Draining", running["id"], "local@demo")
    step(api, f"machine/{machine}/drain", 409)
    step(api, f"machine/{machine}/uncordon", 409)
    drained = api.get(path).json()
    assert drained["status"] == "Repairing"
    assert {interface["status"] for interface in drained["nvLinkInterfaces"]} == {"Pending"}
    assert "drained by the operator: the fan is loud" in drained["nvLinkInterfaces"][0]["statusMessage"]
    api.site.converge()
    (shown,) = api.get("nvlink-drain?isActive=true", role=VIEWER).json()
    assert (shown["status"], shown["message"]) == (
        "Drained",
        "every GPU was seen outside the partitions of the site",
    )
    assert not any(api.site.partitions.values())
    step(api, f"machine/{machine}/drain/end")
    step(api, f"machine/{machine}/drain/end", 409)
    api.site.converge()
    assert api.get(path).json()["status"] == "Ready"
    assert api.get("nvlink-drain", role=VIEWER).json()[0]["status"] == "Ended"
    assert api.get(f"machine/{machine}", role=VIEWER).json()["maintenanceMessage"] == WHY["reason"]


def test_a_drain_is_not_done_before_it_was_seen(api: Any, running: dict[str, Any]) -> None:
    step(api, f"machine/{running['machineId']}/drain", 201)
    api.site.lose(running["nvLinkInterfaces"][0]["nvLinkDomainId"], "no route")
    (shown,) = api.get("nvlink-drain", role=VIEWER).json()
    assert shown["status"] == "Draining"
    assert latest.UNREADABLE_REASON in shown["message"]


def test_a_force_delete_is_a_release_with_the_same_clean_up(api: Any, running: dict[str, Any]) -> None:
    machine, path = running["machineId"], f"instance/{running['id']}"
    step(api, f"machine/{machine}/force-delete")
    found = api.get(path).json()
    assert found["status"] == "Terminating"
    api.site.converge()
    assert api.get(path).status_code == 404
    step(api, f"machine/{machine}/force-delete", 409)


def found_partition(api: Any, name: str, slot: int) -> str:
    """Somebody else's partition over all GPUs of a tray of the first domain."""
    domain = str(next(iter(api.site.partitions)))
    guids = frozenset(api.site.guid(domain, slot, device) for device in range(4))
    api.site.partitions[domain][name] = guids
    api.site.observe_all()
    return domain


def test_a_found_partition_is_nobodys_until_it_is_adopted(api: Any) -> None:
    domain = found_partition(api, "legacy", 0)
    (shown,) = api.get("nvlink-partition", role=VIEWER).json()
    assert (shown["name"], shown["owner"], shown["nvLinkLogicalPartitionId"]) == ("legacy", "foreign", None)
    partition = api.partition()
    body = {"nvLinkDomainId": domain, "name": "legacy", "nvLinkLogicalPartitionId": partition, **WHY}
    early = step(api, "nvlink-partition/adopt", 409, body)
    assert early["message"].startswith("4 GPUs of the partition are not wanted")
    assert "create its Instances" in early["data"]["nearestFix"]
    chosen = {"name": "one", "vpcId": api.vpc(partition=partition), "machineId": "chassis0-0"}
    made = api.new("instance", chosen)
    assert made["machineId"] == "chassis0-0"
    api.site.observe_all()
    waiting = api.get(f"instance/{made['id']}").json()["nvLinkInterfaces"][0]
    assert waiting["statusMessage"] == "the GPU is still in partition 1"
    adopted = step(api, "nvlink-partition/adopt", 200, body)
    assert (adopted["owner"], adopted["nvLinkLogicalPartitionId"]) == ("site", partition)
    api.site.observe_all()
    assert api.get(f"instance/{made['id']}").json()["status"] == "Ready"
    step(api, "nvlink-partition/adopt", 409, body)
    (audit,) = api.get("nvlink-operation", role=VIEWER).json()
    assert (audit["kind"], audit["state"], audit["askedBy"]) == ("adopt-partition", "done", "local@demo")


def test_a_released_partition_may_be_taken_apart(api: Any) -> None:
    domain = found_partition(api, "legacy", 0)
    body = {"nvLinkDomainId": domain, "name": "legacy", **WHY}
    assert step(api, "nvlink-partition/release", 200, body)["owner"] == "released"
    assert api.woken[-1] == {domain}
    step(api, "nvlink-partition/release", 409, body)
    step(api, "nvlink-partition/release", 404, body | {"name": "other"})
    assert api.get("nvlink-partition?owner=released", role=VIEWER).json()[0]["name"] == "legacy"
    assert api.get("nvlink-partition?owner=site", role=VIEWER).json() == []


def test_the_default_partition_is_not_adopted(api: Any) -> None:
    domain = found_partition(api, "Default Partition", 0)
    answer = step(
        api, "nvlink-partition/release", 409, {"nvLinkDomainId": domain, "name": "Default Partition", **WHY}
    )
    assert "policy" in answer["message"]


def test_nothing_is_adopted_from_a_domain_that_cannot_be_read(api: Any) -> None:
    domain = found_partition(api, "legacy", 0)
    api.site.lose(domain, "no route")
    body = {"nvLinkDomainId": domain, "name": "legacy", **WHY}
    assert "unknown since" in step(api, "nvlink-partition/release", 409, body)["message"]
    assert api.get("nvlink-partition", role=VIEWER).json() == []


def test_endpoints_are_registered_by_chassis_serial(api: Any) -> None:
    body = {"chassisSerial": "NEW1", "endpoint": "https://switch.example:9370"}
    made = step(api, "nvlink-nmxc-endpoint", 201, body)
    assert (made["endpoint"], made["nvLinkDomainId"]) == (body["endpoint"], None)
    step(api, "nvlink-nmxc-endpoint", 409, body)
    path = "nvlink-nmxc-endpoint/NEW1"
    changed = api.patch(path, {"endpoint": "https://other.example:9370"}, role=ADMIN).json()
    assert changed["endpoint"] == "https://other.example:9370"
    assert len(api.get("nvlink-nmxc-endpoint", role=VIEWER).json()) == 3
    assert api.delete(path, role=ADMIN).status_code == 202
    for method in ("GET", "DELETE"):
        assert api.call(method, path, role=ADMIN).status_code == 404
    assert api.patch(path, {"endpoint": "https://x:1"}, role=ADMIN).status_code == 404


@pytest.mark.parametrize(
    "url", ["ftp://x", "https://", "x", "https://u:p@x", "http://x/path", "http://x:99999"]
)
def test_an_endpoint_url_names_a_host_and_no_secret(api: Any, url: str) -> None:
    answer = api.post("nvlink-nmxc-endpoint", {"chassisSerial": "N", "endpoint": url}, role=ADMIN)
    assert (answer.status_code, list(answer.json()["data"])) == (400, ["endpoint"])


def test_without_its_endpoint_a_domain_is_unknown(api: Any, running: dict[str, Any]) -> None:
    domain = running["nvLinkInterfaces"][0]["nvLinkDomainId"]
    serial = f"CHASSIS{list(api.site.partitions).index(domain)}"
    assert api.delete(f"nvlink-nmxc-endpoint/{serial}", role=ADMIN).status_code == 202
    now = api.get(f"instance/{running['id']}").json()
    assert (now["status"], now["statusHistory"][0]["status"]) == ("Configuring", "Unknown")
    assert now["unknownSince"] == now["statusHistory"][0]["created"]
    shown = api.get(f"nvlink-domain/{domain}", role=VIEWER).json()
    assert (shown["status"], shown["observedAt"]) == ("Unknown", None)


def test_the_audit_says_who_what_why_and_what_was_seen_after(api: Any, running: dict[str, Any]) -> None:
    (audit,) = api.get("nvlink-operation?state=done", role=VIEWER).json()
    assert (audit["kind"], audit["askedBy"]) == ("create-partition", "demo")
    assert audit["reason"] == "members of logical partition lp changed"
    assert sorted(audit["detail"]["guids"]) == sorted(
        interface["gpuGuid"] for interface in running["nvLinkInterfaces"]
    )
    assert audit["observedAfter"] >= audit["finished"] >= audit["started"] >= audit["observedAt"]
    assert api.get("nvlink-operation?state=refused", role=VIEWER).json() == []
    assert api.get("nvlink-operation?nvLinkDomainId=other", role=VIEWER).json() == []


def test_nvlink_info_of_a_machine(api: Any, running: dict[str, Any]) -> None:
    info = api.get(f"machine/{running['machineId']}/nvlink-info", role=VIEWER).json()
    assert info["domainUuid"] == running["nvLinkInterfaces"][0]["nvLinkDomainId"]
    assert [gpu["guid"] for gpu in info["gpus"]] == [
        interface["gpuGuid"] for interface in running["nvLinkInterfaces"]
    ]


@pytest.mark.parametrize(
    "path", ["nvlink-operation", "nvlink-partition", "operator-step", "nvlink-nmxc-endpoint", "nvlink-drain"]
)
def test_operators_listings_cost_the_same_for_many_rows(api: Any, path: str) -> None:
    api.site.observe_all()
    few = _queries(api, path)
    for number in range(3):
        api.instance(api.vpc(f"net {number}", api.partition(f"lp {number}")), f"vm {number}")
        step(api, f"machine/chassis1-{number}/drain", 201)
    api.site.converge()
    assert _queries(api, path) == few


def _queries(api: Any, path: str) -> int:
    """The number of statements that SQLite runs, from any caller of its driver."""
    seen: list[str] = []
    driver = api.site.read(lambda conn: conn.connection.dbapi_connection)
    driver.set_trace_callback(seen.append)
    assert api.get(path, role=VIEWER).status_code == 200
    driver.set_trace_callback(None)
    return len(seen)
