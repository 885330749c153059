"""The informer against the fake server, with everything that can go wrong between them."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.informer import Informer, ObjectCache, key_of
from rackloom.core.cluster.objects import CONFIG_MAP, Object, index_by_label, index_by_uid
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop


def config_map(name: str, label: str = "", value: str = "") -> Object:
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"t": label}},
        "data": {"value": value},
    }


@asynccontextmanager
async def following(api: KubeApi, **options: object) -> AsyncGenerator[Informer, None]:
    informer = Informer(api, CONFIG_MAP, rng=random.Random(0), indexers={"t": index_by_label("t")}, **options)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    try:
        yield informer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_list_then_changes() -> None:
    async def run() -> None:
        kube = FakeKube()
        api, notified = DirectApi(kube, "test"), []
        await api.create(CONFIG_MAP, config_map("a", "x"))
        async with following(DirectApi(kube, "informer")) as informer:
            informer.on_change(lambda obj: notified.append(obj["metadata"]["name"]))
            assert not informer.is_synced
            await informer.synced()
            await api.create(CONFIG_MAP, config_map("b", "x"))
            await api.patch(CONFIG_MAP, "a", "default", {"metadata": {"labels": {"t": "y"}}})
            await api.delete(CONFIG_MAP, "b", "default")
            await asyncio.sleep(1)
            assert notified == ["a", "b", "a", "b"]
            assert [obj["metadata"]["name"] for obj in informer.cache.find("t", "y")] == ["a"]
            assert informer.cache.find("t", "x") == ()
            assert informer.cache.get("b", "default") is None
            assert informer.unknown_since is None
        counted = {call.verb: n for call, n in kube.calls.items() if call.user == "informer"}
        assert counted == {"list": 1, "watch": 1}

    event_loop.run_simulation(1, run)


def test_an_ended_watch_goes_on_without_a_list_and_an_expired_one_with() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "test")
        async with following(DirectApi(kube, "informer")) as informer:
            await informer.synced()
            await api.create(CONFIG_MAP, config_map("a"))
            await asyncio.sleep(1)
            kube.store.hang_up()
            await api.create(CONFIG_MAP, config_map("b"))
            await asyncio.sleep(1)
            assert informer.cache.get("b", "default") is not None
            lists = sum(n for call, n in kube.calls.items() if call.verb == "list")
            assert lists == 1
            kube.faults.add(RequestFault(verb="watch"))
            kube.store.hang_up()
            await api.create(CONFIG_MAP, config_map("c"))
            await api.delete(CONFIG_MAP, "a", "default")
            kube.store.compact()
            await asyncio.sleep(5)
            kube.faults.clear()
            await asyncio.sleep(60)
            assert informer.cache.keys() == {("default", "b"), ("default", "c")}

    event_loop.run_simulation(1, run)


def test_what_is_unknown_says_since_when() -> None:
    async def run() -> None:
        kube = FakeKube(bookmark_seconds=10.0)
        kube.faults.add(RequestFault(verb="list", code=500))
        loop = asyncio.get_running_loop()
        async with following(DirectApi(kube, "informer")) as informer:
            await asyncio.sleep(5)
            assert informer.unknown_since == pytest.approx(0.0)
            kube.faults.clear()
            await asyncio.sleep(25)
            assert informer.unknown_since is None
            seen = informer.observed_at
            assert seen is not None
            kube.faults.add(RequestFault(verb="watch"))
            kube.faults.add(RequestFault(verb="list", code=503))
            kube.store.hang_up()
            await asyncio.sleep(100)
            assert informer.unknown_since == pytest.approx(seen)
            kube.faults.clear()
            await asyncio.sleep(60)
            assert informer.unknown_since is None
            assert informer.observed_at is not None
            assert loop.time() - informer.observed_at <= 10.1

    event_loop.run_simulation(1, run)


def test_a_server_that_is_away_is_not_hammered() -> None:
    async def run() -> None:
        kube = FakeKube()
        kube.faults.add(RequestFault(verb="list", code=503))
        async with following(DirectApi(kube, "informer")):
            await asyncio.sleep(600)
        assert sum(kube.calls.values()) < 60

    event_loop.run_simulation(1, run)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "change", "delete", "hang up", "compact", "break", "mend"]),
        st.sampled_from("abc"),
        st.sampled_from("xy"),
        st.floats(0, 3),
    ),
    max_size=25,
)


@given(actions=ACTIONS, seed=st.integers(0, 1000))
def test_the_cache_comes_to_equal_the_server(actions: list[tuple[str, str, str, float]], seed: int) -> None:
    async def run() -> None:
        kube = FakeKube(seed=seed, window=5)
        kube.faults.delay(0.0, 0.5)
        api = DirectApi(kube, "test")
        async with following(DirectApi(kube, "informer")) as informer:
            for what, name, value, seconds in actions:
                await act(kube, api, what, name, value)
                await asyncio.sleep(seconds)
            kube.faults.clear()
            await asyncio.sleep(120)
            listed = (await api.list(CONFIG_MAP)).items
            assert sorted(informer.cache, key=key_of) == sorted(listed, key=key_of)
            for value in "xy":
                indexed = {key_of(obj) for obj in informer.cache.find("t", value)}
                assert indexed == {key_of(o) for o in listed if o["metadata"]["labels"]["t"] == value}

    event_loop.run_simulation(seed, run)


async def act(kube: FakeKube, api: KubeApi, what: str, name: str, value: str) -> None:
    with suppress(KubeError):
        match what:
            case "create":
                await api.create(CONFIG_MAP, config_map(name, value))
            case "change":
                await api.patch(CONFIG_MAP, name, "default", {"metadata": {"labels": {"t": value}}})
            case "delete":
                await api.delete(CONFIG_MAP, name, "default")
            case "hang up":
                kube.store.hang_up()
            case "compact":
                kube.store.compact()
            case "break":
                kube.faults.add(RequestFault(user="informer", rate=0.7, code=500))
            case "mend":
                kube.faults.clear()


def by_owner(obj):
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences", ())]


def test_indexes_by_owner_and_uid() -> None:
    cache = ObjectCache({"owner": by_owner, "uid": index_by_uid})
    owned = {
        "metadata": {
            "name": "a",
            "namespace": "n",
            "uid": "1",
            "ownerReferences": [{"uid": "7"}, {"uid": "8"}],
        }
    }
    cache.put(owned)
    assert cache.find("owner", "8") == cache.find("uid", "1") == (owned,)
    cache.put({"metadata": {"name": "a", "namespace": "n", "uid": "2", "ownerReferences": [{"uid": "8"}]}})
    assert cache.find("owner", "7") == cache.find("uid", "1") == ()
    assert len(cache.find("owner", "8")) == 1
    cache.drop(("n", "a"))
    assert cache.find("owner", "8") == ()
    assert len(cache) == 0
