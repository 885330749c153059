"""The events of a tenant: complete, in order, resumable, and only its own."""

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import httpx2
import pytest

from rackloom.app.listeners import serve_http
from rackloom.carve.api import app
from rackloom.carve.api import events as stream
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.store import journal
from rackloom.serving.limits import SITE_REST


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.01)


@pytest.fixture
def events(api: Any) -> Any:
    def read(org: str = "demo", after: int = 0) -> list[Any]:
        tenant = api.get("tenant/current", org=org).json()["id"]
        found: list[Any] = api.site.read(journal.events_after, tenant, after, 10_000)
        return found

    return read


def test_a_life_is_told_from_beginning_to_end(api: Any, events: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    made = api.instance(vpc)
    api.site.converge()
    api.delete(f"instance/{made['id']}")
    api.site.converge()
    api.delete(f"vpc/{vpc}")
    api.delete(f"nvlink-logical-partition/{partition}")
    found = events()
    assert [event.number for event in found] == list(range(1, len(found) + 1))
    of = {
        key: [event.note.status for event in found if event.note.object_id == key]
        for key in (partition, vpc, made["id"])
    }
    assert of[partition] == ["Pending", "Ready", "Deleting", "Deleted"]
    assert of[vpc] == ["Ready", "Deleted"]
    assert list(dict.fromkeys(of[made["id"]])) == [
        "Pending",
        "Provisioning",
        "Ready",
        "Terminating",
        "Deleted",
    ]
    interfaces = [event.note for event in found if event.note.kind is journal.EventKind.INTERFACE]
    assert sum(note.status == "Ready" for note in interfaces) == 4


def test_what_was_refused_is_not_told(api: Any, events: Any) -> None:
    vpc = api.vpc()
    before = events()
    api.post("vpc", {"name": "net", "siteId": api.site.site_id})
    api.post("instance?dryRun=true", {"name": "vm", "vpcId": vpc, "instanceTypeId": api.site.type_id})
    assert events() == before


def test_a_force_delete_is_told_to_the_tenant(api: Any, events: Any) -> None:
    api.site.observe_all()
    made = api.instance(api.vpc())
    path = f"machine/{made['machineId']}/force-delete"
    assert api.post(path, {"reason": "smoke"}, role="PROVIDER_ADMIN").status_code == 200
    assert "released by the operator: smoke" in [event.note.message for event in events()]


def test_tenants_hear_of_their_own_only(api: Any, events: Any) -> None:
    api.vpc("mine")
    api.vpc("theirs", org="rival")
    mine, theirs = events(), events("rival")
    assert {own.note.object_id for own in mine}.isdisjoint(their.note.object_id for their in theirs)
    assert [their.number for their in theirs] == list(range(1, len(theirs) + 1))


def test_only_so_many_are_kept_and_a_late_client_is_told(
    api: Any, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_TENANT_EVENTS", 3)
    for number in range(6):
        api.vpc(f"net {number}")
    numbers = [event.number for event in events()]
    assert len(numbers) == 3
    heard = follow(api, after=1, newest=numbers[-1])
    assert [event.event for event in heard] == ["reset", "vpc", "vpc", "vpc"]
    assert [int(event.id) for event in heard] == [numbers[0] - 1, *numbers]


def test_a_client_from_before_a_restore_is_told(api: Any, events: Any) -> None:
    api.vpc()
    newest = events()[-1].number
    (only,) = follow(api, after=newest + 50, newest=newest)
    assert (only.event, only.id) == ("reset", str(newest))


def follow(api: Any, after: int, newest: int) -> list[Any]:
    """The events of a stream until its token ends, which is after the second poll."""
    times = iter([0.0, 1.0])
    given = api.client.app.state.deps
    deps = ApiDeps(
        store=given.store,
        clock=lambda: next(times, 99.0),
        ids=given.ids,
        wake=given.wake,
        verifier=given.verifier,
    )

    async def collect() -> list[Any]:
        source = stream.follow(deps, api.site.tenant.id, stream.Position(after), newest, until=10.0)
        return [event async for event in source]

    found: list[Any] = api.site.runner.run(collect())
    return found


@pytest.fixture
def url(api: Any) -> Iterator[str]:
    """The application behind a real server on loopback."""
    started: queue.Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serve_http(api.client.app, "127.0.0.1:0", limits=SITE_REST) as port:
            started.put((port, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    port, loop, stop = started.get(timeout=10)
    yield f"http://127.0.0.1:{port}/v2/org/demo/nico"
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


def test_a_stream_is_resumed_over_a_socket(api: Any, url: str) -> None:
    api.vpc("before")
    headers = {"Authorization": f"Bearer {api.token()}"}
    with httpx2.Client(headers=headers, timeout=10) as client:
        first = heard(client, url, {"Last-Event-ID": "0"}, 1)[0]
        client.post(f"{url}/vpc", json={"name": "after", "siteId": api.site.site_id})
        later = heard(client, url, {"Last-Event-ID": first["id"]}, 1)[0]
        assert int(later["id"]) == int(first["id"]) + 1
        assert json.loads(later["data"]).keys() == {"kind", "id", "status", "message", "created"}
        refused = client.get(f"{url}/event", headers={"Last-Event-ID": "x"})
        assert refused.status_code == 400
        assert client.get(f"{url}/event", headers={"Last-Event-ID": "1u1"}).status_code == 400


def heard(client: Any, url: str, headers: dict[str, str], count: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    with client.stream("GET", f"{url}/event", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                found[-1][name] = value
            elif len(found) == count:
                break
            else:
                found.append({})
    return found


# The number of open streams.


def test_requests_at_the_same_moment_do_not_exceed_the_limit(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STREAMS_PER_ORG", 3)

    async def ask() -> list[int]:
        everybody_has_headers = asyncio.Barrier(8)
        streams = [request_stream(api, everybody_has_headers.wait) for _ in range(8)]
        return await asyncio.gather(*streams)

    assert sorted(api.site.runner.run(ask())) == [200] * 3 + [503] * 5
    assert open_streams(api) == 0


def test_a_request_that_is_cancelled_before_its_first_byte_is_no_longer_counted(api: Any) -> None:
    async def ask() -> None:
        is_decided = asyncio.Event()

        async def stuck() -> None:
            is_decided.set()
            await asyncio.Event().wait()

        request = asyncio.create_task(request_stream(api, stuck))
        await is_decided.wait()
        assert open_streams(api) == 1
        request.cancel()
        await asyncio.wait([request])

    api.site.runner.run(ask())
    assert open_streams(api) == 0


def test_a_client_that_goes_is_no_longer_counted(api: Any) -> None:
    async def leave_at_once() -> None:
        return None

    assert api.site.runner.run(request_stream(api, leave_at_once)) == 200
    assert open_streams(api) == 0


def test_a_refused_request_is_not_counted(api: Any) -> None:
    headers = {"Authorization": f"Bearer {api.token()}", "Last-Event-ID": "x"}
    assert api.client.get("/v2/org/demo/nico/event", headers=headers).status_code == 400
    assert open_streams(api) == 0


def open_streams(api: Any) -> int:
    streams: Counter[str] = api.client.app.state.event_streams
    return streams.total()


async def request_stream(api: Any, at_headers: Callable[[], Awaitable[object]]) -> int:
    """Request a stream without a server. The client leaves when `at_headers` returns. Returns the status."""
    statuses: list[int] = []
    is_gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            await at_headers()
            is_gone.set()

    path = "/v2/org/demo/nico/event"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {api.token()}".encode())],
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    await api.client.app(scope, receive, send)
    (status,) = statuses
    return status


def test_a_body_that_never_ends_is_given_up(api: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    with contextlib.closing(socket.create_connection((host, int(port)), timeout=10)) as slow:
        slow.sendall(
            b"POST /v2/org/demo/nico/vpc HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\nAuthorization: Bearer " + api.token().encode() + b"\r\n\r\n{"
        )
        answer = slow.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408 ")
