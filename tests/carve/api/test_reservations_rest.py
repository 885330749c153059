"""Reserved trays over REST: who gets them, who sees them, and the effect of their start and end."""

from datetime import UTC, datetime
from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.inventory import enrolment
from rackloom.carve.store.values import Rejected
from rackloom.carve.tenancy import entitlements

PATH = "tray-reservation"
UNKNOWN = "11111111-1111-4111-8111-111111111111"


class Provider:
    """The provider's administrator, and two tenants."""

    def __init__(self, api: Any) -> None:
        self.api = api
        api.site.observe_all()
        self.org = api.site.read(lambda conn: conn.exec_driver_sql("SELECT org FROM provider").scalar_one())
        self.rival = api.site.other_tenant()
        self.nets: dict[str, str] = {}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self.api.call(method, path, body, org=self.org, role=Role.PROVIDER_ADMIN)

    def ask(self, seconds: float = 100.0, **fields: Any) -> Any:
        """Reserve trays for the first tenant."""
        body = {
            "tenantId": self.api.site.tenant.id,
            "until": at(self.api.site.now + seconds),
            "reason": "a planned job",
        }
        if "machineIds" not in fields:
            body |= {"instanceTypeId": self.api.site.type_id}
        return self.call("POST", PATH, body | fields)

    def reserve(self, seconds: float = 100.0, **fields: Any) -> Any:
        answer = self.ask(seconds, **fields)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def change(self, reservation: Any, **fields: Any) -> Any:
        return self.call("PATCH", f"{PATH}/{reservation['id']}", {"reason": "more time", **fields})

    def place(self, name: str, org: str = "demo", **fields: Any) -> Any:
        if org not in self.nets:
            self.nets[org] = self.api.vpc(org=org)
        body = {"name": name, "vpcId": self.nets[org], "instanceTypeId": self.api.site.type_id, **fields}
        return self.api.post("instance", body, org=org)

    def machine(self, name: str, org: str = "demo", **fields: Any) -> str:
        answer = self.place(name, org, **fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["machineId"])


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def machines_of(reservation: Any) -> set[str]:
    return {shown["machineId"] for shown in reservation["machines"]}


@pytest.fixture
def provider(api: Any) -> Provider:
    return Provider(api)


def test_reserved_trays_are_for_their_organisation_until_their_time(provider: Provider) -> None:
    kept = machines_of(provider.reserve(count=3))
    assert len(kept) == 3
    others = {provider.machine(f"r{number}", "rival") for number in range(3)}
    assert not others & kept
    refused = provider.place("r3", "rival")
    assert refused.status_code == 409
    assert refused.json()["message"] == (
        "Insufficient machines available: requested 1, available 0; 3 more machines are not available now"
    )
    assert provider.machine("mine") in kept
    provider.api.site.tick(100.0)
    assert provider.machine("r3", "rival") in kept


def test_the_owner_gets_its_reserved_trays_first(provider: Provider) -> None:
    last = provider.api.get("machine", org=provider.org, role=Role.PROVIDER_ADMIN).json()[-1]["id"]
    reservation = provider.reserve(machineIds=[last])
    plan = provider.place("mine").json()
    assert plan["machineId"] == last
    shown = provider.call("GET", f"{PATH}/{reservation['id']}").json()
    assert (shown["trays"], shown["readyTrays"], shown["inUseTrays"]) == (1, 0, 1)
    assert shown["machines"][0]["state"] == "InUse"


def test_a_dry_run_and_the_placement_say_that_trays_are_reserved(provider: Provider) -> None:
    domain = provider.reserve(count=2)["nvLinkDomainIds"][0]
    partition = provider.api.partition()
    body = {
        "namePrefix": "job", "count": 2, "vpcId": provider.api.vpc(partition=partition),
        "instanceTypeId": provider.api.site.type_id,
    }  # fmt: skip
    plan = provider.api.post("instance/batch?dryRun=true", body).json()
    assert plan["reason"] == (
        f"in NVLink domain {domain}: 2 machines are reserved there for the organisation"
        " (1 free machines left)"
    )


def test_trays_are_reserved_in_one_domain_or_where_the_order_says(provider: Provider) -> None:
    refused = provider.ask(count=4)
    assert refused.status_code == 409
    assert refused.json()["data"]["nearestFix"].startswith("set topologyOptimized to false")
    spread = provider.reserve(count=4, topologyOptimized=False)
    assert len(spread["nvLinkDomainIds"]) == 2
    assert provider.call("DELETE", f"{PATH}/{spread['id']}").status_code == 202
    second = sorted(provider.api.site.partitions)[1]
    assert provider.reserve(count=1, nvLinkDomainId=second)["nvLinkDomainIds"] == [second]
    assert provider.reserve(count=1, rack="rack0")["machines"][0]["rack"] == "rack0"


def test_nobody_else_learns_for_whom_trays_are_reserved(provider: Provider) -> None:
    reservation = provider.reserve(count=3)
    kept, (domain,) = machines_of(reservation), reservation["nvLinkDomainIds"]
    mine = provider.api.get(PATH).json()
    assert [(shown["trays"], shown["machines"], shown["reason"], shown["org"]) for shown in mine] == [
        (3, None, None, None)
    ]
    assert provider.api.get(PATH, org="rival").json() == []
    assert provider.api.get(f"{PATH}/{reservation['id']}", org="rival").status_code == 404
    view = provider.api.get(f"nvlink-domain/{domain}", org="rival").json()
    assert (view["freeTrays"], view["closedTrays"], view["traysReservedForOthers"]) == (0, 0, None)
    own = provider.api.get(f"nvlink-domain/{domain}").json()
    assert (own["freeTrays"], own["closedTrays"], own["ownReservedTrays"]) == (3, 0, 3)
    shown = provider.call("GET", f"nvlink-domain/{domain}").json()
    assert (shown["freeTrays"], shown["closedTrays"]) == (0, 0)
    assert {tray["machineId"] for tray in shown["traysReservedForOthers"]} == kept
    assert {(tray["org"], tray["until"]) for tray in shown["traysReservedForOthers"]} == {
        ("demo", reservation["until"])
    }
    machine = provider.call("GET", f"machine/{min(kept)}").json()
    assert machine["reservation"]["org"] == "demo"
    steps = provider.call("GET", "operator-step").json()
    assert {step["subject"] for step in steps if step["step"] == "reserve"} == kept


def test_a_foreign_tray_that_is_reserved_is_named_to_its_owner_only(provider: Provider) -> None:
    reservation = provider.reserve(count=2)
    site, (domain,), tray = provider.api.site, reservation["nvLinkDomainIds"], min(machines_of(reservation))
    site.partitions[domain]["theirs"] = frozenset({site.guid(domain, int(tray.rpartition("-")[2]), 0)})
    site.observe_all()
    for org, is_owner in (("demo", True), ("rival", False)):
        placed = provider.place("vm", org, allowUnhealthyMachine=True).json()
        assert (tray in placed["placementReason"]) == is_owner
        seen = provider.api.get(f"nvlink-domain/{domain}", org=org).json()
        assert seen["foreignTrays"] == is_owner
    assert provider.call("GET", f"nvlink-domain/{domain}").json()["foreignTrays"] == 1
    rest = [provider.place(f"vm{number}", "rival") for number in range(4)][-1]
    assert rest.status_code == 409
    assert tray not in rest.text
    assert "nearestFix" not in (rest.json()["data"] or {})


def test_a_tenant_reads_that_fewer_machines_are_usable(provider: Provider) -> None:
    provider.reserve(count=6, topologyOptimized=False)
    path = "instance/type?includeAllocationStats=true"
    usable = {
        org: provider.api.get(path, org=org).json()[0]["allocationStats"]["unusedUsable"]
        for org in ("demo", "rival")
    }
    assert usable == {"demo": 6, "rival": 0}
    provider.api.site.tick(100.0)
    assert provider.api.get(path, org="rival").json()[0]["allocationStats"]["unusedUsable"] == 6


def test_extending_shrinking_and_ending(provider: Provider) -> None:
    reservation = provider.reserve(count=3)
    used = provider.machine("mine")
    longer = provider.change(reservation, until=at(provider.api.site.now + 500.0), count=1)
    assert longer.status_code == 200, longer.text
    assert machines_of(longer.json()) == {used}
    provider.api.site.tick(200.0)
    assert provider.call("GET", f"{PATH}?isActive=true").json()[0]["id"] == reservation["id"]
    provider.api.site.tick(300.0)
    assert provider.call("GET", f"{PATH}?isActive=true").json() == []
    (past,) = provider.call("GET", f"{PATH}?isActive=false").json()
    assert past["status"] == "Ended"
    late = provider.change(reservation, until=at(provider.api.site.now + 500.0))
    assert (late.status_code, late.json()["data"]) == (409, {"nearestFix": "make a new reservation"})
    assert machines_of(provider.reserve(machineIds=[used])) == {used}
    assert provider.call("GET", f"{PATH}/{reservation['id']}").json()["trays"] == 0
    assert provider.call("DELETE", f"{PATH}/{reservation['id']}").status_code == 202
    assert provider.call("GET", f"{PATH}/{reservation['id']}").status_code == 404


def test_a_former_owner_does_not_read_what_others_use(provider: Provider) -> None:
    reservation = provider.reserve(count=2)
    path = f"{PATH}/{reservation['id']}"
    mine = provider.machine("mine")
    assert mine in machines_of(reservation)
    numbers = ("trays", "readyTrays", "inUseTrays", "nvLinkDomainIds")

    def read_by_owner() -> list[Any]:
        shown = provider.api.get(path).json()
        return [shown[name] for name in numbers]

    assert read_by_owner() == [2, 1, 1, reservation["nvLinkDomainIds"]]
    provider.api.site.tick(100.0)
    assert read_by_owner() == [0, 0, 0, []]
    for number in range(5):
        provider.machine(f"r{number}", "rival")
    assert read_by_owner() == [0, 0, 0, []]
    shown = provider.call("GET", path).json()
    assert [shown[name] for name in numbers] == [2, 0, 1, reservation["nvLinkDomainIds"]]


def test_a_deleted_reservation_frees_its_trays(provider: Provider) -> None:
    reservation = provider.reserve(count=6, topologyOptimized=False)
    assert provider.place("theirs", "rival").status_code == 409
    assert provider.call("DELETE", f"{PATH}/{reservation['id']}").status_code == 202
    assert provider.place("theirs", "rival").status_code == 201


def test_a_tray_in_use_by_others_is_refused_with_their_name(provider: Provider) -> None:
    theirs, mine = provider.machine("theirs", "rival"), provider.machine("mine")
    refused = provider.ask(machineIds=[mine, theirs])
    assert refused.status_code == 409
    assert refused.json()["message"].startswith(f"Machine {theirs} carries Instance ")
    assert refused.json()["message"].endswith(" of rival")
    assert provider.reserve(machineIds=[mine])["inUseTrays"] == 1


def test_reservations_do_not_overlap(provider: Provider) -> None:
    first = provider.reserve(count=1)
    (tray,) = machines_of(first)
    again = provider.ask(machineIds=[tray], tenantId=provider.rival.id)
    assert again.status_code == 409
    assert again.json()["message"] == f"Machine {tray} is reserved for demo until {first['until']}"
    other = provider.reserve(count=1)
    assert provider.change(other, machineIds=[tray]).status_code == 409
    assert machines_of(provider.call("GET", f"{PATH}/{other['id']}").json()) == machines_of(other)
    free = max(shown["id"] for shown in provider.call("GET", "machine").json())
    moved = provider.change(other, machineIds=[*machines_of(other), free])
    assert machines_of(moved.json()) == {*machines_of(other), free}


def test_allocations_and_quotas_bound_what_waits(provider: Provider) -> None:
    site, tenant = provider.api.site, provider.api.site.tenant.id
    (allocation,) = provider.api.get("allocation").json()
    (constraint,) = allocation["allocationConstraints"]
    path = f"allocation/{allocation['id']}/constraint/{constraint['id']}"
    assert provider.call("PATCH", path, {"constraintValue": 3}).status_code == 200
    used = provider.machine("mine")
    refused = provider.ask(count=3)
    assert (refused.status_code, refused.json()["message"]) == (
        409,
        "Allocations of the Tenant leave room for 2 more machines of the Instance Type, requested 3",
    )
    reservation = provider.reserve(count=2)
    assert used not in machines_of(reservation)
    smaller = provider.call("PATCH", path, {"constraintValue": 2})
    assert (smaller.status_code, smaller.json()["data"]) == (
        409,
        {"nearestFix": "shrink the Tray Reservations of the Tenant first"},
    )
    quota = f"tenant/{tenant}/quota"
    limit = {"quotas": [{"resource": "reservedTrays", "limit": 2}]}
    assert provider.call("PATCH", quota, limit).json()[-1] == {
        "resource": "reservedTrays",
        "limit": 2,
        "used": 2,
    }
    assert provider.ask(machineIds=[used]).status_code == 403
    site.tick(100.0)
    assert provider.call("GET", quota).json()[-1]["used"] == 0
    assert provider.call("PATCH", path, {"constraintValue": 2}).status_code == 200
    site.run(entitlements.ensure_tenant, "poor", site.now, site.ids)
    poor = site.read(entitlements.get_tenant, "poor")
    assert provider.ask(count=1, tenantId=poor.id).json()["data"] == {
        "nearestFix": "allocate more machines of the Instance Type to the Tenant first"
    }


def test_a_reserved_tray_stays_reserved_in_maintenance_and_is_shown_so(provider: Provider) -> None:
    reservation = provider.reserve(count=2)
    tray, other = sorted(machines_of(reservation))
    assert provider.call("POST", f"machine/{tray}/cordon", {"reason": "repair"}).status_code == 200
    domain = reservation["nvLinkDomainIds"][0]
    slot = int(other.rpartition("-")[2])
    provider.api.site.partitions[domain]["theirs"] = frozenset({provider.api.site.guid(domain, slot, 0)})
    provider.api.site.observe_all()
    shown = provider.call("GET", f"{PATH}/{reservation['id']}").json()
    assert {machine["machineId"]: machine["state"] for machine in shown["machines"]} == {
        tray: "Maintenance",
        other: "Foreign",
    }
    assert (shown["trays"], shown["readyTrays"]) == (2, 0)
    assert provider.machine("mine") not in {tray, other}
    provider.api.site.partitions[domain].clear()
    provider.api.site.observe_all()
    assert provider.call("POST", f"machine/{tray}/uncordon", {"reason": "repaired"}).status_code == 200
    assert {provider.machine("two"), provider.machine("three")} == {tray, other}


def test_a_reserved_machine_keeps_its_type_and_is_not_removed(provider: Provider) -> None:
    reservation = provider.reserve(count=1)
    (tray,) = machines_of(reservation)
    type_path = f"instance/type/{provider.api.site.type_id}"
    assert provider.call("DELETE", f"{type_path}/machine/{tray}").status_code == 409
    with pytest.raises(Rejected, match="is reserved for demo until"):
        provider.api.site.run(enrolment.remove_machine, tray, provider.api.site.now)
    provider.api.site.tick(100.0)
    provider.api.site.run(enrolment.remove_machine, tray, provider.api.site.now)
    assert provider.call("GET", f"{PATH}/{reservation['id']}").json()["machines"] == []


def test_a_chosen_machine_that_is_reserved_is_not_available(provider: Provider) -> None:
    (tray,) = machines_of(provider.reserve(count=1, tenantId=provider.rival.id))
    free = {"name": "vm", "vpcId": provider.api.vpc("second"), "machineId": tray}
    provider.api.site.run(
        lambda conn: conn.exec_driver_sql("UPDATE tenant SET targeted_instance_creation = true")
    )
    refused = provider.api.post("instance", free)
    assert (refused.status_code, refused.json()["message"]) == (
        409,
        "Machine specified in request is not available",
    )
    provider.api.site.tick(100.0)
    assert provider.api.post("instance", free).status_code == 201


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"until": "2001-01-01T00:00:00"}, 400),
        ({"seconds": -1.0}, 400),
        ({"seconds": 400 * 86_400.0}, 400),
        ({"tenantId": UNKNOWN}, 400),
        ({"instanceTypeId": UNKNOWN}, 404),
        ({"machineIds": ["nowhere"]}, 400),
        ({"count": 0}, 400),
        ({"nvLinkDomainId": "elsewhere"}, 409),
    ],
)
def test_what_makes_no_sense_is_refused(provider: Provider, fields: Any, status: int) -> None:
    answer = provider.ask(**fields)
    assert answer.status_code == status, answer.text
    assert provider.call("GET", PATH).json() == []


def test_machines_and_a_number_exclude_each_other(provider: Provider) -> None:
    reservation = provider.reserve(count=2)
    tray = min(machines_of(reservation))
    assert provider.change(reservation, count=1, machineIds=[tray]).status_code == 400
    for field in ({"count": 3}, {"instanceTypeId": UNKNOWN}, {"rack": "rack0"}, {"nvLinkDomainId": "d"}):
        assert provider.ask(machineIds=[tray], **field).status_code == 400


def test_another_provider_neither_reads_nor_changes_a_reservation(provider: Provider) -> None:
    reservation = provider.reserve(count=1)
    provider.api.site.run(
        entitlements.ensure_provider, "elsewhere", provider.api.site.now, provider.api.site.ids
    )
    options = {"org": "elsewhere", "role": Role.PROVIDER_ADMIN}
    path = f"{PATH}/{reservation['id']}"
    assert provider.api.get(PATH, **options).json() == []
    assert provider.api.get(path, **options).status_code == 404
    assert provider.api.patch(path, {"reason": "mine", "count": 1}, **options).status_code == 404
    assert provider.api.delete(path, **options).status_code == 404
    assert provider.api.post(PATH, {}, org="demo").status_code == 403


def allot(provider: Provider, machines: int) -> None:
    """Let the first tenant use this number of machines."""
    (allocation,) = provider.api.get("allocation").json()
    (constraint,) = allocation["allocationConstraints"]
    path = f"allocation/{allocation['id']}/constraint/{constraint['id']}"
    assert provider.call("PATCH", path, {"constraintValue": machines}).status_code == 200


def test_instances_beside_idle_reserved_trays_stay_within_the_allocation(provider: Provider) -> None:
    allot(provider, 3)
    second = sorted(provider.api.site.partitions)[1]
    reservation = provider.reserve(count=2, nvLinkDomainId=second)
    batches = {view["id"]: view["largestBatch"] for view in provider.api.get("nvlink-domain").json()}
    assert batches == {min(batches): 1, second: 3}
    (tray, _) = sorted(machines_of(reservation))
    assert provider.call("POST", f"machine/{tray}/cordon", {"reason": "repair"}).status_code == 200
    body = {
        "namePrefix": "job", "count": 3, "vpcId": provider.api.vpc(),
        "instanceTypeId": provider.api.site.type_id,
    }  # fmt: skip
    refused = provider.api.post("instance/batch?dryRun=true", body)
    assert refused.status_code == 403
    assert refused.json()["message"] == (
        "Tenant has reached the maximum number of Instances for Instance Type."
        " Current: 0, Requested: 3, Max: 3, Reserved: 2"
    )
    assert refused.json()["data"]["nearestFix"].startswith("use the machines that are reserved")
    assert provider.api.post("instance/batch?dryRun=true", body | {"count": 2}).status_code == 200
    assert provider.call("DELETE", f"{PATH}/{reservation['id']}").status_code == 202
    assert provider.api.post("instance/batch?dryRun=true", body).status_code == 200


def test_a_batch_gets_its_own_trays_of_several_domains_where_no_others_are_allowed(
    provider: Provider,
) -> None:
    allot(provider, 2)
    kept = machines_of(provider.reserve(machineIds=["chassis0-2", "chassis1-2"]))
    body = {
        "namePrefix": "job", "count": 2, "vpcId": provider.api.vpc(),
        "instanceTypeId": provider.api.site.type_id,
    }  # fmt: skip
    # One domain has its reserved tray and another one, which it may not use beside the idle reserved tray.
    refused = provider.api.post("instance/batch", body)
    assert (refused.status_code, "Max: 2, Reserved: 2" in refused.text) == (403, True), refused.text
    created = provider.api.post("instance/batch", body | {"topologyOptimized": False})
    assert created.status_code == 201, created.text
    assert {shown["machineId"] for shown in created.json()} == kept


def test_a_chosen_machine_counts_as_any_other(provider: Provider) -> None:
    site = provider.api.site
    site.run(lambda conn: conn.exec_driver_sql("UPDATE tenant SET targeted_instance_creation = true"))
    allot(provider, 1)
    (kept,) = machines_of(provider.reserve(machineIds=["chassis1-2"]))
    net = provider.api.vpc()

    def create(name: str, machine: str) -> Any:
        return provider.api.post("instance", {"name": name, "vpcId": net, "machineId": machine})

    refused = create("beside", "chassis0-0")
    assert (refused.status_code, "Max: 1, Reserved: 1" in refused.text) == (403, True), refused.text
    assert create("mine", kept).status_code == 201
    refused = create("more", "chassis0-0")
    assert (refused.status_code, refused.text.count("Reserved")) == (403, 0), refused.text


def test_a_reserved_tray_that_others_use_for_now_still_waits(provider: Provider) -> None:
    """An adoption may have put an instance of another tenant on it."""
    site = provider.api.site
    domain = min(site.partitions)
    allot(provider, 1)
    provider.reserve(machineIds=["chassis0-0"])
    site.partitions[domain]["theirs"] = frozenset({site.guid(domain, 0, 0)})
    site.observe_all()
    owner = {"tenantOrg": "rival", "vpcName": "net", "nvLinkLogicalPartitionName": "train"}
    body = {"nvLinkDomainId": domain, "name": "theirs", "reason": "it was there before", "owner": owner}
    assert provider.call("POST", "nvlink-partition/adopt", body).status_code == 200
    assert provider.place("mine").status_code == 403


@pytest.mark.parametrize(("reserved", "allocated"), [(["chassis1-0"], 2), (["chassis0-0"], 1)])
def test_an_adoption_leaves_room_for_what_is_reserved(
    provider: Provider, reserved: list[str], allocated: int
) -> None:
    site = provider.api.site
    domain = min(site.partitions)
    allot(provider, 1)
    provider.reserve(machineIds=reserved)
    site.partitions[domain]["theirs"] = frozenset({site.guid(domain, 0, 0)})
    site.observe_all()
    owner = {"tenantOrg": "demo", "vpcName": "net", "nvLinkLogicalPartitionName": "train"}
    body = {"nvLinkDomainId": domain, "name": "theirs", "reason": "it was there before", "owner": owner}
    assert provider.call("POST", "nvlink-partition/adopt", body).status_code == 200
    given = [
        constraint["constraintValue"]
        for allocation in provider.api.get("allocation").json()
        for constraint in allocation["allocationConstraints"]
    ]
    assert sum(given) == allocated
