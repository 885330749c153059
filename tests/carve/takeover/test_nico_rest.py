"""Reading NICo over HTTP: pages, tokens, odd answers, and records that change while they are read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from rackloom.carve.takeover.nico_rest import NicoClient, NicoReader, read_nico
from rackloom.errors import Refused, Retry

READER = NicoReader("acme", "s3cret")
SITE = {"id": "s1", "name": "old"}
PLACE = "/v2/org/acme/nico/"


class Nico:
    """A server that answers lists as NICo does. `answers` maps a path to a list, an object or an oddity."""

    def __init__(self):
        self.answers = {"site": [SITE], "tenant/current": {"id": "t1"}}
        self.calls = []
        nico = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                nico.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler):
        parts = urlsplit(handler.path)
        path, query = parts.path.removeprefix(PLACE), parse_qs(parts.query)
        self.calls.append((path, query, handler.headers.get("Authorization")))
        found = self.answers.get(path, [])
        if callable(found):
            found = found(query)
        status, headers = 200, {}
        if isinstance(found, tuple):
            status, headers, found = found
        elif isinstance(found, list):
            number, size = int(query["pageNumber"][0]), int(query["pageSize"][0])
            headers = {
                "X-Pagination": json.dumps({"pageNumber": number, "pageSize": size, "total": len(found)})
            }
            found = found[(number - 1) * size : number * size]
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        handler.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


@pytest.fixture
def nico():
    nico = Nico()
    thread = threading.Thread(target=nico.server.serve_forever, args=(0.01,))
    thread.start()
    yield nico
    nico.server.shutdown()
    thread.join()
    nico.server.server_close()


@pytest.fixture
def client(nico):
    client = NicoClient(nico.url)
    yield client
    client.close()


def read(client, **changes):
    return read_nico(client, [READER], **({"provider": None, "site": None} | changes))


def partition(number, **changes):
    return {"id": f"p{number}", "name": f"lp-{number}", "status": "Ready", "description": None} | changes


def test_all_pages_are_read_with_the_token_of_the_organisation(nico, client):
    nico.answers["nvlink-logical-partition"] = [partition(number) for number in range(250)]
    reading = read(client)
    assert [found.id for found in reading.logical_partitions] == [f"p{number}" for number in range(250)]
    pages = [query["pageNumber"] for path, query, _ in nico.calls if path == "nvlink-logical-partition"]
    assert pages == [["1"], ["2"], ["3"]] * 2  # two equal readings
    assert {authorization for _, _, authorization in nico.calls} == {"Bearer s3cret"}
    assert {query["siteId"][0] for path, query, _ in nico.calls if path == "vpc"} == {"s1"}


def test_both_spellings_of_an_interface_and_unknown_fields_are_read(nico, client):
    instance = {
        "id": "i1",
        "name": "job",
        "status": "Ready",
        "vpcId": "v1",
        "machineId": "m1",
        "instanceTypeId": None,
    }
    interface = {"id": "n1", "deviceInstance": 0, "status": "Ready", "gpuGuid": "18000000000000000000"}
    instance["nvLinkInterfaces"] = [
        interface | {"nvLinkLogicalPartitionId": "p1"},
        interface | {"nvLinklogicalPartitionId": "p2"},
    ]
    nico.answers["instance"] = [
        instance | {"labels": {"a": "b"}, "siteId": "s1", "serialConsoleUrl": "ssh://x"}
    ]
    (found,) = read(client).instances
    assert [entry.logical_partition for entry in found.interfaces] == ["p1", "p2"]
    assert found.extra == {"labels": {"a": "b"}, "serialConsoleUrl": "ssh://x"}


def test_reservations_of_addresses_are_no_quota(nico, client):
    constraint = {"id": "c1", "resourceType": "InstanceType", "resourceTypeId": "k1", "constraintValue": 3}
    nico.answers["allocation"] = [
        {
            "id": "a1",
            "name": "all",
            "allocationConstraints": [constraint, constraint | {"resourceType": "IPBlock"}],
        }
    ]
    assert [quota.machines for quota in read(client).allocations[0].quotas] == [3]


def test_the_machines_of_a_provider(nico, client):
    nico.answers["machine"] = [
        {"id": "m1", "status": "InUse", "instanceTypeId": "k1"}, {"id": "m2", "status": "Ready"},
    ]  # fmt: skip
    machines = read(client, provider=READER).machines
    assert [(found.id, found.type_id, found.is_used) for found in machines] == [
        ("m1", "k1", True), ("m2", None, False),
    ]  # fmt: skip
    assert read(client).machines == ()


def test_records_that_keep_changing_are_refused(nico, client):
    count = iter(range(100))
    nico.answers["vpc"] = lambda _query: [{"id": f"v{next(count)}", "name": "net", "status": "Ready"}]
    with pytest.raises(Refused, match="change while they are read"):
        read(client)


def test_a_change_that_ends_is_waited_out(nico, client):
    answers = iter([[partition(1, name="before")], [partition(1)], [partition(1)]])
    nico.answers["nvlink-logical-partition"] = lambda _query: next(answers)
    assert read(client).logical_partitions[0].name == "lp-1"


@pytest.mark.parametrize("total", [1, 3])
def test_a_list_of_another_length_than_announced_is_read_again(nico, client, total):
    header = {"X-Pagination": json.dumps({"total": total})}
    nico.answers["vpc"] = (200, header, [{"id": "v", "name": "n", "status": "Ready"}] * 2)
    with pytest.raises(Retry, match="changed while it was read"):
        read(client)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((401, {}, {"message": "Invalid authorization token"}), Refused, "401 .*Invalid authorization"),
        ((403, {}, b"no"), Refused, "403"),
        ((307, {"Location": "http://127.0.0.1:1/"}, b""), Refused, "307"),
        ((429, {}, b""), Retry, "429"),
        ((503, {}, {"message": "x" * 5000}), Retry, "503"),
        ((200, {}, [SITE]), Refused, "X-Pagination"),
        ((200, {"X-Pagination": "[]"}, [SITE]), Refused, "X-Pagination"),
        ((200, {"X-Pagination": '{"total": 1}'}, {"items": []}), Refused, "a form that is not known"),
        ((200, {"X-Pagination": '{"total": 1}'}, b"<html>"), Refused, "a form that is not known"),
        ((200, {"X-Pagination": '{"total": 1}'}, [{"id": 5}]), Refused, "a form that is not known"),
    ],
)  # fmt: skip
def test_an_odd_answer_is_named_without_the_token(nico, client, answer, error, message):
    nico.answers["site"] = answer
    with pytest.raises(error, match=message) as caught:
        read(client)
    assert "s3cret" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_server_that_is_not_there():
    client = NicoClient("http://127.0.0.1:1")
    with pytest.raises(Retry, match="did not answer"):
        read(client)
    client.close()


@pytest.mark.parametrize(
    "url", ["http://nico.example", "ftp://nico.example", "nico.example", "http://10.0.0.1"]
)
def test_a_token_is_not_sent_in_the_clear(url):
    with pytest.raises(Refused, match="over https only"):
        NicoClient(url)


def test_a_certificate_authority_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(Refused, match=r"ca\.crt cannot be used: No such file"):
        NicoClient("https://nico.example", ca=tmp_path / "ca.crt")
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(Refused, match="it holds no certificate"):
        NicoClient("https://nico.example", ca=tmp_path / "ca.crt")


def test_a_site_is_chosen_where_there_are_several(nico, client):
    nico.answers["site"] = [SITE, {"id": "s2", "name": "new"}]
    with pytest.raises(Refused, match="it has: old, new"):
        read(client)
    assert read(client, site="new").site.id == "s2"
    assert read(client, site="s1").site.name == "old"


def test_the_text_of_a_reader_does_not_show_its_token():
    assert "s3cret" not in f"{READER!r} {READER}"
