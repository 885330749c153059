"""An object that an API server keeps and no recursive decoder reads costs itself, and no other object."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.claim.kube.world import KUBECONFIG

from rackloom.claim.kube import decoding
from rackloom.claim.kube.api import Rejected
from rackloom.claim.kube.client import KubeClient, connect
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object

ALLOCATED = {"allocation": {"devices": {"results": [{"device": "gpu-0"}]}}}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def claim(name: str, parameters: str) -> str:
    metadata = {"name": name, "namespace": "n", "uid": f"u-{name}", "resourceVersion": "7"}
    document = json.dumps({"metadata": metadata, "status": ALLOCATED})
    return f'{document[:-1]}, "spec": {{"text": "a\\"[[{{", "parameters": {{"a": {parameters}}}}}}}'


def asked(tmp_path: Path, answer: Callable[[httpx2.Request], str]) -> KubeClient:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return connect(path, transport=httpx2.MockTransport(lambda r: httpx2.Response(200, text=answer(r))))


def check(objects: tuple[Object, ...]) -> None:
    plain, deep, other = objects
    assert [obj["metadata"]["name"] for obj in objects] == ["plain", "deep", "other"]
    assert plain["spec"]["parameters"] == other["spec"]["parameters"] == {"a": [[]]}
    assert (deep["metadata"]["uid"], deep["status"]) == ("u-deep", ALLOCATED), "its devices are not free"
    assert decoding.TOO_DEEP_MARKER in json.dumps(deep["spec"]["parameters"])


@pytest.mark.parametrize("levels", [700, 950, 1500, 9000])
def test_one_claim_that_nests_without_end_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, levels: int
) -> None:
    items = [claim("plain", "[[]]"), claim("deep", nested(levels)), claim("other", "[[]]")]

    def answer(request: httpx2.Request) -> str:
        if "watch" in request.url.params:
            return "".join(f'{{"type": "ADDED", "object": {item}}}\n' for item in items)
        return f'{{"metadata": {{"resourceVersion": "7"}}, "items": [{",".join(items)}]}}'

    async def run() -> None:
        async with asked(tmp_path, answer) as api:
            check((await api.list(objects.RESOURCE_CLAIM)).items)
            events = api.watch(objects.RESOURCE_CLAIM, resource_version="7")
            check(tuple([event.object async for event in events]))

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records if record.name == decoding.__name__]
    assert messages == ["n/deep: nested too deeply: not read below 100 levels"] * 2


def test_what_was_not_read_whole_is_not_written(tmp_path: Path) -> None:
    methods: list[str] = []

    def answer(request: httpx2.Request) -> str:
        methods.append(request.method)
        return claim("deep", nested(1500))

    async def run() -> None:
        async with asked(tmp_path, answer) as api:
            read = await api.get(objects.RESOURCE_CLAIM, "deep", "n")
            with pytest.raises(Rejected, match="not read whole"):
                await api.replace(objects.RESOURCE_CLAIM, read)

    asyncio.run(run())
    assert methods == ["GET"]


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=9) | st.sampled_from(['"', "\\", "[", '\\"}']),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=3),
)


@given(JSON, JSON, st.integers(1, 3))
def test_all_but_what_is_too_deep_is_as_it_was(before: object, after: object, times: int) -> None:
    parts = [json.dumps(before), *[nested(2000)] * times, json.dumps(after)]
    read = decoding.decode_document(f"[{','.join(parts)}]".encode())
    assert (read[0], read[-1], len(read)) == (before, after, times + 2)


@pytest.mark.parametrize("text", ["[" * 5000, "]" * 5000, "[" * 5000 + "}" * 4999, '{"a', ""])
def test_what_is_no_json_is_said_to_be_none(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoding.decode_document(text.encode())
