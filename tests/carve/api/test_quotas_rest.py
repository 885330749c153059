"""Quotas on objects: refused with the numbers, shown to the tenant, set by the provider."""

from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.tenancy import entitlements
from rackloom.carve.tenancy.entitlements import DEFAULT_LIMITS

UNKNOWN = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
def provider(api: Any) -> Any:
    """Calls as the site's provider."""
    org = api.site.read(lambda conn: conn.exec_driver_sql("SELECT org FROM provider").scalar_one())

    def call(method: str, body: Any = None, tenant: str | None = None) -> Any:
        path = f"tenant/{tenant or api.site.tenant.id}/quota"
        return api.call(method, path, body, org=org, role=Role.PROVIDER_ADMIN)

    return call


def _limit(provider: Any, **limits: int | None) -> Any:
    body = {"quotas": [{"resource": resource, "limit": limit} for resource, limit in limits.items()]}
    answer = provider("PATCH", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _own(api: Any) -> dict[str, tuple[int, int]]:
    shown = api.get("tenant/current/quota").json()
    return {quota["resource"]: (quota["used"], quota["limit"]) for quota in shown}


def test_a_tenant_sees_what_it_may_have_and_has(api: Any) -> None:
    assert _own(api) == {kind: (0, limit) for kind, limit in DEFAULT_LIMITS.items()}
    api.instance(api.vpc(partition=api.partition()))
    assert {kind: used for kind, (used, _) in _own(api).items()} == {
        "nvLinkLogicalPartitions": 1,
        "vpcs": 1,
        "instances": 1,
        "nvLinkInterfaces": 4,
        "reservedTrays": 0,
    }


def test_what_exceeds_a_quota_is_refused_with_the_numbers(api: Any, provider: Any) -> None:
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    _limit(provider, nvLinkLogicalPartitions=1, vpcs=1, instances=1)
    new = {"name": "another", "siteId": api.site.site_id}
    for path, kind in (("nvlink-logical-partition", "NVLink Logical Partitions"), ("vpc", "VPCs")):
        answer = api.post(path, new)
        assert (answer.status_code, answer.json()["message"]) == (
            403,
            f"Tenant has reached the maximum number of {kind}. Current: 1, Requested: 1, Max: 1",
        )
    body = {"vpcId": vpc, "instanceTypeId": api.site.type_id}
    assert api.post("instance/batch", body | {"namePrefix": "batch", "count": 2}).status_code == 403
    api.instance(vpc)
    assert api.post("instance", body | {"name": "two"}).status_code == 403
    _limit(provider, nvLinkLogicalPartitions=2)
    api.partition("another")


def test_interfaces_count_until_they_are_gone(api: Any, provider: Any) -> None:
    api.site.observe_all()
    first, second = api.partition("first"), api.partition("second")
    vpc = api.vpc()
    _limit(provider, nvLinkInterfaces=3)

    def on(*partitions: str) -> list[dict[str, Any]]:
        return [
            {"nvLinkLogicalPartitionId": partition, "deviceInstance": device}
            for device, partition in enumerate(partitions)
        ]

    body = {"name": "one", "vpcId": vpc, "instanceTypeId": api.site.type_id}
    assert api.post("instance", body | {"nvLinkInterfaces": on(*[first] * 4)}).status_code == 403
    instance = api.instance(vpc, nvLinkInterfaces=on(first, first))
    path = f"instance/{instance['id']}"
    api.site.converge()
    assert api.patch(path, {"nvLinkInterfaces": on(first, second)}).status_code == 200
    # The one that was detached is not gone yet.
    assert api.patch(path, {"nvLinkInterfaces": on(second, second)}).status_code == 403
    assert api.patch(path, {"nvLinkInterfaces": []}).status_code == 200
    api.site.converge()
    assert api.patch(path, {"nvLinkInterfaces": on(second, second)}).status_code == 200


def test_a_limit_below_what_a_tenant_has_takes_nothing_away(api: Any, provider: Any) -> None:
    api.vpc("one")
    api.vpc("two")
    assert _limit(provider, vpcs=0)[1] == {"resource": "vpcs", "limit": 0, "used": 2}
    assert len(api.get("vpc").json()) == 2
    _limit(provider, vpcs=None)
    assert _own(api)["vpcs"] == (2, DEFAULT_LIMITS["vpcs"])


def test_only_a_provider_of_the_tenants_machines_sees_and_sets_its_quotas(api: Any, provider: Any) -> None:
    path, change = f"tenant/{api.site.tenant.id}/quota", {"quotas": [{"resource": "vpcs", "limit": 1}]}
    assert api.patch(path, change).status_code == 403
    assert api.get(path).status_code == 403
    assert provider("PATCH", change, tenant=UNKNOWN).status_code == 404
    api.site.run(entitlements.ensure_provider, "elsewhere", api.site.now, api.site.ids)
    options = {"org": "elsewhere", "role": Role.PROVIDER_ADMIN}
    assert api.patch(path, change, **options).status_code == 404
    assert api.get(path, **options).status_code == 404
    assert provider("GET").json() == api.get("tenant/current/quota").json()


@pytest.mark.parametrize(
    "change",
    [
        {"resource": "vpcs", "limit": -1},
        {"resource": "vpcs", "limit": "1"},
        {"resource": "vpcs"},
        {"resource": "spares", "limit": 1},
    ],
)
def test_a_change_that_makes_no_sense_is_refused(provider: Any, change: Any) -> None:
    assert provider("PATCH", {"quotas": [change]}).status_code == 400
