"""The client over HTTP: additions of the wire to the contract."""

import asyncio
import json
import stat
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.claim.kube.world import KUBECONFIG

from rackloom.claim.kube import connection
from rackloom.claim.kube.api import Conflict, Expired, KubeError, NotFound, Rejected
from rackloom.claim.kube.client import KubeClient, RateLimiter, connect
from rackloom.claim.kube.decoding import watch_events
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.http import KubeTransport
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

Handler = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def against(kubeconfig: Path, handler: Handler) -> KubeClient:
    return connect(kubeconfig, user_agent="test/1", transport=httpx2.MockTransport(handler))


def raised_by(kubeconfig: Path, answer: httpx2.Response) -> KubeError:
    async def run() -> KubeError:
        async with against(kubeconfig, lambda _: answer) as api:
            with pytest.raises(KubeError) as error:
                await api.get(objects.POD, "a", "default")
        return error.value

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, Rejected),
        (401, KubeError),
        (403, Rejected),
        (404, NotFound),
        (405, Rejected),
        (409, Conflict),
        (410, Expired),
        (413, Rejected),
        (415, Rejected),
        (422, Rejected),
        (429, KubeError),
        (500, KubeError),
        (503, KubeError),
    ],
)
def test_what_each_answer_means(kubeconfig: Path, code: int, kind: type[KubeError]) -> None:
    body = {"kind": "Status", "reason": "Because", "message": "so it is", "code": code}
    error = raised_by(kubeconfig, httpx2.Response(code, json=body))
    assert type(error) is kind
    assert (error.code, error.reason, error.message) == (code, "Because", "so it is")
    assert error.retry_after is None


def test_when_to_come_back(kubeconfig: Path) -> None:
    answer = httpx2.Response(429, headers={"Retry-After": "7"}, text="slow down")
    error = raised_by(kubeconfig, answer)
    assert (error.retry_after, error.message) == (7.0, "slow down")
    body = {"message": "later", "details": {"retryAfterSeconds": 3}}
    assert raised_by(kubeconfig, httpx2.Response(503, json=body)).retry_after == 3.0


def test_no_answer_and_half_an_answer(kubeconfig: Path) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("nobody there", request=request)

    async def run() -> None:
        async with against(kubeconfig, refuse) as api:
            with pytest.raises(KubeError, match="nobody there") as error:
                await api.get(objects.NODE, "a")
            assert error.value.code == 0

    asyncio.run(run())
    assert raised_by(kubeconfig, httpx2.Response(200, text='{"kind":')).code == 0


def test_requests_say_who_asks_and_where(kubeconfig: Path) -> None:
    seen: list[httpx2.Request] = []

    def note(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json={"metadata": {}})

    async def run() -> None:
        async with against(kubeconfig, note) as api:
            domain = {"metadata": {"name": "a/b", "namespace": "n"}}
            await api.apply(objects.COMPUTE_DOMAIN, domain, manager="m", force=True, subresource="status")
            await api.delete(objects.NODE, "x", uid="u", propagation="Foreground", grace_seconds=0)

    asyncio.run(run())
    applied, deleted = seen
    assert applied.headers["User-Agent"] == "test/1"
    assert applied.headers["Content-Type"] == "application/apply-patch+yaml"
    path = "/apis/resource.nvidia.com/v1beta1/namespaces/n/computedomains/a%2Fb/status"
    assert applied.url.raw_path.decode() == f"{path}?fieldManager=m&force=true"
    body = json.loads(applied.content)
    assert (body["apiVersion"], body["kind"]) == ("resource.nvidia.com/v1beta1", "ComputeDomain")
    assert deleted.url.path == "/api/v1/nodes/x"
    assert json.loads(deleted.content) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u"},
        "propagationPolicy": "Foreground",
        "gracePeriodSeconds": 0,
    }


def over_fake(kubeconfig: Path, play: Callable[[FakeKube, KubeClient], Awaitable[None]]) -> None:
    async def run() -> None:
        fake = FakeKube()
        async with connect(kubeconfig, user_agent="test/1", transport=KubeTransport(fake)) as api:
            await play(fake, api)

    event_loop.run_simulation(0, run)


def test_long_lists_come_in_chunks(kubeconfig: Path) -> None:
    async def play(fake: FakeKube, api: KubeClient) -> None:
        direct = DirectApi(fake, "maker")
        for number in range(1203):
            await direct.create(
                objects.CONFIG_MAP, {"metadata": {"name": f"c{number}", "namespace": "default"}}
            )
        listed = await api.list(objects.CONFIG_MAP, "default")
        assert len({item["metadata"]["name"] for item in listed.items}) == 1203
        assert listed == await direct.list(objects.CONFIG_MAP, "default")

    over_fake(kubeconfig, play)


def test_a_list_that_outlives_the_servers_past_is_taken_whole(kubeconfig: Path) -> None:
    pages: list[str] = []
    expired = {"reason": "Expired", "message": "The provided continue parameter is too old", "code": 410}

    def serve(request: httpx2.Request) -> httpx2.Response:
        pages.append(request.url.query.decode())
        if "continue" in request.url.params:
            return httpx2.Response(410, json=expired)
        more = {"continue": "x"} if "limit" in request.url.params else {}
        item = {"metadata": {"name": "a"}}
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "5"} | more, "items": [item]})

    async def run() -> None:
        async with against(kubeconfig, serve) as api:
            listed = await api.list(objects.NODE)
            assert [item["kind"] for item in listed.items] == ["Node"]

    asyncio.run(run())
    assert pages == ["limit=500", "limit=500&continue=x", ""]


def test_a_watch_that_breaks_is_an_error_and_one_that_ends_is_not(kubeconfig: Path) -> None:
    async def play(fake: FakeKube, api: KubeClient) -> None:
        fake.watch_seconds = 5.0
        events = api.watch(objects.NODE, resource_version="1")
        assert [event async for event in events if event.type != "BOOKMARK"] == []
        fake.faults.add(RequestFault(verb="watch"))
        with pytest.raises(KubeError) as error:
            await anext(api.watch(objects.NODE, resource_version="1"))
        assert error.value.code == 0

    over_fake(kubeconfig, play)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lines_of_a_watch_are_whole_whatever_the_chunks(size: int) -> None:
    value = "a\u2028b\x85c"
    lines = [
        json.dumps({"type": "ADDED", "object": {"n": n, "v": value}}, ensure_ascii=False) for n in range(3)
    ]
    body = ("\n".join(lines) + "\n").encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def read() -> list[Any]:
        async with aclosing(watch_events(chunks())) as events:
            return [event.object async for event in events]

    assert asyncio.run(read()) == [{"n": n, "v": value} for n in range(3)]


def test_requests_are_paced() -> None:
    async def run() -> list[float]:
        pace, loop, times = RateLimiter(10.0, 3), asyncio.get_running_loop(), []
        for _ in range(6):
            await pace.step()
            times.append(loop.time())
        await asyncio.sleep(10)
        for _ in range(4):
            await pace.step()
            times.append(loop.time())
        return times

    times = event_loop.run_simulation(0, run)
    assert times[:6] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])
    assert times[6:] == pytest.approx([10.3, 10.3, 10.3, 10.4])


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_credential_plugin_is_asked_for_a_token(tmp_path: Path, version: str) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text(
        "#!/bin/sh\n"
        f'case "$KUBERNETES_EXEC_INFO" in *client.authentication.k8s.io/{version}\\"*) ;; *) exit 1;; esac\n'
        'printf \'{"status": {"token": "secret-%s"}}\' "$1"\n'
    )
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    command = {
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "command": str(plugin),
        "args": ["one"],
        "env": None,
    }
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://fake.invalid"}}],
        "users": [{"name": "u", "user": {"exec": command}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    seen: list[str] = []

    def note(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers["Authorization"])
        return httpx2.Response(200, json={})

    async def run() -> None:
        async with against(path, note) as api:
            await api.get(objects.NODE, "a")

    asyncio.run(run())
    assert seen == ["Bearer secret-one"]


def test_a_kubeconfig_that_does_not_serve_is_refused(kubeconfig: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not found") as error:
        connect(tmp_path / "missing")
    assert error.value.nearest_fix
    with pytest.raises(Refused, match="Context 'other' not found"):
        connect(kubeconfig, "other")
    broken = tmp_path / "broken"
    for text in ("clusters: 5", "[]", ""):
        broken.write_text(text)
        with pytest.raises(Refused, match="no API server from"):
            connect(broken)


def test_without_any_configuration_it_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    if Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists():
        pytest.skip("runs in a pod with a service account")
    with pytest.raises(Refused, match="--kubeconfig"):
        connect(None)


def test_a_kubeconfig_that_is_no_yaml_is_refused_without_what_it_says(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("users:\n- user: {}\n  token: SECRETTOKEN: x\n")
    with pytest.raises(Refused, match="no YAML at line 3") as refused:
        connect(broken, user_agent="test/1")
    report = "".join(traceback.format_exception(refused.value))
    assert "SECRETTOKEN" not in report


def test_of_lists_and_watches_is_given_what_is_wanted(kubeconfig: Path) -> None:
    """Of two config maps the filter keeps one, with its name and version, until it is no longer wanted."""

    def keep(_: ResourceKind, obj: Object) -> Object | None:
        metadata = {key: obj["metadata"][key] for key in ("namespace", "name", "resourceVersion")}
        return {"metadata": metadata} if (obj.get("data") or {}).get("wanted") else None

    def config_map(name: str, **data: str) -> Object:
        return {"metadata": {"name": name, "namespace": "default"}, "data": data}

    async def run() -> None:
        fake = FakeKube()
        maker = DirectApi(fake, "maker")
        await maker.create(objects.CONFIG_MAP, config_map("a", wanted="yes"))
        await maker.create(objects.CONFIG_MAP, config_map("b"))
        async with connect(kubeconfig, transport=KubeTransport(fake), keep=keep) as api:
            listed = await api.list(objects.CONFIG_MAP)
            assert [(item["metadata"]["name"], *item) for item in listed.items] == [("a", "metadata")]
            await maker.patch(objects.CONFIG_MAP, "b", "default", {"data": {"wanted": "yes"}})
            last = await maker.patch(objects.CONFIG_MAP, "a", "default", {"data": {"wanted": ""}})
            changes = []
            async with aclosing(
                api.watch(objects.CONFIG_MAP, resource_version=listed.resource_version)
            ) as events:
                async for event in events:
                    changes.append((event.type, event.object["metadata"]["name"]))
                    if event.object["metadata"]["resourceVersion"] == last["metadata"]["resourceVersion"]:
                        break
            assert changes == [("MODIFIED", "b"), ("DELETED", "a")]

    event_loop.run_simulation(0, run)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["exit 3", "echo none", "echo '{}'", "exec sleep 600"])
def test_a_credential_plugin_that_fails_or_hangs_is_no_answer(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(connection, "EXEC_TIMEOUT_SECONDS", 0.5)
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\n{script}\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://fake.invalid"}}],
        "users": [{"name": "u", "user": {"exec": command}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))

    async def run() -> None:
        async with against(path, lambda _: httpx2.Response(200, json={})) as api:
            with pytest.raises(KubeError) as read:
                await api.get(objects.NODE, "a")
            with pytest.raises(KubeError) as watched:
                await anext(api.watch(objects.NODE, resource_version="1"))
        assert (read.value.code, watched.value.code) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("body", ['{"error": "sign in"}', "[]", '{"metadata": {}, "items": [1]}'])
def test_what_no_api_server_wrote_is_no_answer(kubeconfig: Path, body: str) -> None:
    async def run() -> None:
        async with against(kubeconfig, lambda _: httpx2.Response(200, text=f"{body}\n")) as api:
            with pytest.raises(KubeError) as listed:
                await api.list(objects.NODE)
            with pytest.raises(KubeError) as watched:
                await anext(api.watch(objects.NODE, resource_version="1"))
        assert (listed.value.code, watched.value.code) == (0, 0)

    asyncio.run(run())


def test_a_credential_plugin_that_speaks_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    command = {"apiVersion": "client.authentication.k8s.io/v7", "command": "true"}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://fake.invalid"}}],
        "users": [{"name": "u", "user": {"exec": command}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    with pytest.raises(Refused, match="io/v7 are not known"):
        connect(path)
