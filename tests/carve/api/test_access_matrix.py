"""Every operation and parameter works as the served document declares, for every kind of caller.

The expected results follow from the declarations of the document, and nothing here repeats them. A tenant's
answers are compared with its answers before another tenant was there. No answer, with any include or filter,
may depend on another tenant, except by the room that is left.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from tests.carve.api.described import STREAM, Operation, operations, plain_values, restricted_fields

from rackloom.carve.api.auth import Role
from rackloom.carve.api.routing import RELATIONS

TENANT, VIEWER = Role.TENANT_ADMIN, Role.PROVIDER_VIEWER
ROOM = {"freeTrays", "largestBatch", "fragmentation", "unusedUsable"}
"""Fields by which a tenant reads how much room all tenants left."""
PLACES = ("rack0", "rack1", "CHASSIS", "http://switch", "p-00000000", "a secret pause")
"""Values for providers only: racks, chassis, controllers, partitions on switches, reasons of operators."""


@pytest.fixture
def described(api: Any) -> list[Operation]:
    return [
        operation
        for operation in operations(api.client.get("/openapi.json").json())
        if operation.name != STREAM
    ]


def send(
    api: Any, operation: Operation, headers: dict[str, str], ids: dict[str, str], query: Any = ()
) -> Any:
    path = operation.path.format(**{name: ids.get(name, str(uuid4())) for name in operation.names})
    body = {} if operation.method in ("POST", "PATCH") else None
    needed = operation.required - {name for name, _ in query}
    params = [*query, *((name, ids.get(name, str(uuid4()))) for name in sorted(needed))]
    return api.client.request(
        operation.method, f"/v2/org/demo/nico/{path}", headers=headers, params=params, json=body
    )


def bearer(api: Any, roles: list[Role], org: str = "demo") -> dict[str, str]:
    return {"Authorization": f"Bearer {api.issuer.mint(org, roles, api.site.now, 60)}"}


@pytest.mark.parametrize("role", [*Role, None])
def test_a_role_opens_exactly_what_declares_it(
    api: Any, described: list[Operation], role: Role | None
) -> None:
    headers = bearer(api, [] if role is None else [role])
    for operation in described:
        answer = send(api, operation, headers, {})
        refused = answer.status_code == 403 and "does not have" in answer.json()["message"]
        assert refused != operation.admits(role), (operation, answer.text)
        assert answer.status_code < 500, (operation, answer.text)


def test_nothing_opens_without_a_token_of_the_org(api: Any, described: list[Operation]) -> None:
    for headers, status in (({}, 401), (bearer(api, list(Role), "rival"), 403)):
        for operation in described:
            assert send(api, operation, headers, {}).status_code == status, operation


class Planted:
    """The objects of demo, and values by which another tenant would be recognised."""

    def __init__(self, api: Any) -> None:
        self.api = api
        api.site.observe_all()
        self.ids = self._plant("demo", "OURS")
        api.site.converge()
        domain = self.ids["nvLinkDomainId"]
        paused = api.post(
            f"nvlink-domain/{domain}/pause", {"reason": "a secret pause"}, role=Role.PROVIDER_ADMIN
        )
        assert paused.status_code == 200

    def plant_rival(self) -> dict[str, str]:
        self.api.site.other_tenant()
        return self._plant("rival", "THEIRS")

    def _plant(self, org: str, mark: str) -> dict[str, str]:
        api, site = self.api, self.api.site
        partition = api.partition(f"{mark} partition", org=org)
        vpc = api.vpc(f"{mark} net", partition, org=org)
        body = {"name": f"{mark} vm", "vpcId": vpc, "instanceTypeId": site.type_id}
        body |= {"nvLinkInterfaces": [{"nvLinkLogicalPartitionId": partition, "deviceInstance": 0}]}
        instance = api.new("instance", body, org=org)
        (given,) = api.get("allocation", org=org).json()
        (entered,) = api.get("audit", org=org, params={"objectId": instance["id"]}).json()
        role = {"name": f"watcher-{mark.lower()}", "side": "TENANT", "permissions": ["vpcs:read"]}
        api.new("role", role, org=org)
        account = api.new("service-account", {"name": f"{mark} ci", "roles": [role["name"]]}, org=org)
        key = api.new(f"service-account/{account['id']}/key", None, org=org)
        order = {"tenantId": given["tenantId"], "instanceTypeId": site.type_id, "reason": f"{mark} job"}
        order |= {"until": "1970-01-02T00:00:00Z"}
        kept = api.new("tray-reservation", order, role=Role.PROVIDER_ADMIN)
        return {
            "auditEntryId": entered["id"],
            "tenantId": given["tenantId"],
            "instanceId": instance["id"],
            "machineId": instance["machineId"],
            "machineAssociationId": instance["machineId"],
            "instanceTypeId": site.type_id,
            "siteId": site.site_id,
            "vpcId": vpc,
            "nvLinkLogicalPartitionId": partition,
            "nvLinkDomainId": next(iter(site.partitions)),
            "chassisSerial": "CHASSIS0",
            "trayReservationId": kept["id"],
            "allocationId": given["id"],
            "allocationConstraintId": given["allocationConstraints"][0]["id"],
            "roleName": role["name"],
            "serviceAccountId": account["id"],
            "serviceAccountKeyId": key["id"],
            "name": f"{mark} vm",
            "query": mark,
        }


@pytest.fixture
def planted(api: Any) -> Planted:
    return Planted(api)


def queries(operation: Operation, *known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each query parameter with each value that its schema names, or that belongs to a tenant."""
    for name, schema in operation.parameters.items():
        if name == "includeRelation":
            yield from ((name, relation) for relation in sorted(RELATIONS))
        yield from ((name, value) for value in plain_values(schema))
        yield from ((name, ids[name]) for ids in known if name in ids)
        if name == "id":
            yield from ((name, value) for ids in known for value in sorted(set(ids.values())))


@pytest.mark.slow
@pytest.mark.parametrize("role", list(Role))
def test_parameters_and_fields_are_for_the_roles_that_they_declare(
    api: Any, described: list[Operation], planted: Planted, role: Role
) -> None:
    headers, document, read = bearer(api, [role]), api.client.get("/openapi.json").json(), set()
    for operation in described:
        if operation.method != "GET" or not operation.admits(role):
            continue
        for name, value in [("", ""), *queries(operation)]:
            answer = send(api, operation, headers, planted.ids, [(name, value)] if name else [])
            what = (operation.name, name, value, answer.text)
            if name and value != "false" and not operation.admits_parameter(role, name):
                assert answer.status_code == 403, what
            elif name != "includeRelation":
                assert answer.status_code == 200, what
            else:
                assert answer.status_code == 200 or "Invalid includeRelation" in answer.text, what
            if answer.status_code == 200:
                read.update(restricted_fields(document, operation.answer, answer.json()))
    assert {field for field, roles in read if role not in roles} == set()
    fields = {field for field, _ in read}
    assert role is TENANT or {"pauseReason", "blockedGpus", "metadata", "assigned", "machines"} <= fields


@pytest.mark.slow
def test_an_include_of_another_operation_is_refused(api: Any, described: list[Operation]) -> None:
    headers = bearer(api, list(Role))
    includes = {
        name for operation in described for name in operation.parameters if name.startswith("include")
    }
    assert {"includeRelation", "includeStats", "includeMetadata"} <= includes
    for operation in described:
        for name in sorted(includes - operation.parameters.keys()):
            answer = send(api, operation, headers, {}, [(name, "true")])
            assert (answer.status_code, name in answer.json()["data"]) == (400, True), (operation.name, name)


@pytest.mark.slow
def test_no_answer_to_a_tenant_depends_on_another(
    api: Any, described: list[Operation], planted: Planted
) -> None:
    nobodys = {name: str(uuid4()) for name in planted.ids}
    before = read_everything(api, described, planted.ids, nobodys)
    theirs = planted.plant_rival()
    after = read_everything(api, described, planted.ids, nobodys)
    assert {asked for asked in before if before[asked] != after[asked]} == set()
    assert any("OURS vm" in str(answer) for answer in after.values())
    foreign = {value for name, value in theirs.items() if value != planted.ids[name]} | {"THEIRS"}
    asked_for_theirs = read_everything(api, described, planted.ids, theirs)
    for asked, (_, text) in asked_for_theirs.items():
        # A refusal may repeat the value from the request.
        found = [value for value in (*foreign, *PLACES) if value in text and value != asked[2]]
        assert found == [], asked
    for (operation, name, value), (status, text) in asked_for_theirs.items():
        if name in theirs and value == theirs[name] != planted.ids[name] and status == 200:
            assert (status, text) == after[operation, name, nobodys[name]], (operation, name)


def read_everything(
    api: Any, described: list[Operation], ours: dict[str, str], theirs: dict[str, str]
) -> dict[tuple[str, str, str], tuple[int, str]]:
    """The answers to demo: operation, parameter, value -> status, and the answer without the room."""
    headers = bearer(api, [TENANT])
    found = {}
    for operation in described:
        if operation.method == "GET" and operation.admits(TENANT):
            for query in [(), *queries(operation, ours, theirs)]:
                answer = send(api, operation, headers, ours, [query] if query else [])
                name, value = query or ("", "")
                shown = without_room(answer.json()) if answer.status_code == 200 else answer.json()["message"]
                found[operation.name, name, value] = (answer.status_code, str(shown))
    return found


def without_room(value: Any) -> Any:
    if isinstance(value, list):
        return [without_room(inner) for inner in value]
    if isinstance(value, dict):
        return {name: without_room(inner) for name, inner in value.items() if name not in ROOM}
    return value
