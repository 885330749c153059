"""An API server's contract with Rackloom: deletion with finalizers, owners, namespaces."""

import pytest
from tests.claim.kube.world import WIDGET, Play, World, eventually, is_gone, refused

from rackloom.claim.kube.api import Conflict, NotFound, Rejected
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object


def test_finalizers_hold_an_object(play: Play) -> None:
    async def scenario(world: World) -> None:
        obj = world.named("a")
        obj["metadata"]["finalizers"] = ["contract.rackloom.test/one", "contract.rackloom.test/two"]
        await world.api.create(WIDGET, obj)
        await world.api.delete(WIDGET, "a", world.namespace)
        held = await world.api.get(WIDGET, "a", world.namespace)
        assert held["metadata"]["deletionTimestamp"]
        assert held["metadata"]["generation"] == 2
        more = {"metadata": {"finalizers": [*obj["metadata"]["finalizers"], f"{WIDGET.group}/three"]}}
        with pytest.raises(Rejected) as error:
            await world.api.patch(WIDGET, "a", world.namespace, more)
        assert "metadata.finalizers: Forbidden: no new finalizers can be added" in error.value.message
        first = await world.api.patch(
            WIDGET, "a", world.namespace, {"metadata": {"finalizers": ["contract.rackloom.test/two"]}}
        )
        assert first["metadata"]["finalizers"] == ["contract.rackloom.test/two"]
        await world.api.patch(WIDGET, "a", world.namespace, {"metadata": {"finalizers": None}})
        with pytest.raises(NotFound):
            await world.api.get(WIDGET, "a", world.namespace)

    play(scenario)


def test_a_delete_can_demand_who_it_means(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a"))
        uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
        with pytest.raises(Conflict) as error:
            await world.api.delete(WIDGET, "a", world.namespace, uid="other")
        message = (
            'Operation cannot be fulfilled on Widget.contract.rackloom.test "a": the UID in the precondition '
            f"(other) does not match the UID in record ({uid}). The object might have been deleted and then "
            "recreated"
        )
        assert refused(error) == (409, "Conflict", message)
        await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 1}})
        with pytest.raises(Conflict) as error:
            await world.api.delete(WIDGET, "a", world.namespace, resource_version=version)
        assert error.value.message.endswith("The object might have been modified")
        await world.api.delete(WIDGET, "a", world.namespace, uid=uid)
        with pytest.raises(NotFound):
            await world.api.get(WIDGET, "a", world.namespace)

    play(scenario)


def _owned(world: World, name: str, *owners: Object, blocking: bool = False) -> Object:
    obj = world.named(name)
    obj["metadata"]["ownerReferences"] = [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": blocking,
        }
        for owner in owners
    ]
    return obj


def test_an_object_goes_after_the_last_of_its_owners(play: Play) -> None:
    async def scenario(world: World) -> None:
        created = await world.api.create(objects.CONFIG_MAP, world.named("one"))
        two = await world.api.create(objects.CONFIG_MAP, world.named("two"))
        await world.api.create(objects.CONFIG_MAP, _owned(world, "both", created, two))
        await world.api.create(objects.CONFIG_MAP, _owned(world, "mine", created))
        await world.api.delete(objects.CONFIG_MAP, "one", world.namespace)
        await eventually(lambda: is_gone(world, objects.CONFIG_MAP, "mine"))
        assert not await is_gone(world, objects.CONFIG_MAP, "both")
        await world.api.delete(objects.CONFIG_MAP, "two", world.namespace)
        await eventually(lambda: is_gone(world, objects.CONFIG_MAP, "both"))

    play(scenario)


def test_an_object_of_an_owner_that_never_was_goes(play: Play) -> None:
    async def scenario(world: World) -> None:
        nobody: Object = {"apiVersion": "v1", "kind": "ConfigMap"}
        nobody["metadata"] = {"name": "nobody", "uid": "00000000-0000-4000-8000-000000000000"}
        await world.api.create(objects.CONFIG_MAP, _owned(world, "orphan", nobody))
        await eventually(lambda: is_gone(world, objects.CONFIG_MAP, "orphan"))

    play(scenario)


def test_foreground_deletion_waits_for_dependents(play: Play) -> None:
    async def scenario(world: World) -> None:
        owner = await world.api.create(objects.CONFIG_MAP, world.named("owner"))
        held = _owned(world, "held", owner, blocking=True)
        held["metadata"]["finalizers"] = ["contract.rackloom.test/hold"]
        await world.api.create(objects.CONFIG_MAP, held)
        await world.api.delete(objects.CONFIG_MAP, "owner", world.namespace, propagation="Foreground")

        async def is_asked() -> bool:
            found = await world.api.get(objects.CONFIG_MAP, "held", world.namespace)
            return "deletionTimestamp" in found["metadata"]

        await eventually(is_asked)
        waiting = await world.api.get(objects.CONFIG_MAP, "owner", world.namespace)
        assert waiting["metadata"]["finalizers"] == ["foregroundDeletion"]
        await world.api.patch(objects.CONFIG_MAP, "held", world.namespace, {"metadata": {"finalizers": None}})
        await eventually(lambda: is_gone(world, objects.CONFIG_MAP, "owner"))

    play(scenario)


def test_orphans_stay(play: Play) -> None:
    async def scenario(world: World) -> None:
        owner = await world.api.create(objects.CONFIG_MAP, world.named("owner"))
        await world.api.create(objects.CONFIG_MAP, _owned(world, "orphan", owner))
        await world.api.delete(objects.CONFIG_MAP, "owner", world.namespace, propagation="Orphan")
        await eventually(lambda: is_gone(world, objects.CONFIG_MAP, "owner"))
        left = await world.api.get(objects.CONFIG_MAP, "orphan", world.namespace)
        assert not left["metadata"].get("ownerReferences")

    play(scenario)


def test_a_namespace_takes_what_is_in_it_along(play: Play) -> None:
    async def scenario(world: World) -> None:
        name = f"{world.namespace}-2"
        await world.api.create(objects.NAMESPACE, {"metadata": {"name": name}})
        held = {"metadata": {"name": "held", "namespace": name, "finalizers": ["rackloom.test/hold"]}}
        await world.api.create(objects.CONFIG_MAP, held)
        await world.api.delete(objects.NAMESPACE, name)

        async def is_asked() -> bool:
            found = await world.api.get(objects.CONFIG_MAP, "held", name)
            return "deletionTimestamp" in found["metadata"]

        await eventually(is_asked)
        with pytest.raises(Rejected) as error:
            await world.api.create(objects.CONFIG_MAP, {"metadata": {"name": "late", "namespace": name}})
        message = (
            f'configmaps "late" is forbidden: unable to create new content in namespace {name} because it is '
            "being terminated"
        )
        assert refused(error) == (403, "Forbidden", message)
        await world.api.patch(objects.CONFIG_MAP, "held", name, {"metadata": {"finalizers": None}})

        async def is_gone() -> bool:
            found = (await world.api.list(objects.NAMESPACE)).items
            return name not in [obj["metadata"]["name"] for obj in found]

        await eventually(is_gone)

    play(scenario)
