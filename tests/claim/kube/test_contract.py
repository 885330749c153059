"""What Rackloom relies on of an API server, and that the fake answers as a real one does."""

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest
from tests.claim.kube.world import WIDGET, Play, World, collect, eventually

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Conflict, Expired, Kind, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.cache import by_uid
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.leader import Election, Terms

UNKNOWN_KIND = Kind("contract.rackloom.test", "v1", "Gadget", "gadgets", namespaced=True)


def refused(error: pytest.ExceptionInfo[KubeError]) -> tuple[int, str, str]:
    return error.value.code, error.value.reason, error.value.message


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
        await world.api.create(kinds.CONFIG_MAP, world.named("a"))
        with pytest.raises(Conflict) as error:
            await world.api.create(kinds.CONFIG_MAP, world.named("a"))
        assert refused(error) == (409, "AlreadyExists", 'configmaps "a" already exists')
        await world.api.create(WIDGET, world.named("a"))
        with pytest.raises(Conflict) as error:
            await world.api.create(WIDGET, world.named("a"))
        told = 'widgets.contract.rackloom.test "a" already exists'
        assert refused(error) == (409, "AlreadyExists", told)

    play(scenario)


def test_generated_names_differ(play: Play) -> None:
    async def scenario(world: World) -> None:
        template = {"metadata": {"generateName": "a-", "namespace": world.namespace}}
        names = {(await world.api.create(kinds.CONFIG_MAP, template))["metadata"]["name"] for _ in range(5)}
        assert len(names) == 5
        assert all(name.startswith("a-") and len(name) == 7 for name in names)

    play(scenario)


def test_an_object_needs_a_name(play: Play) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Rejected) as error:
            await world.api.create(kinds.CONFIG_MAP, {"metadata": {"namespace": world.namespace}})
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
            await world.api.delete(kinds.CONFIG_MAP, "a", world.namespace)
        assert refused(error) == (404, "NotFound", 'configmaps "a" not found')
        with pytest.raises(NotFound):
            await world.api.list(UNKNOWN_KIND)
        elsewhere = {"metadata": {"name": "a", "namespace": "no-such-namespace"}}
        with pytest.raises(NotFound) as error:
            await world.api.create(kinds.CONFIG_MAP, elsewhere)
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
        told = (
            'Operation cannot be fulfilled on widgets.contract.rackloom.test "a": the object has been '
            "modified; please apply your changes to the latest version and try again"
        )
        assert refused(error) == (409, "Conflict", told)
        another = {**newer, "metadata": {**newer["metadata"], "uid": "other"}}
        with pytest.raises(Conflict) as error:
            await world.api.replace(WIDGET, another)
        uid = made["metadata"]["uid"]
        assert error.value.message.endswith(f"UID in precondition: other, UID in object meta: {uid}")

    play(scenario)


def test_a_write_that_changes_nothing_makes_no_new_version(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        again = await world.api.patch(WIDGET, "a", world.namespace, {"spec": {"x": 1}})
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        one = await world.api.apply(WIDGET, world.named("b", spec={"x": 1}), manager="m")
        two = await world.api.apply(WIDGET, world.named("b", spec={"x": 1}), manager="m")
        assert one["metadata"]["resourceVersion"] == two["metadata"]["resourceVersion"]

    play(scenario)


def test_the_object_and_its_status_have_doors_of_their_own(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(WIDGET, world.named("a", spec={"x": 1}))
        wanted = made | {"spec": {"x": 2}, "status": {"phase": "on"}}
        told = await world.api.replace(WIDGET, wanted, subresource="status")
        assert (told["spec"], told["status"]) == ({"x": 1}, {"phase": "on"})
        assert told["metadata"]["generation"] == 1
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


def test_managers_share_a_list_by_its_keys(play: Play) -> None:
    def nodes(world: World, *names: str, phase: str = "") -> Object:
        status: dict[str, Any] = {"nodes": [{"name": name, "index": ord(name)} for name in names]}
        return world.named("a", status=status | ({"phase": phase} if phase else {}))

    async def scenario(world: World) -> None:
        await world.api.create(WIDGET, world.named("a"))
        one, two = world.client("one"), world.client("two")
        await one.apply(WIDGET, nodes(world, "x", phase="on"), manager="one", subresource="status")
        both = await two.apply(WIDGET, nodes(world, "y"), manager="two", subresource="status")
        assert [node["name"] for node in both["status"]["nodes"]] == ["x", "y"]
        with pytest.raises(Conflict) as error:
            await two.apply(WIDGET, nodes(world, "y", phase="off"), manager="two", subresource="status")
        told = 'Apply failed with 1 conflict: conflict with "one" with subresource "status": .status.phase'
        assert refused(error) == (409, "Conflict", told)
        forced = await two.apply(
            WIDGET, nodes(world, "y", phase="off"), manager="two", subresource="status", force=True
        )
        assert forced["status"]["phase"] == "off"
        left = await one.apply(
            WIDGET, world.named("a", status={"nodes": []}), manager="one", subresource="status"
        )
        assert [node["name"] for node in left["status"]["nodes"]] == ["y"]
        assert left["status"]["phase"] == "off"

    play(scenario)


def test_a_patch_takes_a_field_from_who_applied_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        wanted = world.named("a", data={"x": "1", "y": "1"})
        await world.api.apply(kinds.CONFIG_MAP, wanted, manager="one")
        editor = world.client("kubectl-edit")
        await editor.patch(kinds.CONFIG_MAP, "a", world.namespace, {"data": {"x": "2"}})
        with pytest.raises(Conflict) as error:
            await world.api.apply(
                kinds.CONFIG_MAP, world.named("a", data={"x": "1", "y": "1"}), manager="one"
            )
        told = 'Apply failed with 1 conflict: conflict with "kubectl-edit" using v1: .data.x'
        assert refused(error) == (409, "Conflict", told)
        without = await world.api.apply(kinds.CONFIG_MAP, world.named("a", data={"y": "1"}), manager="one")
        assert without["data"] == {"x": "2", "y": "1"}

    play(scenario)


def test_fields_that_are_no_longer_applied_go(play: Play) -> None:
    async def scenario(world: World) -> None:
        labelled = world.named("a", data={"x": "1", "y": "1"})
        labelled["metadata"]["labels"] = {"l": "1"}
        await world.api.apply(kinds.CONFIG_MAP, labelled, manager="one")
        bare = await world.api.apply(kinds.CONFIG_MAP, world.named("a", data={"y": "1"}), manager="one")
        assert bare["data"] == {"y": "1"}
        assert "labels" not in bare["metadata"]

    play(scenario)


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
        await world.api.create(kinds.CONFIG_MAP, world.named("a"))
        listed = await world.api.list(kinds.CONFIG_MAP, world.namespace)
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
        told = (
            'Operation cannot be fulfilled on Widget.contract.rackloom.test "a": the UID in the precondition '
            f"(other) does not match the UID in record ({uid}). The object might have been deleted and then "
            "recreated"
        )
        assert refused(error) == (409, "Conflict", told)
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


async def _is_gone(world: World, kind: Kind, name: str) -> bool:
    with contextlib.suppress(NotFound):
        await world.api.get(kind, name, world.namespace)
        return False
    return True


def test_an_object_goes_after_the_last_of_its_owners(play: Play) -> None:
    async def scenario(world: World) -> None:
        one = await world.api.create(kinds.CONFIG_MAP, world.named("one"))
        two = await world.api.create(kinds.CONFIG_MAP, world.named("two"))
        await world.api.create(kinds.CONFIG_MAP, _owned(world, "both", one, two))
        await world.api.create(kinds.CONFIG_MAP, _owned(world, "mine", one))
        await world.api.delete(kinds.CONFIG_MAP, "one", world.namespace)
        await eventually(lambda: _is_gone(world, kinds.CONFIG_MAP, "mine"))
        assert not await _is_gone(world, kinds.CONFIG_MAP, "both")
        await world.api.delete(kinds.CONFIG_MAP, "two", world.namespace)
        await eventually(lambda: _is_gone(world, kinds.CONFIG_MAP, "both"))

    play(scenario)


def test_an_object_of_an_owner_that_never_was_goes(play: Play) -> None:
    async def scenario(world: World) -> None:
        nobody: Object = {"apiVersion": "v1", "kind": "ConfigMap"}
        nobody["metadata"] = {"name": "nobody", "uid": "00000000-0000-4000-8000-000000000000"}
        await world.api.create(kinds.CONFIG_MAP, _owned(world, "orphan", nobody))
        await eventually(lambda: _is_gone(world, kinds.CONFIG_MAP, "orphan"))

    play(scenario)


def test_foreground_deletion_waits_for_dependents(play: Play) -> None:
    async def scenario(world: World) -> None:
        owner = await world.api.create(kinds.CONFIG_MAP, world.named("owner"))
        held = _owned(world, "held", owner, blocking=True)
        held["metadata"]["finalizers"] = ["contract.rackloom.test/hold"]
        await world.api.create(kinds.CONFIG_MAP, held)
        await world.api.delete(kinds.CONFIG_MAP, "owner", world.namespace, propagation="Foreground")

        async def is_asked() -> bool:
            found = await world.api.get(kinds.CONFIG_MAP, "held", world.namespace)
            return "deletionTimestamp" in found["metadata"]

        await eventually(is_asked)
        waiting = await world.api.get(kinds.CONFIG_MAP, "owner", world.namespace)
        assert waiting["metadata"]["finalizers"] == ["foregroundDeletion"]
        await world.api.patch(kinds.CONFIG_MAP, "held", world.namespace, {"metadata": {"finalizers": None}})
        await eventually(lambda: _is_gone(world, kinds.CONFIG_MAP, "owner"))

    play(scenario)


def test_orphans_stay(play: Play) -> None:
    async def scenario(world: World) -> None:
        owner = await world.api.create(kinds.CONFIG_MAP, world.named("owner"))
        await world.api.create(kinds.CONFIG_MAP, _owned(world, "orphan", owner))
        await world.api.delete(kinds.CONFIG_MAP, "owner", world.namespace, propagation="Orphan")
        await eventually(lambda: _is_gone(world, kinds.CONFIG_MAP, "owner"))
        left = await world.api.get(kinds.CONFIG_MAP, "orphan", world.namespace)
        assert not left["metadata"].get("ownerReferences")

    play(scenario)


def _claim(name: str) -> Object:
    exactly = {"deviceClassName": "none.rackloom.test"}
    return {"spec": {"devices": {"requests": [{"name": name, "exactly": exactly}]}}}


def test_claims_have_their_counts_filled_in_and_stay_as_they_are(play: Play) -> None:
    async def scenario(world: World) -> None:
        filled = {"deviceClassName": "none.rackloom.test", "allocationMode": "ExactCount", "count": 1}
        claim = await world.api.create(kinds.RESOURCE_CLAIM, world.named("a", **_claim("r")))
        assert claim["spec"]["devices"]["requests"] == [{"name": "r", "exactly": filled}]
        template = world.named("a", spec=_claim("r"))
        made = await world.api.create(kinds.RESOURCE_CLAIM_TEMPLATE, template)
        assert made["spec"]["spec"]["devices"]["requests"] == [{"name": "r", "exactly": filled}]
        with pytest.raises(Rejected) as error:
            await world.api.patch(kinds.RESOURCE_CLAIM, "a", world.namespace, _claim("other"))
        code, reason, message = refused(error)
        assert (code, reason) == (422, "Invalid")
        assert message.startswith('ResourceClaim.resource.k8s.io "a" is invalid: spec: Invalid value: ')
        assert message.endswith("field is immutable")
        other = {"spec": _claim("other")}
        with pytest.raises(Rejected) as error:
            await world.api.patch(kinds.RESOURCE_CLAIM_TEMPLATE, "a", world.namespace, other)
        assert refused(error)[:2] == (422, "Invalid")

    play(scenario)


def _pod(world: World, name: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "none.invalid/none"}
    return world.named(name, spec={"containers": [container]} | spec)


async def _create_pod(world: World, pod: Object) -> Object:
    """A new namespace has no service account yet, without which a real server takes no pod."""
    made: list[Object] = []

    async def is_made() -> bool:
        with contextlib.suppress(Rejected):
            made.append(await world.api.create(kinds.POD, pod))
        return bool(made)

    await eventually(is_made)
    return made[0]


def test_pods_hardly_change(play: Play) -> None:
    async def scenario(world: World) -> None:
        gates = [{"name": "rackloom.test/hold"}]
        made = await _create_pod(world, _pod(world, "a", schedulingGates=gates))
        assert made["status"]["phase"] == "Pending"
        steered = {"spec": {"nodeSelector": {"no": "where"}}}
        await world.api.patch(kinds.POD, "a", world.namespace, steered)
        more = {"spec": {"schedulingGates": [*gates, {"name": "rackloom.test/more"}]}}
        with pytest.raises(Rejected) as error:
            await world.api.patch(kinds.POD, "a", world.namespace, more)
        assert "only deletion is allowed, but found new scheduling gate" in error.value.message
        await world.api.patch(kinds.POD, "a", world.namespace, {"spec": {"schedulingGates": None}})
        with pytest.raises(Rejected) as error:
            await world.api.patch(kinds.POD, "a", world.namespace, {"spec": {"hostname": "x"}})
        assert error.value.message.startswith(
            'Pod "a" is invalid: spec: Forbidden: pod updates may not change fields other than'
        )

    play(scenario)


def test_a_pod_on_a_node_has_its_grace_and_any_other_none(play: Play) -> None:
    async def scenario(world: World) -> None:
        gated = _pod(world, "free", schedulingGates=[{"name": "rackloom.test/hold"}])
        await _create_pod(world, gated)
        await world.api.delete(kinds.POD, "free", world.namespace)
        assert await _is_gone(world, kinds.POD, "free")
        await _create_pod(world, _pod(world, "bound", nodeName="no-such-node"))
        await world.api.delete(kinds.POD, "bound", world.namespace)
        left = await world.api.get(kinds.POD, "bound", world.namespace)
        assert left["metadata"]["deletionGracePeriodSeconds"] == 30
        await world.api.delete(kinds.POD, "bound", world.namespace, grace_seconds=0)
        assert await _is_gone(world, kinds.POD, "bound")

    play(scenario)


def test_a_namespace_takes_what_is_in_it_along(play: Play) -> None:
    async def scenario(world: World) -> None:
        name = f"{world.namespace}-2"
        await world.api.create(kinds.NAMESPACE, {"metadata": {"name": name}})
        held = {"metadata": {"name": "held", "namespace": name, "finalizers": ["rackloom.test/hold"]}}
        await world.api.create(kinds.CONFIG_MAP, held)
        await world.api.delete(kinds.NAMESPACE, name)

        async def is_asked() -> bool:
            found = await world.api.get(kinds.CONFIG_MAP, "held", name)
            return "deletionTimestamp" in found["metadata"]

        await eventually(is_asked)
        with pytest.raises(Rejected) as error:
            await world.api.create(kinds.CONFIG_MAP, {"metadata": {"name": "late", "namespace": name}})
        told = (
            f'configmaps "late" is forbidden: unable to create new content in namespace {name} because it is '
            "being terminated"
        )
        assert refused(error) == (403, "Forbidden", told)
        await world.api.patch(kinds.CONFIG_MAP, "held", name, {"metadata": {"finalizers": None}})

        async def is_gone() -> bool:
            found = (await world.api.list(kinds.NAMESPACE)).items
            return name not in [one["metadata"]["name"] for one in found]

        await eventually(is_gone)

    play(scenario)


def test_an_informer_follows(play: Play) -> None:
    async def scenario(world: World) -> None:
        informer = Informer(
            world.api, WIDGET, world.namespace, indexers={"uid": by_uid}, rng=random.Random(0)
        )
        following = asyncio.create_task(informer.run())
        await informer.synced()
        made = await world.api.create(WIDGET, world.named("a"))

        async def is_seen() -> bool:
            return informer.cache.find("uid", made["metadata"]["uid"]) == (made,)

        await eventually(is_seen)
        await world.api.delete(WIDGET, "a", world.namespace)

        async def is_gone() -> bool:
            return not len(informer.cache)

        await eventually(is_gone)
        following.cancel()
        await asyncio.wait({following})

    play(scenario)


def test_an_election_has_one_winner_at_a_time(play: Play) -> None:
    async def scenario(world: World) -> None:
        terms, won = Terms(lease=3.0, renew=2.0, retry=0.2), []

        def candidate(name: str) -> asyncio.Task[None]:
            async def lead() -> None:
                won.append(name)
                await asyncio.Event().wait()

            api, rng = world.client(name), random.Random(name)
            election = Election(api, world.namespace, "x", name, wall=time.time, rng=rng, terms=terms)
            return asyncio.create_task(election.run(lead))

        first = candidate("one")
        await eventually(lambda: _are(won, "one"))
        second = candidate("two")
        await asyncio.sleep(1)
        assert won == ["one"]
        first.cancel()
        await asyncio.wait({first})
        await eventually(lambda: _are(won, "one", "two"))
        second.cancel()
        await asyncio.wait({second})
        lease = await world.api.get(kinds.LEASE, "x", world.namespace)
        assert lease["spec"]["holderIdentity"] == ""

    play(scenario)


async def _are(found: list[str], *wanted: str) -> bool:
    return found == list(wanted)


def test_a_lease_is_not_written_blindly(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await world.api.create(kinds.LEASE, world.named("a", spec={"holderIdentity": "x"}))
        blind = world.named("a", spec={"holderIdentity": "y"})
        with pytest.raises(Rejected) as error:
            await world.api.replace(kinds.LEASE, blind)
        assert "metadata.resourceVersion" in error.value.message
        await world.api.replace(kinds.LEASE, made | {"spec": {"holderIdentity": "y"}})

    play(scenario)
