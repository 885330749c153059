"""An API server's contract with kubectl: strategic merge patches, tables and evictions."""

from typing import Any

import pytest
from tests.claim.kube.world import WIDGET, Play, World, create_pod, pod

from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object

STRATEGIC = "application/strategic-merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
VOLUMES = [{"name": name, "emptyDir": {}} for name in "uvw"]


def daemon_set(world: World) -> Object:
    labels = {"a": "b"}
    env = [{"name": name, "value": "1"} for name in "pqr"]
    containers = [{"name": name, "image": "i", "env": env} for name in "abc"]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers, "volumes": VOLUMES}}
    return world.named("d", spec={"selector": {"matchLabels": labels}, "template": template})


async def patched(world: World, path: str, patch: Any) -> tuple[int, Object]:
    headers = {"Content-Type": STRATEGIC}
    answer = await world.http.patch(path, json=patch, params={"dryRun": "All"}, headers=headers)
    return answer.status_code, answer.json()


PATCHES: list[tuple[Object, list[str], list[str]]] = [
    ({"containers": [{"name": "e", "image": "k"}]}, ["e:", "a:pqr", "b:pqr", "c:pqr"], ["u", "v", "w"]),
    ({"containers": [{"name": "b", "$patch": "delete"}]}, ["a:pqr", "c:pqr"], ["u", "v", "w"]),
    ({"containers": [{"$patch": "replace"}, {"name": "z", "image": "k"}]}, ["z:"], ["u", "v", "w"]),
    (
        {
            "containers": [
                {"name": "c", "env": [{"name": "q", "$patch": "delete"}, {"name": "s", "value": "2"}]}
            ]
        },
        ["a:pqr", "b:pqr", "c:spr"],
        ["u", "v", "w"],
    ),
    (
        {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}], "volumes": None},
        ["b:pqr", "c:pqr", "a:pqr"],
        [],
    ),
    (
        {"volumes": [{"name": "v", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]},
        ["a:pqr", "b:pqr", "c:pqr"],
        ["u", "v=/x", "w"],
    ),
]


@pytest.mark.parametrize(("spec", "containers", "volumes"), PATCHES)
def test_a_strategic_merge_patch_merges_lists_by_their_keys(
    play: Play, spec: Object, containers: list[str], volumes: list[str]
) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(objects.DAEMON_SET, daemon_set(world))
        path = f"/apis/apps/v1/namespaces/{world.namespace}/daemonsets/d"
        code, found = await patched(world, path, {"spec": {"template": {"spec": spec}}})
        assert code == 200, found
        made = found["spec"]["template"]["spec"]
        expected = [
            f"{container['name']}:" + "".join(e["name"] for e in container.get("env", ()))
            for container in made["containers"]
        ]
        assert expected == containers
        places = [volume.get("hostPath", {}).get("path") for volume in made.get("volumes", ())]
        names = [volume["name"] for volume in made.get("volumes", ())]
        assert [f"{n}={p}" if p else n for n, p in zip(names, places, strict=True)] == volumes

    play(scenario)


def test_a_custom_resource_takes_no_strategic_merge_patch(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(WIDGET, world.named("w", spec={}))
        path = f"/apis/{WIDGET.api_version}/namespaces/{world.namespace}/{WIDGET.plural}/w"
        code, response = await patched(world, path, {"metadata": {"labels": {"a": "b"}}})
        assert (code, response["reason"]) == (415, "UnsupportedMediaType")

    play(scenario)


def test_a_patch_that_is_no_object_is_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(objects.CONFIG_MAP, world.named("c"))
        code, response = await patched(world, f"/api/v1/namespaces/{world.namespace}/configmaps/c", [])
        assert (code, response["reason"]) == (400, "BadRequest")

    play(scenario)


def test_who_prefers_a_table_gets_rows(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(objects.CONFIG_MAP, world.named("c", data={"a": "1", "b": "2"}))
        path = f"/api/v1/namespaces/{world.namespace}/configmaps"
        for where, params in ((path, {"fieldSelector": "metadata.name=c"}), (f"{path}/c", {})):
            answer = await world.http.get(where, params=params, headers={"Accept": TABLE})
            table = answer.json()
            assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
            assert [definition["name"] for definition in table["columnDefinitions"]] == [
                "Name",
                "Data",
                "Age",
            ]
            (row,) = table["rows"]
            assert row["cells"][:2] == ["c", 2]
            assert row["object"]["kind"] == "PartialObjectMetadata"
            assert row["object"]["metadata"]["uid"] == made["metadata"]["uid"]

    play(scenario)


def test_an_eviction_deletes_a_pod_unless_it_is_a_dry_run(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "p"))
        path = f"/api/v1/namespaces/{world.namespace}/pods/p/eviction"
        eviction: Object = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
        dry = {**eviction, "deleteOptions": {"dryRun": ["All"]}}
        assert (await world.http.post(path, json=dry)).status_code == 201
        assert await world.api.get(objects.POD, "p", world.namespace)
        now = {**eviction, "deleteOptions": {"gracePeriodSeconds": 0}}
        answer = await world.http.post(path, json=now)
        assert (answer.status_code, answer.json()["status"]) == (201, "Success")
        with pytest.raises(NotFound):
            await world.api.get(objects.POD, "p", world.namespace)

    play(scenario)
