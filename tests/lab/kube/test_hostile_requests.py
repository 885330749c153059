"""Hostile requests are refused, cost other clients nothing, and leave nothing behind."""

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.http import MAX_BODY_BYTES, KubeTransport
from rackloom.lab.kube.kubectl.serving import KubeApplication
from rackloom.lab.kube.patches import OPERATIONS
from rackloom.lab.kube.server import FakeKube

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
JSON, MERGE = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
MAPS, PODS = "/api/v1/namespaces/default/configmaps", "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "o", "uid": "u"}
METADATA = {
    "labels": {"a": "b"},
    "annotations": {"x": "y"},
    "finalizers": ["a/b"],
    "ownerReferences": [OWNER],
}
CONTAINER = {"name": "m", "image": "i", "env": [{"name": "a", "value": "b"}]}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
OBJECTS: list[tuple[str, Object]] = [
    (PODS, {"metadata": METADATA, "spec": {"containers": [CONTAINER]}, "status": READY}),
    (
        NODES,
        {"metadata": METADATA, "status": READY | {"addresses": [{"type": "InternalIP", "address": "1"}]}},
    ),
    (CLAIMS, {"metadata": METADATA, "spec": {"devices": {"requests": [{"name": "r", "exactly": {}}]}}}),
    (
        "/apis/batch/v1/namespaces/default/jobs",
        {"metadata": METADATA, "spec": {"template": {"spec": {"containers": [CONTAINER]}}}},
    ),
    ("/api/v1/namespaces/default/events", {"involvedObject": {"kind": "Pod"}, "lastTimestamp": "2026-01-01"}),
]
ODD: list[Any] = [
    None,
    [],
    {},
    "",
    0,
    -1,
    10**30,
    True,
    "x",
    [None],
    {"x": None},
    [1],
    1.5,
    [{}],
    [[]],
    "9" * 5000,
]


class Sender:
    def __init__(self) -> None:
        self.kube = FakeKube(now=lambda: 1e9)
        self._transport = KubeTransport(self.kube, "u")

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "",
    ) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": content_type, "Accept": accept}
        request = httpx2.Request(method, f"http://x{path}", content=content, headers=headers)
        answer = await self._transport.handle_async_request(request)
        assert answer.status_code < 500, (method, path, content[:200])
        return answer.status_code, msgspec.json.decode(await answer.aread())

    async def a_map(self, name: str = "a") -> None:
        assert (await self.ask("POST", MAPS, {"metadata": {"name": name}, "data": {"a": "b"}}))[0] == 201

    async def a_pod(self) -> None:
        pod = {"metadata": {"name": "p"}, "spec": {"containers": [CONTAINER]}}
        assert (await self.ask("POST", PODS, pod))[0] == 201


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def with_odd(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = copy.copy(value)
    changed[path[0]] = with_odd(value[path[0]], path[1:], odd)
    return changed


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_written_is_answered_and_costs_no_other_object_anything(seed: int) -> None:
    async def run() -> None:
        sender, rng = Sender(), random.Random(seed)
        odd = [(base, obj, path, value) for base, obj in OBJECTS for path in places(obj) for value in ODD]
        for number, (base, obj, path, value) in enumerate(rng.sample(odd, 150)):
            name = f"z{number}"
            body = with_odd(obj, path, value)
            if isinstance(body, dict) and isinstance(body.get("metadata", {}), dict):
                body = {**body, "metadata": {"name": name, **body.get("metadata", {})}}
            await sender.ask("POST", base, body)
            here = f"{base}/{name}"
            await sender.ask("PATCH", here, body, rng.choice([MERGE, STRATEGIC]))
            await sender.ask("PATCH", f"{here}?fieldManager=kubectl&force=true", body, APPLY)
            await sender.ask("PATCH", f"{here}/status", body, MERGE)
            await sender.ask("PUT", here, body)
            await sender.ask("GET", base, accept=TABLE)
            await sender.ask("DELETE", here)
            await sender.ask("PATCH", here, {"metadata": {"finalizers": None}}, MERGE)

    asyncio.run(run())


ODD_METADATA: list[Object] = [
    {"ownerReferences": [{}]},
    {"ownerReferences": [OWNER | {"uid": []}]},
    {"ownerReferences": [{"name": "x"}]},
    {"ownerReferences": "x"},
    {"finalizers": 5},
    {"finalizers": [{}]},
    {"labels": {"a": 5}},
    {"annotations": 5},
    {"name": 1.5},
    {"name": "another"},
    {"namespace": "another"},
    {"namespace": None},
]


@pytest.mark.parametrize("metadata", ODD_METADATA, ids=str)
def test_a_refused_write_leaves_the_object_and_its_version_as_they_were(metadata: Object) -> None:
    async def run() -> None:
        sender = Sender()
        await sender.a_map()
        before = await sender.ask("GET", MAPS)
        patch = {"metadata": metadata, "data": {"a": "changed"}}
        assert (await sender.ask("PATCH", f"{MAPS}/a", patch, MERGE))[0] in (400, 422)
        assert await sender.ask("GET", MAPS) == before
        assert (await sender.ask("PATCH", f"{MAPS}/a", {"data": {"a": "c"}}, MERGE))[0] == 200
        assert (await sender.ask("DELETE", f"{MAPS}/a"))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("name", [1.5, 5, [{}], {}], ids=str)
def test_a_name_is_a_text(name: object) -> None:
    async def run() -> None:
        sender = Sender()
        await sender.a_map()
        assert (await sender.ask("POST", MAPS, {"metadata": {"name": name}}))[0] in (400, 422)
        assert len((await sender.ask("GET", MAPS))[1]["items"]) == 1

    asyncio.run(run())


def test_the_store_takes_a_write_whole_or_not_at_all() -> None:
    store = FakeKube(now=lambda: 1e9).store
    good: Object = {"metadata": {"name": "a", "namespace": "n", "uid": "1"}}
    stored, version = store.put(objects.CONFIG_MAP, good), store.version
    bad: Object = {"metadata": good["metadata"] | {"ownerReferences": [{"name": "x"}]}}
    with pytest.raises(KeyError):
        store.put(objects.CONFIG_MAP, bad)
    assert store.find(objects.CONFIG_MAP, ("n", "a")) is stored
    assert store.version == version
    assert store.drop(objects.CONFIG_MAP, ("n", "a"))["metadata"]["resourceVersion"] == str(version + 1)


DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000


@pytest.mark.parametrize(
    ("method", "path", "body", "content_type", "code"),
    [
        ("POST", PODS, DEEP, "", 400),
        ("PATCH", f"{PODS}/p", DEEP, MERGE, 400),
        ("POST", PODS, b"[" * 500 + b"]" * 500, "", 400),
        ("GET", "/", None, "", 404),
        ("GET", "/api/v9", None, "", 404),
        ("GET", "/apis/x", None, "", 404),
        ("GET", "/apis/x/v1", None, "", 404),
        ("POST", "/apis", {}, "", 404),
        ("PUT", PODS, {}, "", 405),
        ("POST", f"{PODS}/p/binding", {}, "", 400),
        ("POST", f"{PODS}/p/binding", {"target": {"name": "n"}, "metadata": 5}, "", 400),
        ("POST", f"{PODS}/p/eviction", {"deleteOptions": 5}, "", 400),
        ("DELETE", f"{PODS}/p", 5, "", 400),
        ("DELETE", f"{PODS}/p", {"preconditions": 5}, "", 400),
        ("DELETE", f"{PODS}/p", {"dryRun": 5}, "", 400),
        ("DELETE", f"{PODS}/p", {"dryRun": ["Some"]}, "", 422),
        ("DELETE", f"{PODS}/p", {"gracePeriodSeconds": 10**30}, "", 400),
        ("PATCH", f"{PODS}/p", [5], JSON, 400),
        ("PATCH", f"{PODS}/p", [{"op": "add", "path": 5, "value": 1}], JSON, 400),
        ("PATCH", f"{PODS}/p", [{"op": "test", "value": 1}], JSON, 400),
        ("PATCH", f"{PODS}/p", [{"op": "add", "path": "x", "value": 1}], JSON, 422),
        ("PATCH", f"{PODS}/p", [{"op": "add", "path": "/spec/containers/²", "value": 1}], JSON, 422),
        ("PATCH", f"{PODS}/p", [{"op": "test", "path": "/spec/containers/-1", "value": 1}], JSON, 422),
        ("PATCH", f"{PODS}/p", [{"op": "add", "path": "/metadata/name/x", "value": 1}], JSON, 422),
        ("PATCH", f"{PODS}/p", [{"op": "remove", "path": "/metadata"}], JSON, 422),
        ("GET", f"{PODS}?resourceVersion={'9' * 5000}", None, "", 400),
        ("GET", f"{PODS}?limit={'9' * 5000}", None, "", 400),
        ("GET", f"{PODS}?limit=²", None, "", 400),
        ("POST", CLAIMS, {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [5]}}}, "", 400),
        ("POST", CLAIMS, {"metadata": {"name": "c"}, "spec": {"devices": []}}, "", 400),
    ],
)
def test_each_odd_request_has_its_refusal(
    method: str, path: str, body: Any, content_type: str, code: int
) -> None:
    async def run() -> None:
        sender = Sender()
        await sender.a_pod()
        before = await sender.ask("GET", PODS)
        answered, answer = await sender.ask(method, path, body, content_type or "application/json")
        assert answered == code, answer
        assert await sender.ask("GET", PODS) == before

    asyncio.run(run())


def test_a_node_that_cannot_be_printed_stands_among_the_others() -> None:
    async def run() -> None:
        sender = Sender()
        for name, status in (("n0", READY), ("n1", {"conditions": [{}], "addresses": [{}]})):
            made, _ = await sender.ask("POST", NODES, {"metadata": {"name": name}, "status": status})
            assert made == 201
        _, table = await sender.ask("GET", NODES, accept=TABLE)
        assert [row["cells"][:2] for row in table["rows"]] == [["n0", "Ready"], ["n1", "<unknown>"]]

    asyncio.run(run())


def test_what_a_patch_copies_has_an_end() -> None:
    async def run() -> None:
        sender = Sender()
        await sender.a_map()
        doubling = [{"op": "copy", "from": "", "path": f"/data/x{step}"} for step in range(40)]
        code, answer = await sender.ask("PATCH", f"{MAPS}/a", doubling, JSON)
        assert (code, "exceeds the limit" in answer["message"]) == (422, True)
        many = [{"op": "test", "path": "/data/a", "value": "b"}] * (OPERATIONS + 1)
        assert (await sender.ask("PATCH", f"{MAPS}/a", many, JSON))[0] == 413
        assert (await sender.ask("PATCH", f"{MAPS}/a", many[1:], JSON))[0] == 200

    asyncio.run(run())


def test_a_body_has_a_largest_size() -> None:
    async def run() -> None:
        sender = Sender()
        code, answer = await sender.ask("POST", MAPS, b" " * (MAX_BODY_BYTES + 1))
        assert (code, answer["reason"]) == (413, "RequestEntityTooLarge")

    asyncio.run(run())


def test_over_http_no_more_of_a_body_is_kept_than_may_be_sent() -> None:
    async def run() -> None:
        served = httpx2.ASGITransport(KubeApplication(FakeKube(now=lambda: 1e9), "secret", "u"))
        async with httpx2.AsyncClient(transport=served, base_url="http://fake.invalid") as http:
            bearer = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
            for body, code in ((b" " * (MAX_BODY_BYTES + 1), 413), (b'{"metadata":{"name":"a"}}', 201)):
                assert (await http.post(MAPS, content=body, headers=bearer)).status_code == code

    asyncio.run(run())
