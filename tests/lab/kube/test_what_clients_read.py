"""Clients of a server that lags, and of one with watches that repeat or reorder events."""

import asyncio
from contextlib import aclosing

import pytest

from rackloom.core.cluster.objects import NODE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.queries import ListOptions
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

STUCK, FREE = "stuck", "free"


def node(name, **labels):
    return {"metadata": {"name": name, "labels": labels}}


def names(listed):
    return [item["metadata"]["name"] for item in listed.items]


def run(story):
    return event_loop.run_simulation(1, lambda: story(FakeKube(seed=5)))


async def events_since(api, since, count):
    """The first `count` changes after a version, as a watch reports them."""
    found = []
    async with aclosing(api.watch(NODE, resource_version=since)) as events:
        async for event in events:
            found.append((event.type, event.object["metadata"]["name"]))
            if len(found) == count:
                break
    return found


async def old_list(api, version="0"):
    """A list of at least that version, from the server's memory."""
    return await api.list_of(NODE, None, ListOptions(version))


def test_who_is_stuck_lists_the_past_from_memory_and_hears_nothing_until_the_server_catches_up():
    async def story(kube):
        stuck, free = DirectApi(kube, STUCK), DirectApi(kube, FREE)
        await free.create(NODE, node("old"))
        since = (await stuck.list(NODE)).resource_version
        hearing = asyncio.create_task(events_since(stuck, since, 2))
        kube.stale_reads.begin(kube.store, kube.schemas, {STUCK})
        await free.create(NODE, node("new"))
        await free.delete(NODE, "old")
        await asyncio.sleep(10)
        for version in ("0", since):
            listed = await old_list(stuck, version)
            assert (names(listed), listed.resource_version) == (["old"], since)
        assert names(await old_list(free)) == ["new"]
        assert names(await stuck.list(NODE)) == ["new"], "a plain list is never old"
        newest = (await free.list(NODE)).resource_version
        assert names(await old_list(stuck, newest)) == ["new"], "nor one of a version that it lacks"
        assert await events_since(stuck, "0", 1) == [("ADDED", "old")], "a watch begins with what it has"
        assert await events_since(stuck, "", 1) == [("ADDED", "new")], "unless it asks for the newest"
        assert not hearing.done()
        assert kube.stale_reads.hits > 0
        kube.stale_reads.end()
        assert await hearing == [("ADDED", "new"), ("DELETED", "old")]
        assert names(await old_list(stuck)) == ["new"]

    run(story)


def test_a_bookmark_is_no_change_that_was_kept_back():
    async def story(kube):
        stuck = DirectApi(kube, STUCK)
        since = (await stuck.list(NODE)).resource_version
        hearing = asyncio.create_task(events_since(stuck, since, 1))
        kube.stale_reads.begin(kube.store, kube.schemas, {STUCK})
        await asyncio.sleep(kube.bookmark_seconds * 2)
        assert (kube.stale_reads.hits, hearing.done()) == (0, False)
        hearing.cancel()

    run(story)


def test_writes_and_reads_of_one_object_of_who_is_stuck_go_to_the_newest_state():
    async def story(kube):
        stuck = DirectApi(kube, STUCK)
        kube.stale_reads.begin(kube.store, kube.schemas, {STUCK})
        await stuck.create(NODE, node("new"))
        assert (await stuck.get(NODE, "new"))["metadata"]["name"] == "new"
        assert names(await old_list(stuck)) == []

    run(story)


def test_every_change_can_be_told_twice():
    async def story(kube):
        api = DirectApi(kube, STUCK)
        kube.disordered_events.begin({STUCK}, twice=1.0)
        hearing = asyncio.create_task(events_since(api, str(kube.store.version), 4))
        await asyncio.sleep(0.001)
        await api.create(NODE, node("a"))
        await api.create(NODE, node("b"))
        assert await hearing == [("ADDED", "a")] * 2 + [("ADDED", "b")] * 2
        assert kube.disordered_events.hits == 2

    run(story)


def test_changes_of_different_objects_change_places_and_those_of_one_do_not():
    async def story(kube):
        api = DirectApi(kube, STUCK)
        kube.disordered_events.begin({STUCK}, late=1.0)
        hearing = asyncio.create_task(events_since(api, str(kube.store.version), 5))
        await asyncio.sleep(0.001)
        await api.create(NODE, node("a"))
        await api.create(NODE, node("b"))
        await asyncio.sleep(1)
        await api.patch(NODE, "a", None, {"metadata": {"labels": {"x": "1"}}})
        await api.delete(NODE, "a")
        await asyncio.sleep(1)
        kube.disordered_events.end()
        await api.delete(NODE, "b")
        assert await hearing == [
            ("ADDED", "b"),
            ("ADDED", "a"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
            ("DELETED", "b"),
        ]

    run(story)


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_who_is_not_meant_hears_each_change_once_and_a_watch_that_ends_still_ends(late):
    async def story(kube):
        api = DirectApi(kube, FREE)
        kube.disordered_events.begin({FREE if late else STUCK}, late=late, twice=0.0 if late else 1.0)
        hearing = asyncio.create_task(events_since(api, str(kube.store.version), 9))
        await asyncio.sleep(0.001)
        await api.create(NODE, node("a"))
        kube.store.hang_up()
        assert await hearing == [("ADDED", "a")]
        assert kube.disordered_events.hits == 0

    run(story)


def test_faults_count_whom_they_struck_until_they_are_cleared():
    async def story(kube):
        api = DirectApi(kube, STUCK)
        kube.faults.add(RequestFault(verb="list"))
        for _ in range(3):
            with pytest.raises(Exception, match="connection reset"):
                await api.list(NODE)
        assert kube.faults.hits == 3
        kube.faults.clear()
        assert kube.faults.hits == 0

    run(story)
