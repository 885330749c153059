"""A partition that was made by hand is adopted for an owner that need not exist before."""

from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.reconcile import records
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS

ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER
OWNER = {"tenantOrg": "acme", "vpcName": "net", "nvLinkLogicalPartitionName": "train"}


def gpus(site: Any, domain: str, slot: int, *devices: int) -> frozenset[int]:
    return frozenset(site.guid(domain, slot, device) for device in devices)


@pytest.fixture
def domain(api: Any) -> str:
    """The first domain, with a partition of the GPUs of slot 0 and half of those of slot 1."""
    first = str(next(iter(api.site.partitions)))
    members = gpus(api.site, first, 0, 0, 1, 2, 3) | gpus(api.site, first, 1, 0, 1)
    api.site.partitions[first]["theirs"] = members
    api.site.observe_all()
    return first


def adopt(api: Any, domain: str, **fields: Any) -> Any:
    body = {"nvLinkDomainId": domain, "name": "theirs", "reason": "it was there before", **fields}
    return api.post("nvlink-partition/adopt", body, role=ADMIN)


def operations(api: Any, domain: str) -> int:
    intent = api.site.read(records.load_intent, domain)
    return len(make_plan(intent, api.site.observation(domain)).operations)


def test_the_owner_is_created_with_an_instance_on_each_machine(api: Any, domain: str) -> None:
    adopted = adopt(api, domain, owner=OWNER)
    assert adopted.status_code == 200, adopted.text
    assert adopted.json()["owner"] == "site"
    assert api.woken[-1] == {domain}
    assert operations(api, domain) == 0
    api.site.observe_all()
    made = api.get("instance?orderBy=NAME_ASC", org="acme").json()
    assert [(found["machineId"], found["status"]) for found in made] == [
        ("chassis0-0", "Ready"),
        ("chassis0-1", "Ready"),
    ]
    assert [len(found["nvLinkInterfaces"]) for found in made] == [4, 2]
    (network,) = api.get("vpc", org="acme").json()
    (partition,) = api.get("nvlink-logical-partition", org="acme").json()
    assert (network["name"], partition["name"]) == ("net", "train")
    assert partition["id"] == adopted.json()["nvLinkLogicalPartitionId"]
    assert api.get(f"nvlink-domain/{domain}", role=VIEWER).json()["foreignTrays"] == 0


def test_an_owner_that_exists_is_used(api: Any, domain: str) -> None:
    partition, network = api.partition("train"), api.vpc("net")
    assert adopt(api, domain, owner={**OWNER, "tenantOrg": "demo"}).status_code == 200
    assert [found["id"] for found in api.get("nvlink-logical-partition").json()] == [partition]
    assert {found["vpcId"] for found in api.get("instance").json()} == {network}
    assert len(api.get("allocation", role=VIEWER).json()) == 1


def test_a_machine_of_somebody_else_is_not_taken_and_nothing_is_created(api: Any, domain: str) -> None:
    chosen = {"name": "mine", "vpcId": api.vpc(), "machineId": "chassis0-1"}
    api.new("instance", chosen)
    refused = adopt(api, domain, owner=OWNER)
    assert refused.status_code == 409
    assert refused.json()["message"].startswith("2 GPUs of the partition are not wanted")
    assert len(api.get("nvlink-partition?owner=foreign", role=VIEWER).json()) == 1
    assert api.get("nvlink-logical-partition", org="acme").json() == []
    assert len(api.get("instance").json()) == 1


def test_a_partition_that_is_younger_than_the_restored_backup_is_adopted(
    api: Any, site_template: Any
) -> None:
    made = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    site_template.restore()
    api.site.observe_all()
    (found,) = api.get("nvlink-partition?owner=foreign", role=VIEWER).json()
    owner = {**OWNER, "tenantOrg": "demo"}
    adopted = adopt(api, found["nvLinkDomainId"], name=found["name"], owner=owner)
    assert adopted.status_code == 200, adopted.text
    api.site.observe_all()
    (again,) = api.get("instance").json()
    assert (again["machineId"], again["status"]) == (made["machineId"], "Ready")


@pytest.mark.parametrize("choice", [{}, {"owner": OWNER, "nvLinkLogicalPartitionId": "0" * 32}])
def test_one_owner_is_named(api: Any, domain: str, choice: dict[str, Any]) -> None:
    refused = adopt(api, domain, **choice)
    assert refused.status_code == 400
    assert "exactly one of" in refused.text


def test_a_partition_that_may_not_be_adopted_creates_nobody(api: Any, domain: str) -> None:
    api.site.partitions[domain]["theirs"] = frozenset({4711})
    api.site.observe_all()
    assert adopt(api, domain, owner=OWNER).status_code == 409
    api.site.partitions[domain]["theirs"] = frozenset()
    api.site.observe_all()
    refused = adopt(api, domain, owner=OWNER)
    assert (refused.status_code, refused.json()["message"]) == (409, "The partition holds no GPU")


def test_a_partition_whose_members_are_doubtful_is_not_adopted(api: Any, domain: str) -> None:
    def health() -> str:
        (shown,) = api.get("nvlink-partition", role=VIEWER).json()
        assert shown["name"] == "theirs"
        return str(shown["health"])

    assert health() == "healthy"
    api.site.uncertain = gpus(api.site, domain, 1, 1)
    api.site.observe_all()
    refused = adopt(api, domain, owner=OWNER)
    assert refused.status_code == 409
    assert "contradicts itself" in refused.json()["message"]
    assert health() == "unknown"
    api.site.uncertain = gpus(api.site, domain, 2, 0)
    api.site.observe_all()
    assert health() == "healthy"
    assert adopt(api, domain, owner=OWNER).status_code == 200


def test_an_outdated_reading_proves_no_partition(api: Any, domain: str) -> None:
    api.site.tick(DEFAULT_VALID_SECONDS + 2.0)
    for refused in (
        adopt(api, domain, owner=OWNER),
        api.post(
            "nvlink-partition/release",
            {"nvLinkDomainId": domain, "name": "theirs", "reason": "a test"},
            role=ADMIN,
        ),
    ):
        assert refused.status_code == 409
        assert "unknown since" in refused.json()["message"]
    api.site.observe_all()
    assert adopt(api, domain, owner=OWNER).status_code == 200
