"""An API server's contract with Rackloom: the identity of objects, and how they are written."""

import pytest
from tests.claim.kube.world import WIDGET, Play, World, refused

from rackloom.claim.kube.api import Conflict, NotFound, Rejected
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import ResourceKind

UNKNOWN_KIND = ResourceKind("contract.rackloom.test", "v1", "Gadget", "gadgets", namespaced=True)


def test_a_created_object_has_an_identity_and_keeps_fields_nobody_knows(play: Play) -> None:
    async def scenario(world: World) -> None:
        given = world.named("a", spec={"unknown": {"deep": [1, None, "x"]}}, status={"phase": "dropped"})
        made = await world.api.create(WIDGET, given)
        metadata = made["metadata"]
        assert (made["apiVersion"], made["kind"]) == ("contract.rackloom.test/v1", "Widget")
        assert metadata["uid"]
        assert metadata["creationTimestamp"].endswith("Z")
        assert metadata["generation"] == 1
        assert made["spec"] == {"unknown": {"deep": [1, None, "x"]}}
        assert "status" not in made
        assert await world.api.get(WIDGET, "a", world.namespace) == made

    play(scenario)


def test_a_name_is_taken_once(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(objects.CONFIG_MAP, world.named("a"))
        with pytest.raises(Conflict) as error:
            await world.api.create(objects.CONFIG_MAP, world.named("a"))
        assert refused(error) == (409, "AlreadyExists", 'configmaps "a" already exists')
        await world.api.create(WIDGET, world.named("a"))
        with pytest.raises(Conflict) as error:
            await world.api.create(WIDGET, world.named("a"))
        message = 'widgets.contract.rackloom.test "a" already exists'
        assert refused(error) == (409, "AlreadyExists", message)

    play(scenario)


def test_generated_names_differ(play: Play) -> None:
    async def scenario(world: World) -> None:
        template = {"metadata": {"generateName": "a-", "namespace": world.namespace}}
        names = {(await world.api.create(objects.CONFIG_MAP, template))["metadata"]["name"] for _ in range(5)}
        assert len(names) == 5
        assert all(name.startswith("a-") and len(name) == 7 for name in names)

    play(scenario)


def test_an_object_needs_a_name(play: Play) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Rejected) as error:
            await world.api.create(objects.CONFIG_MAP, {"metadata": {"namespace": world.namespace}})
        code, reason, message = refused(error)
        assert (code, reason) == (422, "Invalid")
        assert message.endswith("metadata.name: Required value: name or generateName is required")

    play(scenario)


def test_what_is_not_there(play: Play) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(NotFound) as error:
            await world.api.get(WIDGET, "a", world.namespace)
        assert refused(error) == (404, "NotFound", 'widgets.contract.rackloom.test "a" not found')
        with pytest.raises(NotFound) as error:
            await world.api.delete(objects.CONFIG_MAP, "a", world.namespace)
        assert refused(error) == (404, "NotFound", 'configmaps "a" not found')
        with pytest.raises(NotFound):
            await world.api.list(UNKNOWN_KIND)
        elsewhere = {"metadata": {"name": "a", "namespace": "no-such-namespace"}}
        with pytest.raises(NotFound) as error:
            await world.api.create(objects.CONFIG_MAP, elsewhere)
        assert refused(error) == (404, "NotFound", 'namespaces "no-such-namespace" not found')

    play(scenario)


def test_a_dry_run_creates_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        tried = await world.api.create(WIDGET, world.named("a"), dry_run=True)
        assert tried["metadata"]["name"] == "a"
        with pytest.raises(NotFound):
            await world.api.get(WIDGET, "a", world.namespace)

    play(scenario)


def test_a_replace_of_what_has_changed_since_is_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        newer = await world.api.replace(WIDGET, made | {"spec": {"x": 2}})
        assert newer["metadata"]["generation"] == 2
        with pytest.raises(Conflict) as error:
            await world.api.replace(WIDGET, made | {"spec": {"x": 3}})
        message = (
            'Operation cannot be fulfilled on widgets.contract.rackloom.test "a": the object has been '
            "modified; please apply your changes to the latest version and try again"
        )
        assert refused(error) == (409, "Conflict", message)
        another = {**newer, "metadata": {**newer["metadata"], "uid": "other"}}
        with pytest.raises(Conflict) as error:
            await world.api.replace(WIDGET, another)
        uid = made["metadata"]["uid"]
        assert error.value.message.endswith(f"UID in precondition: other, UID in object meta: {uid}")

    play(scenario)


def test_a_patch_with_the_uid_of_another_object_is_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        for kind in (WIDGET, objects.CONFIG_MAP):
            made = await world.api.create(kind, world.named("a"))
            mine = {"annotations": {"mine": "1"}}
            with pytest.raises(Rejected) as error:
                await world.api.patch(kind, "a", world.namespace, {"metadata": {**mine, "uid": "other"}})
            code, reason, message = refused(error)
            assert (code, reason) == (422, "Invalid")
            assert message.endswith('metadata.uid: Invalid value: "other": field is immutable')
            meta = {**mine, "uid": made["metadata"]["uid"]}
            patched = await world.api.patch(kind, "a", world.namespace, {"metadata": meta})
            assert patched["metadata"]["annotations"] == {"mine": "1"}

    play(scenario)


def test_a_write_that_changes_nothing_makes_no_new_version(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        again = await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 1}})
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        applied = await world.api.apply(WIDGET, world.named("b", spec={"x": 1}), manager="m")
        two = await world.api.apply(WIDGET, world.named("b", spec={"x": 1}), manager="m")
        assert applied["metadata"]["resourceVersion"] == two["metadata"]["resourceVersion"]

    play(scenario)


def test_the_object_and_its_status_have_doors_of_their_own(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        wanted = made | {"spec": {"x": 2}, "status": {"phase": "on"}}
        written = await world.api.replace(WIDGET, wanted, subresource="status")
        assert (written["spec"], written["status"]) == ({"x": 1}, {"phase": "on"})
        assert written["metadata"]["generation"] == 1
        changed = await world.api.patch(
            WIDGET, "a", world.namespace, {"spec": {"x": 3}, "status": {"phase": "off"}}
        )
        assert (changed["spec"], changed["status"]) == ({"x": 3}, {"phase": "on"})
        assert changed["metadata"]["generation"] == 2

    play(scenario)


def test_patches(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.api.create(WIDGET, world.named("a", spec={"gone": 1, "kept": {"a": 1}, "list": [1, 2]}))
        merged = await world.api.patch(
            WIDGET, "a", world.namespace, {"spec": {"gone": None, "kept": {"b": 2}, "list": [3]}}
        )
        assert merged["spec"] == {"kept": {"a": 1, "b": 2}, "list": [3]}
        operations = (
            {"op": "test", "path": "/spec/kept/a", "value": 1},
            {"op": "add", "path": "/spec/list/-", "value": 4},
            {"op": "remove", "path": "/spec/kept/a"},
        )
        assert (await world.api.patch(WIDGET, "a", world.namespace, operations))["spec"] == {
            "kept": {"b": 2},
            "list": [3, 4],
        }
        with pytest.raises(Rejected) as error:
            await world.api.patch(WIDGET, "a", world.namespace, operations)
        assert refused(error)[:2] == (422, "Invalid")

    play(scenario)


def test_a_patch_can_demand_a_version(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        version = made["metadata"]["resourceVersion"]
        await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 2}})
        stale = {"metadata": {"resourceVersion": version}, "spec": {"x": 3}}
        with pytest.raises(Conflict):
            await world.api.patch(WIDGET, "a", world.namespace, stale)

    play(scenario)


def test_a_lease_is_not_written_blindly(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(objects.LEASE, world.named("a", spec={"holderIdentity": "x"}))
        blind = world.named("a", spec={"holderIdentity": "y"})
        with pytest.raises(Rejected) as error:
            await world.api.replace(objects.LEASE, blind)
        assert "metadata.resourceVersion" in error.value.message
        await world.api.replace(objects.LEASE, made | {"spec": {"holderIdentity": "y"}})

    play(scenario)
