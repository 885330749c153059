"""Custom roles: they give no caller rights that it did not have before, and a change counts at once."""

from typing import Any

import pytest
from tests.carve.api.described import STREAM, operations

from rackloom.carve.api import access
from rackloom.carve.api.app import BUILT_IN
from rackloom.carve.api.auth import Role, Side
from rackloom.carve.api.routing import RELATIONS
from rackloom.carve.tenancy import identities

TENANT, ADMIN, VIEWER = Role.TENANT_ADMIN, Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER


def define(api: Any, name: str, *permissions: str, side: str = "TENANT", **options: Any) -> Any:
    role = TENANT if side == "TENANT" else ADMIN
    body = {"name": name, "side": side, "permissions": list(permissions)}
    return api.post("role", body, **({"role": role} | options))


def headers(api: Any, *names: str, org: str = "demo") -> dict[str, str]:
    """Headers of a person with custom roles: the issuer put their names into the token."""
    return {"Authorization": f"Bearer {api.issuer.mint(org, names, api.site.now, 60)}"}


def call(api: Any, method: str, path: str, names: list[str], body: Any = None) -> Any:
    return api.client.request(method, f"/v2/org/demo/nico/{path}", headers=headers(api, *names), json=body)


def test_a_custom_role_opens_what_it_names(api: Any) -> None:
    assert call(api, "GET", "vpc", ["watcher"]).status_code == 403
    made = define(api, "watcher", "vpcs:read")
    assert made.status_code == 201, made.text
    assert made.json()["builtIn"] is False
    assert call(api, "GET", "vpc", ["watcher"]).status_code == 200
    assert call(api, "POST", "vpc", ["watcher"], {}).status_code == 403
    changed = api.patch("role/watcher", {"permissions": ["vpcs:write"], "description": "makes VPCs"})
    assert (changed.status_code, changed.json()["permissions"]) == (200, ["vpcs:write"])
    assert call(api, "GET", "vpc", ["watcher"]).status_code == 403
    assert call(api, "POST", "vpc", ["watcher"], {}).status_code == 400
    assert api.delete("role/watcher").status_code == 202
    assert call(api, "POST", "vpc", ["watcher"], {}).status_code == 403


def test_roles_are_listed_with_what_they_allow(api: Any) -> None:
    define(api, "watcher", "vpcs:read")
    shown = {role["name"]: role for role in api.get("role").json()}
    assert shown.keys() == {"TENANT_ADMIN", "watcher"}
    assert "instances:write" in shown["TENANT_ADMIN"]["permissions"]
    shown = {role["name"]: role for role in api.get("role", role=VIEWER).json()}
    assert shown.keys() == {"PROVIDER_ADMIN", "PROVIDER_VIEWER"}
    assert not [name for name in shown["PROVIDER_VIEWER"]["permissions"] if name.endswith(":write")]


def test_a_role_is_one_of_its_organisation(api: Any) -> None:
    define(api, "watcher", "vpcs:read", org="rival")
    assert call(api, "GET", "vpc", ["watcher"]).status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"permissions": ["machines:write"]}, 400, "machines:write does not exist as tenant"),
        ({"permissions": ["machines:write"], "side": "PROVIDER"}, 403, "machines:write as provider yourself"),
        ({"permissions": ["moons:read"]}, 400, "moons:read does not exist as tenant"),
        ({"permissions": []}, 400, "at least 1"),
        ({"permissions": ["vpcs:own"]}, 400, "permissions.0"),
        ({"name": "TENANT_ADMIN"}, 400, "name"),
        ({"side": "BOTH"}, 400, "side"),
    ],
)
def test_a_role_beyond_its_maker_is_refused(api: Any, body: Any, status: int, message: str) -> None:
    answer = api.post("role", {"name": "mine", "side": "TENANT", "permissions": ["vpcs:read"]} | body)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_who_may_make_roles_by_a_custom_role_makes_no_greater_ones(api: Any) -> None:
    define(api, "maker", "roles:write", "vpcs:read")
    define(api, "owner", "instances:write")
    body = {"name": "mine", "side": "TENANT", "permissions": ["vpcs:read"]}
    assert (
        call(api, "POST", "role", ["maker"], body | {"permissions": ["instances:write"]}).status_code == 403
    )
    assert call(api, "POST", "role", ["maker"], body).status_code == 201
    assert call(api, "PATCH", "role/mine", ["maker"], {"permissions": ["instances:read"]}).status_code == 403
    assert call(api, "PATCH", "role/maker", ["maker"], {"permissions": ["vpcs:write"]}).status_code == 403
    for method, sent in (("PATCH", {"description": "x"}), ("DELETE", None)):
        assert call(api, method, "role/owner", ["maker"], sent).status_code == 403


def test_a_tenant_does_not_touch_the_roles_of_its_provider(api: Any) -> None:
    made = define(api, "operator", "machines:write", side="PROVIDER")
    assert made.status_code == 201, made.text
    assert api.delete("role/operator").status_code == 403
    assert "operator" not in {role["name"] for role in api.get("role").json()}
    assert call(api, "POST", "machine/m/cordon", ["operator"], {"reason": "x"}).status_code == 404


def test_a_change_of_nothing_makes_nobody_read_the_records_again(api: Any) -> None:
    define(api, "watcher", "vpcs:read")
    before = api.site.run(identities.read_revision)
    assert api.patch("role/watcher", {}).status_code == 200
    assert api.site.run(identities.read_revision) == before


def test_names_are_used_once(api: Any) -> None:
    assert [define(api, "watcher", "vpcs:read").status_code for _ in range(2)] == [201, 409]
    assert api.get("role/watcher").status_code == 405
    for method in ("patch", "delete"):
        arguments = ({"description": "x"},) if method == "patch" else ()
        assert getattr(api, method)("role/nobody", *arguments).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("side", list(Side))
def test_a_permission_opens_exactly_its_operations(api: Any, side: Side) -> None:
    """A role with only a permission opens its operations, and a role with all others opens none of them.

    All from the served document: operations, their parameters, and the objects that they include.
    """
    document = operations(api.client.get("/openapi.json").json())
    described = [operation for operation in document if operation.name != STREAM and operation.permission]
    ours = {TENANT} if side is Side.TENANT else {ADMIN, VIEWER}
    names = {permission for role in ours for _, permission in BUILT_IN[role]}
    define(api, "all", *names, side=side)
    for permission in sorted({str(operation.permission) for operation in described}):
        if permission in names:
            define(api, "only", permission, side=side)
            define(api, "others", *names - {permission}, side=side)
        for operation in (found for found in described if found.permission == permission):
            path = operation.path.format(**dict.fromkeys(operation.names, "nobody"))
            if ours.isdisjoint(operation.declared):
                assert _is_refused(api, operation, path, "all"), operation.name
                continue
            assert _is_refused(api, operation, path, "others"), operation.name
            assert not _is_refused(api, operation, path, "only"), operation.name
            if operation.method == "GET":
                _check_parameters(api, operation, path, "only", ours)
        for role in ("only", "others"):
            api.delete(f"role/{role}", role=TENANT if side is Side.TENANT else ADMIN)


def _is_refused(api: Any, operation: Any, path: str, role: str) -> bool:
    answer = call(api, operation.method, path, [role], {} if operation.method in ("POST", "PATCH") else None)
    assert answer.status_code < 500, answer.text
    return answer.status_code == 403 and "does not have" in answer.json()["message"]


def _check_parameters(api: Any, operation: Any, path: str, role: str, ours: set[Role]) -> None:
    for name in operation.parameters:
        value = "Machine" if name == "includeRelation" else "true"
        answer = call(api, "GET", f"{path}?{name}={value}", [role])
        what = (operation.name, name, answer.text)
        if name == "includeRelation":
            is_readable = operation.permission == "machines:read"
            assert (answer.status_code == 403) != is_readable, what
        else:
            admitted = any(operation.admits_parameter(admitting, name) for admitting in ours)
            assert ("can specify query param" in answer.text) != admitted, what


def test_each_permission_belongs_to_the_same_roles_in_all_its_operations(api: Any) -> None:
    found: dict[tuple[Side, str], set[frozenset[str]]] = {}
    for operation in operations(api.client.get("/openapi.json").json()):
        for side, ours in ((Side.TENANT, {TENANT}), (Side.PROVIDER, {ADMIN, VIEWER})):
            declared = frozenset(ours & operation.declared)
            if operation.permission is not None and declared:
                found.setdefault((side, operation.permission), set()).add(declared)
    assert {key: roles for key, roles in found.items() if len(roles) > 1} == {}


def test_every_operation_with_roles_has_a_permission(api: Any) -> None:
    for operation in operations(api.client.get("/openapi.json").json()):
        assert (operation.permission is None) == ("MEMBER" in operation.declared), operation.name


def test_every_relation_has_a_permission_that_some_role_has(api: Any) -> None:
    assert access._RESOURCE_OF_RELATION.keys() == RELATIONS.keys()
    readable = {permission for held in BUILT_IN.values() for _, permission in held}
    assert {f"{resource}:read" for resource in access._RESOURCE_OF_RELATION.values()} <= readable


@pytest.mark.parametrize(
    ("permissions", "status"), [(["vpcs:read"], 403), (["vpcs:read", "nvlink-logical-partitions:read"], 200)]
)
def test_related_objects_are_shown_to_who_may_read_them(
    api: Any, permissions: list[str], status: int
) -> None:
    api.vpc(partition=api.partition())
    define(api, "watcher", *permissions)
    answer = call(api, "GET", "vpc?includeRelation=NVLinkLogicalPartition", ["watcher"])
    assert answer.status_code == status, answer.text
    assert status == 200 or "needs the permission nvlink-logical-partitions:read" in answer.text


@pytest.mark.parametrize(("side", "status"), [("TENANT", 403), ("PROVIDER", 200)])
def test_what_a_tenant_may_read_shows_a_provider_nothing_more(api: Any, side: str, status: int) -> None:
    define(api, "lister", "allocations:read", side="PROVIDER")
    define(api, "reader", "sites:read", side=side)
    answer = call(api, "GET", "allocation?includeRelation=Site", ["lister", "reader"])
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("side", "path", "permission"),
    [
        ("TENANT", "nvlink-logical-partition?includeVpcs=true", "vpcs:read"),
        ("TENANT", "nvlink-logical-partition?includeInterfaces=true", "nvlink-interfaces:read"),
        ("TENANT", "nvlink-logical-partition?includeStats=true", "nvlink-interfaces:read"),
        ("TENANT", "instance/type?includeAllocationStats=true", "allocations:read"),
        ("PROVIDER", "instance/type?includeMachineAssignment=true", "machines:read"),
        ("PROVIDER", "site?includeMachineStats=true", "machines:read"),
        ("PROVIDER", "site?includeGpuStats=true", "machines:read"),
    ],
)
def test_what_an_answer_includes_needs_its_own_permission(
    api: Any, side: str, path: str, permission: str
) -> None:
    resource = {"site": "sites", "instance/type": "instance-types"}.get(path.partition("?")[0])
    own = f"{resource or 'nvlink-logical-partitions'}:read"
    define(api, "reader", own, side=side)
    define(api, "both", own, permission, side=side)
    refused = call(api, "GET", path, ["reader"])
    assert (refused.status_code, f"needs the permission {permission}" in refused.text) == (403, True)
    assert call(api, "GET", path.replace("=true", "=false"), ["reader"]).status_code == 200
    assert call(api, "GET", path, ["both"]).status_code == 200
    role = TENANT if side == "TENANT" else VIEWER
    assert api.get(path, role=role).status_code == 200


@pytest.mark.parametrize(
    "path", ["site?includeMachineStats=true", "instance/type?includeMachineAssignment=true"]
)
def test_a_role_of_the_other_side_shows_nothing_more(api: Any, path: str) -> None:
    """The caller's rights as a tenant, by any role, don't help it when it acts as a provider."""
    permission = "sites:read" if path.startswith("site") else "instance-types:read"
    define(api, "watch", permission, side="PROVIDER")
    define(api, "tenant", permission, "machines:read")
    for names in (["TENANT_ADMIN", "watch"], ["tenant", "watch"]):
        answer = call(api, "GET", path, names)
        assert (answer.status_code, "needs the permission machines:read" in answer.text) == (403, True)


def test_every_parameter_names_a_permission_that_some_role_has(api: Any) -> None:
    readable = {permission for held in BUILT_IN.values() for _, permission in held}
    named = {
        schema[access.PERMISSION_KEY]
        for operation in operations(api.client.get("/openapi.json").json())
        for schema in operation.parameters.values()
        if access.PERMISSION_KEY in schema
    }
    assert named
    assert named <= readable
