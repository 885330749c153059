"""An API server's contract with Rackloom: lists and watches."""

import asyncio

import pytest
from tests.claim.kube.world import WIDGET, Play, World, collect, refused

from rackloom.claim.kube.api import Expired, Rejected
from rackloom.core.cluster import objects


def test_selectors(play: Play) -> None:
    async def scenario(world: World) -> None:
        for name, labels in (("a", {"t": "1", "u": "x"}), ("b", {"t": "2"}), ("c", {})):
            obj = world.named(name)
            obj["metadata"]["labels"] = labels
            await world.api.create(WIDGET, obj)

        async def names(labels: str = "", fields: str = "") -> list[str]:
            found = await world.api.list(WIDGET, world.namespace, labels=labels, fields=fields)
            return [item["metadata"]["name"] for item in found.items]

        assert await names() == ["a", "b", "c"]
        assert await names("t=1") == ["a"]
        assert await names("t!=1") == ["b", "c"]
        assert await names("t in (1, 2),!u") == ["b"]
        assert await names("t notin (1)") == ["b", "c"]
        assert await names("t") == ["a", "b"]
        assert await names(fields="metadata.name=b") == ["b"]
        with pytest.raises(Rejected):
            await names("t in 1")

    play(scenario)


def test_listed_objects_say_what_they_are(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(objects.CONFIG_MAP, world.named("a"))
        listed = await world.api.list(objects.CONFIG_MAP, world.namespace)
        mine = next(item for item in listed.items if item["metadata"]["name"] == "a")
        assert (mine["apiVersion"], mine["kind"]) == ("v1", "ConfigMap")
        assert int(listed.resource_version) >= int(mine["metadata"]["resourceVersion"])

    play(scenario)


def test_a_watch_goes_on_from_a_list(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(WIDGET, world.named("before"))
        version = (await world.api.list(WIDGET, world.namespace)).resource_version
        await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 2}})
        await world.api.delete(WIDGET, "a", world.namespace)
        seen = await collect(world.api.watch(WIDGET, world.namespace, resource_version=version), 3)
        assert [(event.type, event.object["metadata"]["name"]) for event in seen] == [
            ("ADDED", "a"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
        ]
        versions = [int(event.object["metadata"]["resourceVersion"]) for event in seen]
        assert versions == sorted(set(versions))

    play(scenario)


def test_a_watch_with_a_selector_sees_objects_come_and_go(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = (await world.api.list(WIDGET, world.namespace)).resource_version
        await world.api.create(WIDGET, world.named("a"))
        for value in ("in", "out"):
            await world.api.patch(WIDGET, "a", world.namespace, {"metadata": {"labels": {"t": value}}})
        events = world.api.watch(WIDGET, world.namespace, resource_version=version, labels="t=in")
        assert [event.type for event in await collect(events, 2)] == ["ADDED", "DELETED"]

    play(scenario)


def test_a_watch_hears_of_what_happens_while_it_is_open(play: Play) -> None:
    async def scenario(world: World) -> None:
        version = (await world.api.list(WIDGET, world.namespace)).resource_version
        watching = asyncio.create_task(
            collect(world.api.watch(WIDGET, world.namespace, resource_version=version), 1)
        )
        await asyncio.sleep(0.2)
        await world.api.create(WIDGET, world.named("a"))
        assert [event.type for event in await watching] == ["ADDED"]

    play(scenario)


def test_a_version_that_is_too_old_is_expired(play: Play) -> None:
    async def scenario(world: World) -> None:
        if world.fake is not None:
            await world.api.create(WIDGET, world.named("a"))
            world.fake.store.compact()
        with pytest.raises(Expired) as error:
            await collect(world.api.watch(WIDGET, world.namespace, resource_version="1"), 1)
        assert refused(error)[:2] == (410, "Expired")
        assert error.value.message.startswith("too old resource version: 1 (")

    play(scenario)
