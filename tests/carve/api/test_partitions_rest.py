"""NVLink logical partitions and their interfaces: each row of the contract."""

import json
from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.tenancy import entitlements

UNKNOWN = "11111111-1111-4111-8111-111111111111"


def test_a_new_partition_is_ready_with_its_history(api: Any) -> None:
    body = {"name": "job-a", "description": None, "siteId": api.site.site_id}
    made = api.new("nvlink-logical-partition", body)
    history = made.pop("statusHistory")
    assert [entry["status"] for entry in history] == ["Ready", "Pending"]
    assert history[1]["message"] == "received NVLink Logical Partition creation request, pending"
    assert {key: made[key] for key in ("name", "description", "siteId", "tenantId", "status")} == {
        **body,
        "tenantId": api.site.tenant.id,
        "status": "Ready",
    }
    assert made["nvLinkLogicalPartitionStats"] is None
    assert "vpcs" not in made
    assert "nvLinkInterfaces" not in made


@pytest.mark.parametrize("name", ["x", "y" * 257, "", None, 7, "two\nlines", "\ud800x", "nul\x00"])
def test_a_bad_name_is_refused_per_field(api: Any, name: Any) -> None:
    answer = api.client.post(
        "/v2/org/demo/nico/nvlink-logical-partition",
        content=json.dumps({"name": name, "siteId": "here"}).encode(),
        headers={"Authorization": f"Bearer {api.token()}", "Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert set(answer.json()["data"]) == {"name", "siteId"}


def test_creation_is_checked_in_order(api: Any) -> None:
    body = {"name": "lp one", "siteId": UNKNOWN}
    assert api.post("nvlink-logical-partition", body).status_code == 404
    body["siteId"] = api.site.site_id
    provider = {"org": "demo", "role": Role.PROVIDER_ADMIN}
    api.patch(f"site/{api.site.site_id}", {"capabilities": {"nvLinkPartition": False}}, **provider)
    refused = api.post("nvlink-logical-partition", body)
    assert refused.status_code == 400
    assert "NVLink Partition capability" in refused.json()["message"]
    api.patch(f"site/{api.site.site_id}", {"capabilities": {"nvLinkPartition": True}}, **provider)
    made = api.new("nvlink-logical-partition", body)
    clash = api.post("nvlink-logical-partition", body)
    assert (clash.status_code, clash.json()["data"]) == (409, {"id": made["id"]})


def test_a_tenant_without_allocation_has_no_access_to_the_site(api: Any, small_site: Any) -> None:
    small_site.run(entitlements.ensure_tenant, "poor", small_site.now, small_site.ids)
    body = {"name": "lp one", "siteId": small_site.site_id}
    answer = api.post("nvlink-logical-partition", body, org="poor")
    assert (answer.status_code, answer.json()["message"]) == (403, "Tenant does not have access to Site")
    assert api.get(f"nvlink-logical-partition?siteId={small_site.site_id}", org="poor").status_code == 403
    assert api.get(f"nvlink-logical-partition?siteId={UNKNOWN}", org="poor").status_code == 400


def test_names_clash_within_a_tenant_only(api: Any) -> None:
    api.partition("same")
    api.partition("same", org="rival")
    second = api.partition("second")
    assert api.patch(f"nvlink-logical-partition/{second}", {"name": "same"}).status_code == 409
    assert api.patch(f"nvlink-logical-partition/{second}", {"name": "second"}).status_code == 200


def test_an_update_that_changes_nothing_leaves_the_object_alone(api: Any) -> None:
    partition = api.partition("lp")
    before = api.get(f"nvlink-logical-partition/{partition}").json()
    api.site.tick(10)
    assert api.patch(f"nvlink-logical-partition/{partition}", {"name": "lp"}).json() == before
    changed = api.patch(f"nvlink-logical-partition/{partition}", {"description": "for training"}).json()
    assert (changed["name"], changed["description"]) == ("lp", "for training")
    assert changed["updated"] > before["updated"]


def test_a_partition_in_use_is_not_deleted(api: Any) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    refused = api.delete(f"nvlink-logical-partition/{partition}")
    assert refused.status_code == 400
    assert refused.json()["data"]["vpcIds"] == vpc
    bare = api.vpc("bare")
    api.patch(f"vpc/{vpc}", {"nvLinkLogicalPartitionId": ""})
    instance = api.instance(
        bare, nvLinkInterfaces=[{"nvLinkLogicalPartitionId": partition, "deviceInstance": 0}]
    )
    refused = api.delete(f"nvlink-logical-partition/{partition}")
    assert refused.json()["message"] == (
        "1 active Instances are associated with this NVLink Logical Partition, unable to delete"
    )
    api.delete(f"instance/{instance['id']}")
    assert api.delete(f"nvlink-logical-partition/{partition}").status_code == 202


def test_a_deleted_partition_is_seen_deleting_until_the_fabric_lets_go(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc()
    instance = api.instance(
        vpc, nvLinkInterfaces=[{"nvLinkLogicalPartitionId": partition, "deviceInstance": 0}]
    )
    api.site.converge()
    api.delete(f"instance/{instance['id']}")
    api.delete(f"nvlink-logical-partition/{partition}")
    seen = api.get(f"nvlink-logical-partition/{partition}").json()
    assert seen["status"] == "Deleting"
    assert seen["statusHistory"][0]["message"] == "Received request for deletion, pending processing"
    use = {"name": "late", "siteId": api.site.site_id, "nvLinkLogicalPartitionId": partition}
    assert api.post("vpc", use).status_code == 403
    api.site.converge()
    assert api.get(f"nvlink-logical-partition/{partition}").status_code == 404


def test_what_is_included_and_what_is_counted(api: Any) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    instance = api.instance(vpc)
    path = f"nvlink-logical-partition/{partition}?includeVpcs=true&includeInterfaces=true&includeStats=true"
    shown = api.get(path + "&includeRelation=Site&includeRelation=Tenant").json()
    assert [found["id"] for found in shown["vpcs"]] == [vpc]
    assert {found["instanceId"] for found in shown["nvLinkInterfaces"]} == {instance["id"]}
    assert shown["nvLinkLogicalPartitionStats"] == {"totalGpus": 4, "totalDistinctInstances": 1}
    assert shown["site"]["name"] == "small"
    assert shown["tenant"]["org"] == "demo"
    listed = api.get("nvlink-logical-partition?includeStats=true&status=Ready&query=lp").json()
    assert [found["nvLinkLogicalPartitionStats"]["totalGpus"] for found in listed] == [4]
    assert api.get("nvlink-logical-partition?status=Error").json() == []


def test_detached_gpus_are_no_longer_counted(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    instance = api.instance(
        api.vpc(),
        nvLinkInterfaces=[{"nvLinkLogicalPartitionId": partition, "deviceInstance": 0}],
    )
    api.site.converge()
    api.patch(f"instance/{instance['id']}", {"nvLinkInterfaces": []})
    shown = api.get(f"nvlink-logical-partition/{partition}?includeStats=true").json()
    assert shown["nvLinkLogicalPartitionStats"] == {"totalGpus": 0, "totalDistinctInstances": 0}


def test_interfaces_are_listed_by_every_filter(api: Any) -> None:
    api.site.observe_all()
    first, second = api.partition("first"), api.partition("second")
    instance = api.instance(api.vpc("net a", first), "vm a")
    api.instance(api.vpc("net b", second), "vm b")
    domain = instance["nvLinkInterfaces"][0]["nvLinkDomainId"]
    assert len(api.get("nvlink-interface").json()) == 8
    assert len(api.get(f"nvlink-interface?nvLinkLogicalPartitionId={first}").json()) == 4
    both = f"nvLinkLogicalPartitionId={first}&nvLinkLogicalPartitionId={second}"
    assert len(api.get(f"nvlink-interface?{both}").json()) == 8
    assert len(api.get(f"nvlink-interface?instanceId={instance['id']}&status=Pending").json()) == 4
    assert len(api.get(f"nvlink-interface?nvLinkDomainId={domain}").json()) == 8
    assert api.get(f"nvlink-interface?nvLinkDomainId={UNKNOWN}").json() == []
    assert api.get("nvlink-interface?status=Ready&status=Error").json() == []
    mine = api.get(
        f"instance/{instance['id']}/nvlink-interface?includeRelation=Instance&orderBy=CREATED_DESC"
    ).json()
    assert {found["instance"]["name"] for found in mine} == {"vm a"}
    assert all(found["nvLinkLogicalPartitionId"] == found["nvLinklogicalPartitionId"] for found in mine)
    assert api.get(f"nvlink-interface?siteId={api.site.site_id}&pageSize=1").json()[0]["gpuGuid"].isdigit()


def test_interface_filters_that_are_not_mine(api: Any) -> None:
    theirs = api.partition("theirs", org="rival")
    assert api.get(f"nvlink-interface?nvLinkLogicalPartitionId={theirs}").status_code == 403
    assert api.get(f"nvlink-interface?nvLinkLogicalPartitionId={UNKNOWN}").status_code == 404
    assert api.get(f"nvlink-interface?instanceId={UNKNOWN}").status_code == 404
    assert api.get(f"nvlink-interface?siteId={UNKNOWN}").status_code == 403
    assert api.get(f"instance/{UNKNOWN}/nvlink-interface").status_code == 404


def test_one_tenant_sees_nothing_of_another(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    instance = api.instance(vpc)["id"]
    for listing in ("nvlink-logical-partition", "nvlink-interface", "vpc", "instance", "machine"):
        assert api.get(listing, org="rival").json() == [], listing
    for path in (f"nvlink-logical-partition/{partition}", f"vpc/{vpc}", f"instance/{instance}"):
        assert api.get(path, org="rival").status_code == 403
        assert api.patch(path, {"name": "stolen"}, org="rival").status_code == 403
        assert api.delete(path, org="rival").status_code == 403
    for path in (f"instance/{instance}/nvlink-interface", f"instance/{instance}/status-history"):
        assert api.get(path, org="rival").status_code == 403
    use = {"name": "theirs", "siteId": api.site.site_id, "nvLinkLogicalPartitionId": partition}
    assert api.post("vpc", use, org="rival").status_code == 403
    shown = {row["tenantId"] for row in api.get("allocation", org="rival").json()}
    assert shown.isdisjoint({api.site.tenant.id})


def test_a_dry_run_of_a_partition_refuses_what_would_be_refused_and_makes_nothing(api: Any) -> None:
    wanted = {"name": "train", "siteId": api.site.site_id}
    planned = api.post("nvlink-logical-partition?dryRun=true", wanted)
    assert (planned.status_code, planned.json()) == (200, {"dryRun": True, **wanted})
    assert api.get("nvlink-logical-partition").json() == []
    api.new("nvlink-logical-partition", wanted)
    refusals = [api.post(f"nvlink-logical-partition{query}", wanted) for query in ("?dryRun=true", "")]
    assert [refused.status_code for refused in refusals] == [409, 409]
    assert refusals[0].json() == refusals[1].json()
