"""The simulated server with many clients: the cost of a list or a change does not grow with the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.api import WatchEvent
from rackloom.core.cluster.objects import CONFIG_MAP, Object
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.queries import selector_predicate
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import WatchScope
from rackloom.lab.virtual import event_loop

SELECTORS = [{"fields": "metadata.name=job-{0}"}, {"labels": "job={0}"}, {"labels": "job in ({0}),!gone"}]


def a_job(number: int, **data: str) -> Object:
    name, labels = f"job-{number}", {"job": f"{number}"}
    return {"metadata": {"name": name, "namespace": "default", "labels": labels}, "data": data}


async def follow(events: AsyncIterator[WatchEvent], into: list[WatchEvent]) -> None:
    async for event in events:
        into += [event]


async def work_of(jobs: int, selector: dict[str, str]) -> None:
    """Each job's client follows its own object, lists it, and changes it twice."""
    kube = FakeKube()
    api, seen = DirectApi(kube, "x"), [list[WatchEvent]() for _ in range(jobs)]
    own = [{key: text.format(number) for key, text in selector.items()} for number in range(jobs)]
    watches = [
        asyncio.create_task(follow(api.watch(CONFIG_MAP, "default", resource_version="0", **only), into))
        for only, into in zip(own, seen, strict=True)
    ]
    await asyncio.sleep(1.0)
    for number, only in enumerate(own):
        await api.create(CONFIG_MAP, a_job(number))
        assert len((await api.list(CONFIG_MAP, "default", **only)).items) == 1
        await api.patch(CONFIG_MAP, f"job-{number}", "default", {"data": {"a": "b"}})
    await asyncio.sleep(1.0)
    assert [len(events) for events in seen] == [2] * jobs
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: next(iter(selector.values())))
def test_the_work_for_a_client_does_not_grow_with_the_others(
    selector: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    holds = WatchScope.holds

    def counting(scope: WatchScope, obj: Object | None) -> bool:
        nonlocal looked
        looked += 1
        return holds(scope, obj)

    monkeypatch.setattr(WatchScope, "holds", counting)
    each = []
    for jobs in (20, 80):
        looked = 0
        event_loop.run_simulation(0, lambda jobs=jobs: work_of(jobs, selector))  # type: ignore[misc]
        each.append(looked / jobs)
    assert each[1] <= each[0] * 1.1


NAMES, VALUES = st.sampled_from("abc"), st.sampled_from(["", "1", "2"])
TERMS = st.sampled_from(
    ["x=1", "x==2", "x!=1", "x in (1)", "x in (1,2)", "x notin (1)", "x", "!x", "y=1", "x="]
)
FIELDS = ["", "metadata.name=a", "metadata.name!=a", "metadata.namespace=team", "metadata.name=b"]
STEPS = st.lists(
    st.tuples(st.sampled_from(["default", "team"]), NAMES, st.dictionaries(st.sampled_from("xy"), VALUES)),
    max_size=12,
)


@given(
    STEPS,
    st.lists(TERMS, max_size=2).map(",".join),
    st.sampled_from(FIELDS),
    st.sampled_from([None, "default", "team"]),
)
def test_a_selector_finds_what_reading_everything_finds(
    steps: list[tuple[str, str, dict[str, str]]], labels: str, fields: str, namespace: str | None
) -> None:
    async def run() -> None:
        kube = FakeKube(namespaces=("default", "team"))
        api = DirectApi(kube, "x")
        await api.list(CONFIG_MAP, namespace, labels=labels, fields=fields)
        followed: dict[tuple[str, str], Object] = {}
        async with aclosing(
            api.watch(CONFIG_MAP, namespace, resource_version="0", labels=labels, fields=fields)
        ) as events:
            reading = asyncio.create_task(_replayed(events, followed))
            await asyncio.sleep(1.0)
            for where, name, have in steps:
                key = (where, name)
                if kube.store.find(CONFIG_MAP, key) is None:
                    meta = {"name": name, "namespace": where, "labels": have}
                    await api.create(CONFIG_MAP, {"metadata": meta})
                elif have:
                    await api.patch(
                        CONFIG_MAP, name, where, {"metadata": {"labels": {"x": None, "y": None} | have}}
                    )
                else:
                    await api.delete(CONFIG_MAP, name, where)
            await asyncio.sleep(1.0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        listed = (await api.list(CONFIG_MAP, namespace, labels=labels, fields=fields)).items
        everything = (await api.list(CONFIG_MAP)).items
        scope = WatchScope(namespace, selector_predicate(labels, fields))
        assert list(listed) == [obj for obj in everything if scope.holds(obj)]
        assert followed == {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in listed}

    event_loop.run_simulation(0, run)


async def _replayed(events: AsyncIterator[WatchEvent], into: dict[tuple[str, str], Object]) -> None:
    async for event in events:
        meta = event.object["metadata"]
        if event.type == "DELETED":
            del into[meta["namespace"], meta["name"]]
        elif event.type != "BOOKMARK":
            into[meta["namespace"], meta["name"]] = event.object
