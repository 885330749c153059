"""An API server's answers to lists and watches of other programs: versions, chunks, initial events."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.claim.kube.world import WIDGET, Play, World, eventually
from tests.waiting import PATIENCE, until_so

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.refusals import resource_name

FUTURE = 1_000_000
STREAMED = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
MATCH = "resourceVersionMatch"
REFUSED_LISTS = [
    ({MATCH: "Exact"}, f"{MATCH}: Forbidden: {MATCH} is forbidden unless resourceVersion is provided"),
    (
        {MATCH: "Exact", "resourceVersion": "0"},
        f'{MATCH}: Forbidden: {MATCH} "exact" is forbidden for resourceVersion "0"',
    ),
    (
        {MATCH: "Oldest", "resourceVersion": "1"},
        f'{MATCH}: Unsupported value: "Oldest": supported values: "Exact", "NotOlderThan", ""',
    ),
    ({"sendInitialEvents": "true"}, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"),
]
LATER = (429, 504)
NEEDED = f"{MATCH}: Forbidden: sendInitialEvents requires setting {MATCH} to NotOlderThan"
REFUSED_WATCHES = [
    ({"sendInitialEvents": "true"}, NEEDED),
    (
        {"sendInitialEvents": "false", MATCH: "Exact"},
        f'[{NEEDED}, {MATCH}: Unsupported value: "Exact": supported values: "NotOlderThan"]',
    ),
    (
        {MATCH: "NotOlderThan"},
        f"{MATCH}: Forbidden: {MATCH} is forbidden for watch unless sendInitialEvents is provided",
    ),
]


def place(world: World) -> str:
    return f"/apis/{WIDGET.api_version}/namespaces/{world.namespace}/{WIDGET.plural}"


async def three(world: World) -> int:
    """Make a, b and c. Returns the version at which they are listed."""
    for name in "abc":
        await world.api.create(WIDGET, world.named(name))
    return int((await world.api.list(WIDGET, world.namespace)).resource_version)


async def asked(world: World, **params: Any) -> tuple[int, Object]:
    """The first answer other than "later": a busy server may be behind, and names a time to retry."""
    async with asyncio.timeout(PATIENCE):
        while (answer := await world.http.get(place(world), params=params)).status_code in LATER:
            await asyncio.sleep(float(answer.headers["Retry-After"]))
    return answer.status_code, answer.json()


def names(answer: Object) -> list[str]:
    return [item["metadata"]["name"] for item in answer["items"]]


async def watched(world: World, count: int, heard: list[Object] | None = None, **params: Any) -> list[Object]:
    """The first `count` events of a watch, or all until it ends. Each is in `heard` as soon as it came."""
    found = [] if heard is None else heard
    async with asyncio.timeout(PATIENCE):
        query = {"watch": "true"} | params
        async with world.http.stream("GET", place(world), params=query, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                found.append(json.loads(line))
                if len(found) == count:
                    break
    return found


def brief(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]


ALL = [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]


def test_a_list_of_any_version_is_whole(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world)
        for params in ({"resourceVersion": 0, "limit": 1}, {"resourceVersion": version}):
            code, answer = await asked(world, **params)
            assert (code, names(answer)) == (200, ["a", "b", "c"])
            assert not answer["metadata"].get("continue")

    play(scenario)


def test_a_list_in_chunks_is_of_one_version(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world)
        _, first = await asked(world, limit=1)
        assert (names(first), first["metadata"]["remainingItemCount"]) == (["a"], 2)
        await world.api.delete(WIDGET, "b", world.namespace)
        _, rest = await asked(world, **{"continue": first["metadata"]["continue"]})
        assert names(rest) == ["b", "c"]
        # A server has other clients: something of theirs may have been written since.
        assert int(first["metadata"]["resourceVersion"]) >= version
        assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        code, junk = await asked(world, **{"continue": "junk"})
        assert (code, junk["reason"]) == (400, "BadRequest")

    play(scenario)


def test_a_list_of_an_exact_version_is_as_it_was(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world)
        await world.api.delete(WIDGET, "b", world.namespace)
        await world.api.create(WIDGET, world.named("d"))
        await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 1}})
        exact = {"resourceVersion": version, "resourceVersionMatch": "Exact"}
        code, was = await asked(world, **exact)
        assert (code, names(was)) == (200, ["a", "b", "c"])
        assert was["metadata"]["resourceVersion"] == str(version)
        assert "spec" not in was["items"][0]
        _, some = await asked(world, limit=2, **exact)
        assert names(some) == ["a", "b"]
        _, now = await asked(world, resourceVersion=version, resourceVersionMatch="NotOlderThan")
        assert names(now) == ["a", "c", "d"]

    play(scenario)


def test_a_list_of_a_version_that_is_gone_is_expired(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        if world.fake is not None:
            world.fake.store.compact()
        code, answer = await asked(world, resourceVersion=1, resourceVersionMatch="Exact")
        if world.fake is None and code == 200:
            return  # Kubernetes compacts etcd every five minutes: a young server has it still.
        assert (code, answer["reason"]) == (410, "Expired")
        assert answer["message"] == "The resourceVersion for the provided list is too old."

    play(scenario)


def test_a_list_of_a_version_to_come_is_to_be_asked_again(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world) + FUTURE
        answer = await world.http.get(place(world), params={"resourceVersion": version})
        body = answer.json()
        assert (answer.status_code, body["reason"]) == (504, "Timeout")
        assert body["message"].startswith(f"Timeout: Too large resource version: {version}, current: ")
        assert answer.headers["Retry-After"] == "1"
        assert body["details"]["retryAfterSeconds"] == 1

    play(scenario)


def test_what_lists_may_not_be_asked(play: Play) -> None:
    async def scenario(world: World) -> None:
        for params, why in REFUSED_LISTS:
            code, answer = await asked(world, **params)
            message = f'ListOptions.meta.k8s.io "" is invalid: {why}'
            assert (code, answer["reason"], answer["message"]) == (422, "Invalid", message)
        code, answer = await asked(world, resourceVersion="x")
        assert (code, answer["reason"]) == (400, "BadRequest")

    play(scenario)


def test_what_watches_may_not_be_asked(play: Play) -> None:
    async def scenario(world: World) -> None:
        for params, why in REFUSED_WATCHES:
            code, answer = await asked(world, watch="true", **params)
            message = f'ListOptions.meta.k8s.io "" is invalid: {why}'
            assert (code, answer["reason"], answer["message"]) == (422, "Invalid", message)
        for params in ({"labelSelector": "t in 1"}, {"fieldSelector": "spec.x=1"}):
            code, answer = await asked(world, watch="true", **params)
            assert (code, answer["reason"]) == (400, "BadRequest")

    play(scenario)


def test_few_fields_can_be_selected(play: Play) -> None:
    async def scenario(world: World) -> None:
        known = [
            (objects.POD, "spec.nodeName=a,status.phase!=Failed"),
            (objects.NODE, "spec.unschedulable=true"),
            (objects.RESOURCE_SLICE, "spec.nodeName=a,spec.driver=b"),
            (objects.EVENT, "involvedObject.uid=a,type=Warning"),
            (WIDGET, "metadata.name=a,metadata.namespace=b"),
        ]
        for kind, fields in known:
            await world.api.list(kind, fields=fields)
        unknown = [(kind, "spec.other") for kind, _ in known] + [(objects.RESOURCE_CLAIM, "spec.nodeName")]
        for kind, field in unknown:
            group = f"/apis/{kind.api_version}" if kind.group else "/api/v1"
            answer = await world.http.get(f"{group}/{kind.plural}", params={"fieldSelector": f"{field}=1"})
            found = answer.json()
            assert (answer.status_code, found["reason"]) == (400, "BadRequest"), resource_name(kind)
            assert field in found["message"]

    play(scenario)


def test_a_watch_of_no_version_begins_with_what_is_there(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        for params in ({}, {"resourceVersion": "0"}):
            assert brief(await watched(world, 3, **params)) == ALL
        # Not one less than the list's version: other clients of the server may have written after c was made.
        second = (await world.api.get(WIDGET, "b", world.namespace))["metadata"]["resourceVersion"]
        assert brief(await watched(world, 1, resourceVersion=second)) == [("ADDED", "c")]

    play(scenario)


def test_initial_events_end_with_a_bookmark(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world)
        asking = STREAMED | {"allowWatchBookmarks": "true"}
        for since in ({}, {"resourceVersion": "0"}, {"resourceVersion": str(version)}):
            events = await watched(world, 4, **asking, **since)
            assert brief(events) == [*ALL, ("BOOKMARK", "")]
            end = events[-1]["object"]
            assert end["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
            assert int(end["metadata"]["resourceVersion"]) >= version
            assert (end["apiVersion"], end["kind"]) == (WIDGET.api_version, WIDGET.kind)

    play(scenario)


def test_a_streamed_list_goes_on_with_changes(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        asking = STREAMED | {"allowWatchBookmarks": "true"}
        heard: list[Object] = []
        watching = asyncio.create_task(watched(world, 99, heard, **asking))
        await until_so(lambda: brief(heard)[:4] == [*ALL, ("BOOKMARK", "")], "the list as events")
        await world.api.delete(WIDGET, "b", world.namespace)
        # A server may send further bookmarks whenever it likes.
        later = await until_so(
            lambda: [event for event in brief(heard[4:]) if event[0] != "BOOKMARK"], "a change"
        )
        assert later == [("DELETED", "b")]
        watching.cancel()
        await asyncio.wait({watching})

    play(scenario)


def test_a_watch_that_wants_no_initial_events_begins_now(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        asking = {"sendInitialEvents": "false", "resourceVersionMatch": "NotOlderThan"}
        watching = asyncio.create_task(watched(world, 1, **asking))
        numbers = itertools.count()

        async def is_heard() -> bool:
            """No answer shows when "now" was: objects are created until the watch shows a later one."""
            await world.api.create(WIDGET, world.named(f"new-{next(numbers)}"))
            return watching.done()

        await eventually(is_heard)
        ((change, name),) = brief(await watching)
        assert (change, name.partition("-")[0]) == ("ADDED", "new")

    play(scenario)


def test_a_watch_ends_when_it_was_asked_to_and_has_only_the_bookmarks_it_wants(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        for asking in ({}, STREAMED):
            seconds = itertools.count(3, 3)

            async def is_whole(asking: dict[str, str] = asking, seconds: Iterator[int] = seconds) -> bool:
                """A busy machine may not get that far in the time."""
                heard = brief(await watched(world, 9, timeoutSeconds=next(seconds), **asking))
                assert heard == ALL[: len(heard)]
                return heard == ALL

            await eventually(is_whole)

    play(scenario)


def test_a_watch_from_a_version_to_come_waits_for_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = await three(world)
        later = version + 2
        watching = asyncio.create_task(watched(world, 1, resourceVersion=later))

        async def is_reached() -> bool:
            made = await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"at": version}})
            made = await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"at": None}})
            return int(made["metadata"]["resourceVersion"]) > later

        await eventually(is_reached)
        (first,) = await watching
        assert int(first["object"]["metadata"]["resourceVersion"]) > later

    play(scenario)


def test_a_watch_of_a_version_that_is_gone_ends_with_an_error(play: Play) -> None:
    async def scenario(world: World) -> None:
        await three(world)
        if world.fake is not None:
            world.fake.store.compact()
        (error,) = await watched(world, 9, resourceVersion=1)
        assert error["type"] == "ERROR"
        status = error["object"]
        assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")

    play(scenario)
