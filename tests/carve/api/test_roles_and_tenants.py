"""Every operation with the ids of another organisation: never data, never a change."""

from typing import Any

import pytest
import sqlalchemy as sa
from tests.carve.api import described

from rackloom.carve.api.auth import Role
from rackloom.carve.store import schema
from rackloom.carve.tenancy import entitlements

TENANT, ADMIN, VIEWER = Role.TENANT_ADMIN, Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


def all_operations(api: Any) -> list[described.Operation]:
    return [
        found for found in described.operations(api.client.app.openapi()) if found.name != described.STREAM
    ]


BODIES: dict[str, dict[str, Any]] = {
    "update-nvlink-logical-partition": {"name": "mine now"},
    "update-vpc": {"name": "mine now"},
    "update-vpc-virtualization": {"networkVirtualizationType": "FNN"},
    "update-instance": {"name": "mine now", "nvLinkInterfaces": []},
    "update-site": {"capabilities": {"nvLinkPartition": False}},
    "update-instance-type": {"name": "mine now"},
    "create-instance-type-machine-association": {"machineIds": ["chassis0-0"]},
    "update-allocation": {"name": "mine now"},
    "update-allocation-constraint": {"constraintValue": 9},
    "update-nvlink-nmxc-endpoint": {"endpoint": "http://evil:1"},
    "update-role": {"permissions": ["sites:read"]},
    "power-control-nvlink-domain": {"state": "off"},
    "firmware-update-nvlink-domain": {"version": "1.0"},
    "update-machine": {"labels": {"mine": "now"}},
    "update-tray-reservation": {"reason": "mine now", "count": 1},
    "update-tenant-quota": {"quotas": [{"resource": "vpcs", "limit": 0}]},
}


@pytest.fixture
def theirs(api: Any) -> dict[str, str]:
    """One of everything that belongs to org demo, as tenant and as provider."""
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    instance = api.instance(vpc)
    api.site.converge()
    allocation = api.get("allocation").json()[0]
    api.new("role", {"name": "watcher", "side": "TENANT", "permissions": ["vpcs:read"]})
    account = api.new("service-account", {"name": "ci", "roles": ["watcher"]})
    key = api.new(f"service-account/{account['id']}/key", None)
    order = {"tenantId": api.site.tenant.id, "instanceTypeId": api.site.type_id, "reason": "a job"}
    reservation = api.new(
        "tray-reservation", order | {"until": "1970-01-02T00:00:00Z"}, role=Role.PROVIDER_ADMIN
    )
    entered = api.get("audit", params={"objectId": instance["id"]}).json()[0]
    return {
        "auditEntryId": entered["id"],
        "roleName": "watcher",
        "serviceAccountId": account["id"],
        "serviceAccountKeyId": key["id"],
        "instanceId": instance["id"],
        "machineId": instance["machineId"],
        "machineAssociationId": instance["machineId"],
        "instanceTypeId": api.site.type_id,
        "siteId": api.site.site_id,
        "tenantId": api.site.tenant.id,
        "vpcId": vpc,
        "nvLinkLogicalPartitionId": partition,
        "nvLinkDomainId": next(iter(api.site.partitions)),
        "chassisSerial": "CHASSIS0",
        "trayReservationId": reservation["id"],
        "allocationId": allocation["id"],
        "allocationConstraintId": allocation["allocationConstraints"][0]["id"],
    }


SHARED = {"siteId", "instanceTypeId", "nvLinkDomainId"}
"""Fields that the rival may use too, because it has an allocation at the site."""


@pytest.mark.slow
@pytest.mark.parametrize("role", list(Role))
def test_the_ids_of_another_org_open_nothing(api: Any, theirs: dict[str, str], role: Role) -> None:
    api.get("tenant/current", org="rival")
    _make_provider(api, "rival")
    before = _everything(api)
    for operation in all_operations(api):
        names = operation.names
        if not names or (role is TENANT and operation.method == "GET" and set(names) <= SHARED):
            continue
        changes = operation.method in ("POST", "PATCH")
        site = {"siteId": theirs["siteId"]}
        body = BODIES.get(operation.name, {"reason": "mine now"}) | site if changes else None
        where = operation.path.format(**{name: theirs[name] for name in names})
        query = site if operation.required else {}
        answer = api.call(operation.method, where, body, org="rival", role=role, params=query)
        assert answer.status_code in (403, 404), (operation, answer.text)
        assert set(answer.json()) == {"source", "message", "data"}
    assert _everything(api) == before


def test_lists_show_nothing_of_another_org(api: Any, theirs: dict[str, str]) -> None:
    api.get("tenant/current", org="rival")
    _make_provider(api, "rival")
    secrets = {theirs[name] for name in theirs.keys() - SHARED} - {"CHASSIS0", theirs["machineId"]}
    secrets.add(api.site.tenant.id)
    for operation in all_operations(api):
        if operation.method != "GET" or (set(operation.names) - SHARED):
            continue
        where = operation.path.format(**{name: theirs[name] for name in operation.names})
        for role in Role:
            query = {"pageSize": 100} | {name: theirs[name] for name in operation.required}
            text = api.get(where, org="rival", role=role, params=query).text
            assert not [secret for secret in secrets if secret in text], (operation, role)


def test_a_rival_provider_sees_no_hardware(api: Any, theirs: dict[str, str]) -> None:
    _make_provider(api, "rival")
    for listing in (
        "machine",
        "nvlink-domain",
        "nvlink-partition",
        "nvlink-operation",
        "nvlink-nmxc-endpoint",
        "operator-step",
        "nvlink-drain",
    ):
        answer = api.get(listing, org="rival", role=VIEWER)
        assert (answer.status_code, answer.json()) == (200, []), listing


def _make_provider(api: Any, org: str) -> None:
    """A provider with a separate site that has no machines."""
    made = api.site.run(entitlements.ensure_provider, org, api.site.now, api.site.ids)
    row = {"id": api.site.ids(), "provider_id": made.id, "name": f"site of {org}", "status": "Registered"}
    row |= {"capabilities": {}, "default_partition": "none", "created": 0.0, "updated": 0.0}
    api.site.run(lambda conn: conn.execute(sa.insert(schema.site).values(**row)))


def _everything(api: Any) -> dict[str, Any]:
    listings = ["nvlink-logical-partition", "vpc", "instance", "allocation", "site", "instance/type"]
    listings.append("tenant/current/quota")
    found = {listing: api.get(listing).json() for listing in listings}
    for listing in ("machine", "nvlink-nmxc-endpoint", "operator-step", "tray-reservation"):
        found[listing] = api.get(listing, role=VIEWER).json()
    return found
