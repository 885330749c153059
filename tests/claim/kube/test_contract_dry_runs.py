"""An API server's contract with users: dry runs change nothing, and an unreadable object is refused."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.claim.kube.world import Play, World, create_pod, pod

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object

DRY = {"dryRun": "All"}
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


def place(world: World, name: str = "", plural: str = "configmaps") -> str:
    return f"/api/v1/namespaces/{world.namespace}/{plural}" + (f"/{name}" if name else "")


def config_map(world: World, name: str, x: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", **world.named(name, data={"x": x})}


async def ask(
    world: World, method: str, path: str, body: Any, params: Mapping[str, str], kind: str = "application/json"
) -> tuple[int, Object]:
    answer = await world.http.request(
        method, path, json=body, params=dict(params), headers={"Content-Type": kind}
    )
    return answer.status_code, answer.json()


@pytest.mark.parametrize("method", ["DELETE", "DELETE by options", "PUT", "PATCH", "apply"])
def test_a_dry_run_leaves_an_object_as_it_was(play: Play, method: str) -> None:
    async def scenario(world: World) -> None:
        before = await world.api.create(objects.CONFIG_MAP, world.named("a", data={"x": "1"}))
        whole, path = config_map(world, "a", "2"), place(world, "a")
        match method:
            case "DELETE":
                code, _ = await ask(world, "DELETE", path, None, DRY)
            case "DELETE by options":
                options = {"apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"]}
                code, _ = await ask(world, "DELETE", path, options, {})
            case "PUT":
                code, _ = await ask(world, "PUT", path, whole, DRY)
            case "PATCH":
                code, made = await ask(world, "PATCH", path, {"data": {"x": "2"}}, DRY, MERGE)
                assert made["data"] == {"x": "2"}, "it is told what would be"
            case _:
                asked = DRY | {"fieldManager": "me", "force": "true"}
                code, _ = await ask(world, "PATCH", path, whole, asked, APPLY)
        assert code == 200
        assert await world.api.get(objects.CONFIG_MAP, "a", world.namespace) == before

    play(scenario)


def test_a_dry_apply_of_something_new_creates_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        asked = DRY | {"fieldManager": "me"}
        code, _ = await ask(world, "PATCH", place(world, "a"), config_map(world, "a", "1"), asked, APPLY)
        assert code in (200, 201)
        assert (await world.http.get(place(world, "a"))).status_code == 404

    play(scenario)


def test_a_dry_binding_leaves_a_pod_without_a_node(play: Play) -> None:
    async def scenario(world: World) -> None:
        # A real scheduler ignores pods that name another.
        await create_pod(world, pod(world, "a", schedulerName="nobody"))
        target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "a"}, "target": target}
        code, _ = await ask(world, "POST", place(world, "a/binding", "pods"), binding, DRY)
        assert code == 201
        assert "nodeName" not in (await world.api.get(objects.POD, "a", world.namespace))["spec"]

    play(scenario)


def test_a_dry_run_of_another_kind_is_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(objects.CONFIG_MAP, world.named("a"))
        code, _ = await ask(world, "DELETE", place(world, "a"), None, {"dryRun": "Some"})
        assert code == 422
        await world.api.get(objects.CONFIG_MAP, "a", world.namespace)

    play(scenario)


@pytest.mark.parametrize("params", [{"limit": "abc"}, {"watch": "true", "timeoutSeconds": "abc"}])
def test_a_number_that_is_none_is_refused(play: Play, params: Mapping[str, str]) -> None:
    async def scenario(world: World) -> None:
        code, response = await ask(world, "GET", place(world), None, params)
        assert (code, response["reason"]) == (400, "BadRequest")

    play(scenario)


def test_who_applies_says_who_they_are(play: Play) -> None:
    async def scenario(world: World) -> None:
        code, response = await ask(world, "PATCH", place(world, "a"), config_map(world, "a", "1"), {}, APPLY)
        assert (code, response["reason"]) == (422, "Invalid")
        assert "fieldManager: Required value: is required for apply patch" in response["message"]

    play(scenario)


def test_a_pod_of_the_wrong_shape_is_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        spec = {"tolerations": "x", "containers": [{"name": "main", "image": "busybox"}]}
        wrong = {"apiVersion": "v1", "kind": "Pod", **world.named("a", spec=spec)}
        code, response = await ask(world, "POST", place(world, plural="pods"), wrong, {})
        assert (code, response["reason"]) == (400, "BadRequest")
        assert 'Pod in version "v1" cannot be handled as a Pod' in response["message"]

    play(scenario)
