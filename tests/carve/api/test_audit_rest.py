"""Each change over REST leaves an entry in the audit log, in its own transaction, and holds no secret."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any
from uuid import UUID

import msgspec
import pytest
import sqlalchemy as sa
from tests.carve.api.described import operations

from rackloom.carve.api import audit_middleware
from rackloom.carve.api.app import ROUTES
from rackloom.carve.api.audit import CONTINUE_HEADER
from rackloom.carve.api.audit_middleware import UNAUTHENTICATED_REASONS, source_of
from rackloom.carve.api.auth import Role
from rackloom.carve.store import audit
from rackloom.carve.store.audit_trail import RequestAudit
from rackloom.carve.store.schema import audit_entry, provider

PROVIDER = {"role": Role.PROVIDER_ADMIN}


def entries(api: Any, **wanted: Any) -> list[Any]:
    """The entries with these values, oldest first."""
    query = sa.select(audit_entry).order_by(audit_entry.c.id)
    for name, value in wanted.items():
        query = query.where(audit_entry.c[name] == value)
    return list(api.site.run(lambda conn: conn.execute(query).all()))


def test_a_change_says_who_what_and_how_it_ended(api: Any) -> None:
    body = {"name": "net", "siteId": api.site.site_id, "description": "a secret of ours"}
    made = api.post("vpc", body)
    (entry,) = entries(api, operation="create-vpc")
    assert made.status_code == entry.status == 201
    assert (entry.subject, entry.org, entry.tenant_org) == ("local@demo", "demo", "demo")
    assert (entry.object_kind, entry.object_id, entry.object_name) == ("vpc", made.json()["id"], "net")
    assert (entry.method, entry.path) == ("POST", "/v2/org/demo/nico/vpc")
    assert entry.fields == ["description", "name", "siteId"]
    assert entry.request_id == made.headers["x-request-id"]
    assert "secret" not in repr(entry)


def test_a_tenant_reads_its_own_entries_and_a_provider_all(api: Any) -> None:
    api.site.other_tenant()
    api.partition("ours")
    api.partition("theirs", org="rival")
    (ours,) = api.get("audit").json()
    assert (ours["objectName"], ours["userID"], ours["statusCode"]) == ("ours", "local@demo", 201)
    assert ours["clientIP"] == "testclient"
    every = api.get("audit", **PROVIDER).json()
    assert [entry["objectName"] for entry in every] == ["theirs", "ours"]
    assert api.get(f"audit/{every[0]['id']}").status_code == 404
    assert api.get(f"audit/{every[0]['id']}", org="rival").json()["objectName"] == "theirs"


def test_what_a_provider_does_to_a_tenant_was_somebody_of_the_site(api: Any) -> None:
    (given,) = api.get("allocation").json()
    changed = api.patch(f"allocation/{given['id']}", {"description": "more"}, **PROVIDER)
    assert changed.status_code == 200
    (seen,) = api.get("audit").json()
    known = {"operationId", "objectKind", "objectId", "objectName", "statusCode", "timestamp", "id"}
    shown = {name: value for name, value in seen.items() if name not in known and value not in (None, [], {})}
    assert shown == {
        "userID": "operator of the site", "bySiteOperator": True, "apiVersion": "v2", "requests": 1,
    }  # fmt: skip
    assert (seen["objectId"], seen["objectName"]) == (given["id"], given["name"])
    assert api.get("audit", params={"userID": "local@demo"}).json() == []
    (known_to_provider,) = api.get("audit", **PROVIDER).json()
    assert (known_to_provider["userID"], known_to_provider["tenantOrg"]) == ("local@demo", "demo")


def test_every_operation_names_the_kind_of_its_object() -> None:
    for route in ROUTES:
        named = set(re.findall(r"{(\w+)}", route.path)) - {"org"}
        assert "GET" in route.methods or not named or named & audit_middleware._KINDS.keys(), route.path


def test_a_tenant_reads_of_the_end_of_its_reservation(api: Any) -> None:
    order = {"tenantId": api.site.tenant.id, "instanceTypeId": api.site.type_id, "reason": "spares for a job"}
    made = api.new("tray-reservation", order | {"until": "1970-01-02T00:00:00Z"}, **PROVIDER)
    assert api.delete(f"tray-reservation/{made['id']}", **PROVIDER).status_code == 202
    seen = api.get("audit").json()
    assert [entry["operationId"] for entry in seen] == ["delete-tray-reservation", "create-tray-reservation"]
    assert {(entry["objectKind"], entry["objectId"]) for entry in seen} == {("tray-reservation", made["id"])}


def test_a_step_by_a_custom_role_of_the_provider_is_one_of_the_site(api: Any) -> None:
    role = {"name": "repair", "side": "PROVIDER", "permissions": ["quotas:write"]}
    api.new("role", role, **PROVIDER)
    api.site.other_tenant()
    tenant_id = api.get("tenant/current", org="rival").json()["id"]
    token = api.issuer.mint("demo", ["repair", "no-such-role"], api.site.now, 60)
    changed = api.client.patch(
        f"/v2/org/demo/nico/tenant/{tenant_id}/quota",
        json={"quotas": [{"resource": "instances", "limit": 7}]},
        headers={"Authorization": f"Bearer {token}"},
    )
    assert changed.status_code == 200, changed.text
    (entry,) = entries(api, operation="update-tenant-quota")
    assert (entry.by_operator, entry.tenant_org, entry.roles) == (True, "rival", "repair")
    assert [seen["bySiteOperator"] for seen in api.get("audit", org="rival").json()] == [True]


def test_what_no_tenant_is_concerned_by_is_for_providers_alone(api: Any) -> None:
    domain = next(iter(api.site.partitions))
    api.site.observe_all()
    reason = {"reason": "a cable is being replaced"}
    assert api.post(f"nvlink-domain/{domain}/pause", reason, **PROVIDER).status_code == 200
    assert api.get("audit").json() == []
    (entry,) = api.get("audit", **PROVIDER).json()
    assert (entry["objectKind"], entry["objectId"]) == ("nvlink-domain", domain)
    assert (entry["reason"], entry["fields"]) == (reason["reason"], ["reason"])


def test_a_provider_of_no_site_here_reads_nothing_of_another(api: Any) -> None:
    insert = sa.insert(provider).values(id="p2", org="elsewhere", created=1.0, updated=1.0)
    api.site.run(lambda conn: conn.execute(insert))
    api.partition("ours")
    (entry,) = entries(api)
    theirs = {"org": "elsewhere", **PROVIDER}
    assert api.get("audit", **theirs).json() == []
    assert api.get(f"audit/{UUID(int=entry.id)}", **theirs).status_code == 404
    assert api.get("audit/retention", **theirs).status_code == 403


def test_what_is_deleted_keeps_its_name(api: Any) -> None:
    vpc = api.vpc("short-lived")
    assert api.delete(f"vpc/{vpc}").status_code == 202
    newest, oldest = api.get("audit", params={"objectId": vpc}).json()
    assert [entry["operationId"] for entry in (newest, oldest)] == ["delete-vpc", "create-vpc"]
    assert (newest["objectName"], newest["statusCode"]) == ("short-lived", 202)


def test_a_batch_has_an_entry_for_each_instance(api: Any) -> None:
    api.site.observe_all()
    wanted = {"namePrefix": "vm", "count": 2, "vpcId": api.vpc(), "instanceTypeId": api.site.type_id}
    made = api.new("instance/batch", wanted)
    written = entries(api, operation="batch-create-instance")
    assert {entry.object_id for entry in written} == {instance["id"] for instance in made}
    assert len({entry.request_id for entry in written}) == 1


def test_a_change_that_is_refused_has_no_entry_of_success(api: Any) -> None:
    api.vpc("net")
    refused = api.post("vpc", {"name": "net", "siteId": api.site.site_id})
    assert refused.status_code == 409
    assert [entry.status for entry in entries(api)] == [201]


def test_an_organisation_that_becomes_a_tenant_is_entered(api: Any) -> None:
    assert api.get("tenant/current", org="newcomer").status_code == 200
    (entry,) = entries(api, operation="create-tenant")
    assert (entry.org, entry.tenant_org, entry.object_name) == ("newcomer",) * 3
    api.get("tenant/current", org="newcomer")
    assert len(entries(api)) == 1


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["three", "two", "one"]),
        ({"orderBy": "TIMESTAMP_ASC"}, ["one", "two", "three"]),
        ({"pageSize": 1, "pageNumber": 2}, ["two"]),
        ({"operationId": "create-vpc"}, ["three"]),
        ({"objectKind": "nvlink-logical-partition"}, ["two", "one"]),
        ({"method": "DELETE"}, []),
        ({"statusCode": 201, "userID": "local@demo"}, ["three", "two", "one"]),
        ({"failedOnly": "true"}, []),
        ({"before": "three"}, ["two", "one"]),
        ({"after": "one", "orderBy": "CREATED_ASC"}, ["two", "three"]),
    ],
)
def test_filters_and_pages(api: Any, query: dict[str, Any], found: list[str]) -> None:
    for name in ("one", "two"):
        api.partition(name)
    api.vpc("three")
    ids = {entry.object_name: str(UUID(int=entry.id)) for entry in entries(api)}
    shifted = {name: ids.get(value, value) for name, value in query.items()}
    answer = api.get("audit", params=shifted)
    assert [entry["objectName"] for entry in answer.json()] == found


def test_a_time_span_is_exact(api: Any) -> None:
    times = []
    for name in ("one", "two", "three"):
        api.site.now += 100
        api.partition(name)
        times.append(api.get("audit").json()[0]["timestamp"])
    span = {"since": times[1], "until": times[2]}
    assert [entry["objectName"] for entry in api.get("audit", params=span).json()] == ["two"]
    assert api.get("audit", params={"since": "2026-01-01T00:00:00"}).status_code == 400


def test_no_order_but_that_of_time(api: Any) -> None:
    assert api.get("audit", params={"orderBy": "NAME_ASC"}).status_code == 400


def test_no_operation_changes_an_entry(api: Any) -> None:
    found = [
        operation.method
        for operation in operations(api.client.get("/openapi.json").json())
        if operation.path.startswith("audit")
    ]
    assert found == ["GET"] * 3


@contextmanager
def counting(api: Any, counted: RequestAudit) -> Iterator[RequestAudit]:
    state = api.client.app.state
    before = state.deps
    state.deps = msgspec.structs.replace(before, audit=counted)
    try:
        yield counted
    finally:
        state.deps = before


@pytest.fixture
def audited(api: Any) -> Iterator[RequestAudit]:
    """The counters of the application for this test alone."""
    with counting(api, RequestAudit()) as counted:
        yield counted


def refused(api: Any, audited: RequestAudit) -> list[Any]:
    return [(due.sample, due.requests) for due in audited.due(api.site.now)]


def test_a_refused_request_of_a_custom_role_of_the_provider_is_one_of_the_site(
    api: Any, audited: RequestAudit
) -> None:
    api.new("role", {"name": "repair", "side": "PROVIDER", "permissions": ["quotas:write"]}, **PROVIDER)
    headers = {"Authorization": f"Bearer {api.issuer.mint('demo', ['repair'], api.site.now, 60)}"}
    for method, path in (("POST", "machine/m/cordon"), ("GET", "machine"), ("POST", "nowhere")):
        api.client.request(method, f"/v2/org/demo/nico/{path}", json={"reason": "x"}, headers=headers)
    found = [(entry.by_operator, entry.tenant_org) for entry, _ in refused(api, audited)]
    assert found == [(True, None)] * 3


def test_refused_requests_are_counted_in_groups(api: Any, audited: RequestAudit) -> None:
    for name in ("x", "y", "z"):
        assert api.post("vpc", {"name": name}).status_code == 400
    api.post("allocation", {}, role=Role.TENANT_ADMIN)
    missing = f"vpc/{UUID(int=1)}"
    api.delete(missing)
    api.get(missing)
    api.get("operator-step")
    found = [(entry.operation, entry.status, requests) for entry, requests in refused(api, audited)]
    assert sorted(found) == [
        ("create-allocation", 403, 1),
        ("create-vpc", 400, 3),
        ("delete-vpc", 404, 1),
        ("get-all-operator-step", 403, 1),
    ]
    assert all(entry.message and entry.tenant_org == "demo" for entry, _ in refused(api, audited))
    assert entries(api) == []


def test_a_body_that_is_no_json_is_counted_without_an_operation(api: Any, audited: RequestAudit) -> None:
    answer = api.client.post(
        "/v2/org/demo/nico/vpc", headers={"Authorization": f"Bearer {api.token()}"}, content=b"x"
    )
    assert answer.status_code == 415
    ((entry, requests),) = refused(api, audited)
    assert (entry.operation, entry.method, entry.status, requests) == ("", "POST", 415, 1)


def test_requests_without_a_caller_are_counted_by_their_reason(api: Any) -> None:
    why: list[str] = []
    short = api.token(ttl=1)
    api.site.now += 10
    foreign = f"Bearer {api.token('rival')}"
    with counting(api, RequestAudit(unauthenticated=why.append)) as counted:
        for header in (None, "Basic x", "Bearer x", f"Bearer {short}", foreign):
            api.client.get("/v2/org/demo/nico/vpc", headers={"Authorization": header} if header else {})
        assert why == ["missing", "malformed", "malformed", "expired", "membership"]
        assert set(why) <= set(UNAUTHENTICATED_REASONS)
        assert counted.due(api.site.now) == []


@pytest.mark.parametrize(
    ("peer", "forwarded", "source"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "198.51.100.7, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, nonsense", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.1"),
        ("::ffff:192.0.2.1", None, "192.0.2.1"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "::ffff:203.0.113.9, ::ffff:10.0.0.2", "203.0.113.9"),
        ("testclient", "203.0.113.9", "testclient"),
    ],
)
def test_only_a_trusted_proxy_says_where_a_request_came_from(
    peer: str, forwarded: str | None, source: str
) -> None:
    assert source_of(peer, forwarded, [ip_network("10.0.0.0/8")]) == source


def test_a_page_looks_at_so_many_entries_and_says_where_to_go_on(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rackloom.carve.store.audit.WINDOW", 2)
    for name in ("one", "two", "three", "four", "five"):
        api.partition(name)
    found, more = [], {}
    while True:
        answer = api.get("audit", params={"operationId": "create-nvlink-logical-partition", **more})
        found += [entry["objectName"] for entry in answer.json()]
        if CONTINUE_HEADER not in answer.headers:
            break
        name, _, value = answer.headers[CONTINUE_HEADER].partition("=")
        more = {name: value}
    assert found == ["five", "four", "three", "two", "one"]


@pytest.mark.parametrize(
    ("query", "index_of_provider", "index_of_tenant"),
    [
        ({}, "", "ix_audit_entry_tenant_org_id"),
        ({"before": str(UUID(int=10))}, "", "ix_audit_entry_tenant_org_id"),
        ({"objectId": "x"}, "ix_audit_entry_object_id_id", "ix_audit_entry_object_id_id"),
        ({"userID": "x"}, "ix_audit_entry_subject_id", "ix_audit_entry_tenant_org_id"),
    ],
)
def test_a_page_is_read_along_an_index(
    api: Any, query: dict[str, str], index_of_provider: str, index_of_tenant: str
) -> None:
    asked: list[str] = []

    def explain(_conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "audit_entry" in statement and statement.startswith("SELECT"):
            plan = cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            steps = "; ".join(row[-1] for row in plan)
            # The later steps read the window, which is bounded.
            asked.append(steps.partition("SCAN anon")[0])

    sa.event.listen(sa.Engine, "before_cursor_execute", explain)
    try:
        assert api.get("audit", params=query, **PROVIDER).status_code == 200
        assert api.get("audit", params=query).status_code == 200
        of_provider, of_tenant = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", explain)
    assert of_provider
    for plans, index in ((of_provider, index_of_provider), (of_tenant, index_of_tenant)):
        for plan in plans:
            assert index in plan
            assert "TEMP B-TREE" not in plan


def test_retention_shows_where_the_log_begins(api: Any) -> None:
    for name in ("one", "two", "three"):
        api.partition(name)
    _, second, third = entries(api)
    assert api.site.run(audit.remove_oldest, second.id, 500) == 2
    shown = api.get("audit/retention", **PROVIDER).json()
    assert (shown["oldestEntryId"], shown["removedEntries"]) == (str(UUID(int=third.id)), 2)
    assert shown["removedUpTo"] == str(UUID(int=second.id))
    assert [entry.id for entry in entries(api)] == [third.id]
