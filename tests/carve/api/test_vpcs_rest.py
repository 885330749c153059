"""VPCs and the default logical partition that they may name."""

from typing import Any

import pytest

UNKNOWN = "11111111-1111-4111-8111-111111111111"


def test_a_vpc_shows_its_default_and_keeps_what_it_does_not_understand(api: Any) -> None:
    partition = api.partition()
    body = {
        "name": "net",
        "siteId": api.site.site_id,
        "nvLinkLogicalPartitionId": partition,
        "networkVirtualizationType": "FLAT",
        "vni": 77,
        "routingProfile": {"name": "fast"},
        "labels": {"team": "a"},
    }
    made = api.new("vpc", body)
    assert {key: made[key] for key in body} == body
    assert made["nvLinkLogicalPartitionSummary"] == {
        "id": partition,
        "name": "lp",
        "siteId": api.site.site_id,
        "status": "Ready",
    }
    assert made["status"] == "Ready"
    changed = api.patch(f"vpc/{made['id']}", {"labels": {"team": "b"}, "networkSecurityGroupId": "g"}).json()
    assert (changed["labels"], changed["vni"], changed["networkSecurityGroupId"]) == ({"team": "b"}, 77, "g")


def test_a_field_of_ours_is_never_overwritten_by_an_unknown_one(api: Any) -> None:
    made = api.new("vpc", {"name": "net", "siteId": api.site.site_id, "status": "Error", "tenantId": "me"})
    assert (made["status"], made["tenantId"]) == ("Ready", api.site.tenant.id)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nvLinkLogicalPartitionId": "nope"}, "nvLinkLogicalPartitionId"),
        ({"vni": 0}, "vni"),
        ({"vni": "7"}, "vni"),
        ({"networkVirtualizationType": "MAGIC"}, "networkVirtualizationType"),
        ({"labels": {str(number): "" for number in range(11)}}, "labels"),
        ({"id": "nope"}, "id"),
    ],
)
def test_bad_fields_are_named(api: Any, body: dict[str, Any], field: str) -> None:
    answer = api.post("vpc", {"name": "net", "siteId": api.site.site_id, **body})
    assert answer.status_code == 400
    assert list(answer.json()["data"]) == [field]


def test_a_chosen_id_is_used_once(api: Any) -> None:
    body = {"id": UNKNOWN, "name": "net", "siteId": api.site.site_id}
    assert api.new("vpc", body)["id"] == UNKNOWN
    assert api.post("vpc", body | {"name": "other"}).status_code == 409
    assert api.post("vpc", body | {"id": None}).json()["data"] == {"id": UNKNOWN}


def test_an_unknown_default_is_the_callers_mistake(api: Any) -> None:
    body = {"name": "net", "siteId": api.site.site_id, "nvLinkLogicalPartitionId": UNKNOWN}
    assert api.post("vpc", body).status_code == 400
    assert api.get("vpc").json() == []


def test_many_vpcs_may_share_a_default(api: Any) -> None:
    partition = api.partition()
    made = {api.vpc("net a", partition), api.vpc("net b", partition)}
    api.vpc("net c")
    found = api.get(f"vpc?nvLinkLogicalPartitionId={partition}").json()
    assert {vpc["id"] for vpc in found} == made
    assert api.get(f"vpc?nvLinkLogicalPartitionId={UNKNOWN}").status_code == 400


def test_a_default_is_set_changed_and_cleared_while_unused(api: Any) -> None:
    first, second = api.partition("first"), api.partition("second")
    vpc = api.vpc()
    for wanted, shown in ((first, first), (None, first), (second, second), ("", None), ("", None)):
        answer = api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": wanted})
        assert (answer.status_code, answer.json()["nvLinkLogicalPartitionId"]) == (200, shown)
    assert api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": "nope"}).status_code == 400


def test_a_default_in_use_stays(api: Any) -> None:
    partition, other = api.partition(), api.partition("other")
    vpc = api.vpc(partition=partition)
    for number in range(3):
        api.instance(vpc, f"vm {number}")
    for wanted in (other, ""):
        answer = api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": wanted})
        assert (answer.status_code, answer.json()["message"]) == (
            403,
            "Existing default NVLink Logical Partition is already being used by an Instance from the VPC",
        )
    assert (
        api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": partition, "name": "renamed"}).status_code == 200
    )


def test_a_vpc_without_default_may_get_one_though_it_holds_instances(api: Any) -> None:
    partition, other = api.partition(), api.partition("other")
    vpc = api.vpc()
    api.instance(vpc, nvLinkInterfaces=[{"nvLinkLogicalPartitionId": other, "deviceInstance": 0}])
    assert api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": partition}).status_code == 200


def test_a_vpc_with_instances_is_not_deleted(api: Any) -> None:
    vpc = api.vpc()
    instance = api.instance(vpc)
    assert api.delete(f"vpc/{vpc}").status_code == 400
    api.delete(f"instance/{instance['id']}")
    assert api.delete(f"vpc/{vpc}").status_code == 202
    assert api.get(f"vpc/{vpc}").status_code == 404


def test_what_is_kept_of_unknown_fields_is_limited_also_over_many_changes(api: Any) -> None:
    body = {"name": "net", "siteId": api.site.site_id}
    assert api.post("vpc", body | {"kept": "x" * (65 << 10)}).status_code == 400
    made = api.new("vpc", body | {"first": "x" * (40 << 10)})
    assert api.patch(f"vpc/{made['id']}", {"second": "x" * (40 << 10)}).status_code == 400
    assert api.patch(f"vpc/{made['id']}", {"second": "x" * 1000}).status_code == 200


def test_a_dry_run_of_a_vpc_refuses_what_would_be_refused_and_makes_nothing(api: Any) -> None:
    wanted = {"name": "net", "siteId": api.site.site_id, "nvLinkLogicalPartitionId": api.partition()}
    planned = api.post("vpc?dryRun=true", wanted)
    assert (planned.status_code, planned.json()) == (200, {"dryRun": True, **wanted})
    assert api.get("vpc").json() == []
    api.new("vpc", wanted)
    refusals = [api.post(f"vpc{query}", wanted) for query in ("?dryRun=true", "")]
    assert [refused.status_code for refused in refusals] == [409, 409]
    assert refusals[0].json() == refusals[1].json()
    taken = api.post("vpc?dryRun=true", {**wanted, "name": "other", "id": api.get("vpc").json()[0]["id"]})
    assert taken.status_code == 409
