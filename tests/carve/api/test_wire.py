"""Common parts of every endpoint: error bodies, paging, ids, times, and how many queries a listing costs."""

import json
from typing import Any

import pytest

from rackloom.carve.api import wire

UNKNOWN = "11111111-1111-4111-8111-111111111111"


def test_malformed_json_is_a_bad_request(api: Any) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api.token()}"}
    answer = api.client.post("/v2/org/demo/nico/vpc", content=b'{"name":', headers=headers)
    assert answer.status_code == 400
    assert answer.json() == {
        "source": "nico",
        "message": "Failed to parse request data, potentially invalid structure",
        "data": None,
    }


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"null", b"[" * 50_000, b'{"name": NaN}', b"\xff\xfe"])
def test_a_body_that_is_no_object_is_a_bad_request(api: Any, content: bytes) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api.token()}"}
    answer = api.client.post("/v2/org/demo/nico/vpc", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["source"] == "nico"


def test_a_body_beyond_the_limit_is_refused(api: Any) -> None:
    answer = api.post("vpc", {"name": "x" * (1 << 20), "siteId": api.site.site_id})
    assert (answer.status_code, answer.json()["source"]) == (413, "nico")


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
@pytest.mark.parametrize("kind", ["vpc", "instance", "nvlink-logical-partition"])
def test_ids_are_checked_then_looked_up(api: Any, method: str, kind: str) -> None:
    body = {} if method == "PATCH" else None
    bad = api.call(method, f"{kind}/not-a-uuid", body)
    assert bad.status_code == 400
    assert len(bad.json()["data"]) == 1
    missing = api.call(method, f"{kind}/{UNKNOWN}", body)
    assert missing.status_code == 404
    assert missing.json()["message"].startswith("Could not find")


def test_an_unknown_path_and_a_wrong_method_have_error_bodies(api: Any) -> None:
    answer = api.get("no-such-thing")
    assert (answer.status_code, answer.json()) == (
        404,
        {"source": "nico", "message": "The requested path was not found", "data": None},
    )
    assert api.call("PUT", "vpc").status_code == 405
    assert api.call("PUT", "vpc").json()["source"] == "nico"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("pageNumber=0", "pageNumber"),
        ("pageNumber=1e99", "pageNumber"),
        ("pageNumber=99999999999999999999", "pageNumber"),
        ("pageSize=101", "pageSize"),
        ("pageSize=0", "pageSize"),
        ("orderBy=name", "orderBy"),
        ("orderBy=SECRET_ASC", "orderBy"),
        ("orderBy=ID_ASC", "orderBy"),
        ("status=Sleepy", "status"),
        ("siteId=nowhere", "siteId"),
    ],
)
@pytest.mark.parametrize("kind", ["vpc", "nvlink-logical-partition", "instance"])
def test_a_bad_query_says_which_parameter(api: Any, kind: str, query: str, field: str) -> None:
    answer = api.get(f"{kind}?{query}")
    assert answer.status_code == 400, answer.text
    assert list(answer.json()["data"]) == [field]


def test_an_unknown_relation_is_refused(api: Any) -> None:
    for kind in ("vpc", "nvlink-logical-partition", "instance", "nvlink-interface"):
        answer = api.get(f"{kind}?includeRelation=Site&includeRelation=Moon")
        assert answer.status_code == 400
        assert answer.json()["message"] == "Invalid includeRelation value in query: Moon"


def test_pages_are_bare_arrays_with_a_header(api: Any) -> None:
    names = [f"net {number}" for number in range(5)]
    for name in names:
        api.site.tick()
        api.vpc(name)
    first = api.get("vpc?pageSize=2&orderBy=NAME_DESC")
    assert [row["name"] for row in first.json()] == ["net 4", "net 3"]
    assert json.loads(first.headers["x-pagination"]) == {
        "pageNumber": 1,
        "pageSize": 2,
        "total": 5,
        "orderBy": "NAME_DESC",
    }
    last = api.get("vpc?pageSize=2&pageNumber=3")
    assert [row["name"] for row in last.json()] == ["net 4"]
    assert json.loads(last.headers["x-pagination"])["orderBy"] is None
    assert api.get("vpc?pageNumber=9").json() == []


def test_a_text_query_is_taken_literally(api: Any) -> None:
    api.vpc("100% mine")
    api.vpc("1000 yours")
    assert [vpc["name"] for vpc in api.get("vpc", params={"query": " 100% "}).json()] == ["100% mine"]
    assert [vpc["name"] for vpc in api.get("vpc", params={"query": "MINE"}).json()] == ["100% mine"]


def test_times_are_rfc_3339(api: Any) -> None:
    api.site.now = 1_700_000_000.25
    made = api.get(f"vpc/{api.vpc()}").json()
    assert made["created"] == "2023-11-14T22:13:20.250Z"
    assert made["statusHistory"][0]["created"] == made["created"]


@pytest.mark.parametrize(
    "path",
    [
        "instance?includeRelation=Site&includeRelation=Vpc",
        "vpc?includeRelation=NVLinkLogicalPartition",
        "nvlink-logical-partition?includeInterfaces=true&includeVpcs=true&includeStats=true",
        "nvlink-interface?includeRelation=Instance",
        "machine",
        "nvlink-domain",
        "instance?includeRelation=Machine&includeRelation=VPC",
        "instance/type?includeAllocationStats=true",
        "allocation",
        "site",
    ],
)
def test_a_listing_costs_the_same_number_of_queries_for_many_rows(api: Any, path: str) -> None:
    api.site.observe_all()
    counts = []
    for number in range(3):
        partition = api.partition(f"lp {number}")
        api.instance(api.vpc(f"net {number}", partition), f"vm {number}")
        counts.append(queries(api, path))
    assert counts[0] == counts[-1]


def queries(api: Any, path: str) -> int:
    """The number of statements that SQLite runs, from any caller of its driver."""
    seen: list[str] = []
    driver = api.site.read(lambda conn: conn.connection.dbapi_connection)
    driver.set_trace_callback(seen.append)
    assert api.get(path).status_code == 200
    driver.set_trace_callback(None)
    return len(seen)


def test_a_computed_field_that_the_answer_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="has no field statuss"):
        wire.shape(wire.StatusDetail, object(), statuss="Ready")
