"""An API server's contract with Rackloom: server-side apply and the owners of fields."""

from typing import Any

import pytest
from tests.claim.kube.world import WIDGET, Play, World, refused

from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object


def test_managers_share_a_list_by_its_keys(play: Play) -> None:
    def nodes(world: World, *names: str, phase: str = "") -> Object:
        status: dict[str, Any] = {"nodes": [{"name": name, "index": ord(name)} for name in names]}
        return world.named("a", status=status | ({"phase": phase} if phase else {}))

    async def scenario(world: World) -> None:
        await world.api.create(WIDGET, world.named("a"))
        first, two = world.client("one"), world.client("two")
        await first.apply(WIDGET, nodes(world, "x", phase="on"), manager="one", subresource="status")
        both = await two.apply(WIDGET, nodes(world, "y"), manager="two", subresource="status")
        assert [node["name"] for node in both["status"]["nodes"]] == ["x", "y"]
        with pytest.raises(Conflict) as error:
            await two.apply(WIDGET, nodes(world, "y", phase="off"), manager="two", subresource="status")
        message = 'Apply failed with 1 conflict: conflict with "one" with subresource "status": .status.phase'
        assert refused(error) == (409, "Conflict", message)
        forced = await two.apply(
            WIDGET, nodes(world, "y", phase="off"), manager="two", subresource="status", force=True
        )
        assert forced["status"]["phase"] == "off"
        left = await first.apply(
            WIDGET, world.named("a", status={"nodes": []}), manager="one", subresource="status"
        )
        assert [node["name"] for node in left["status"]["nodes"]] == ["y"]
        assert left["status"]["phase"] == "off"

    play(scenario)


def test_a_patch_takes_a_field_from_who_applied_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        wanted = world.named("a", data={"x": "1", "y": "1"})
        await world.api.apply(objects.CONFIG_MAP, wanted, manager="one")
        editor = world.client("kubectl-edit")
        await editor.patch(objects.CONFIG_MAP, "a", world.namespace, {"data": {"x": "2"}})
        with pytest.raises(Conflict) as error:
            await world.api.apply(
                objects.CONFIG_MAP, world.named("a", data={"x": "1", "y": "1"}), manager="one"
            )
        message = 'Apply failed with 1 conflict: conflict with "kubectl-edit" using v1: .data.x'
        assert refused(error) == (409, "Conflict", message)
        without = await world.api.apply(objects.CONFIG_MAP, world.named("a", data={"y": "1"}), manager="one")
        assert without["data"] == {"x": "2", "y": "1"}

    play(scenario)


def test_fields_that_are_no_longer_applied_go(play: Play) -> None:
    async def scenario(world: World) -> None:
        labelled = world.named("a", data={"x": "1", "y": "1"})
        labelled["metadata"]["labels"] = {"l": "1"}
        await world.api.apply(objects.CONFIG_MAP, labelled, manager="one")
        bare = await world.api.apply(objects.CONFIG_MAP, world.named("a", data={"y": "1"}), manager="one")
        assert bare["data"] == {"y": "1"}
        assert "labels" not in bare["metadata"]

    play(scenario)
