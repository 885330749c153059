"""A scheduler's contract with Rackloom: it binds the pods that fit on its node, and nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.claim.kube.world import Play, World, create_pod, eventually, pod

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object

GPU = "nvidia.com/gpu"
ROOM = {"cpu": "4", "memory": "8Gi", "pods": "3", GPU: "4"}
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "made for a test"}


@asynccontextmanager
async def a_node(world: World, **room: str) -> AsyncIterator[str]:
    """A node for this scenario alone, with `room`: other pods of the cluster do not tolerate its taint."""
    name, status = f"{world.namespace}-node", {"capacity": room, "allocatable": room, "conditions": [READY]}
    made = {
        "metadata": {"name": name, "labels": {"contract": world.namespace}},
        "spec": {"taints": [{"key": "contract.rackloom.test", "effect": "NoSchedule"}]},
        "status": status,
    }
    await world.api.create(objects.NODE, made)
    try:
        yield name
    finally:
        await world.api.delete(objects.NODE, name)


def wants(world: World, name: str, resources: Object, **spec: Any) -> Object:
    """A pod for the node of its scenario. It tolerates every taint."""
    made = pod(world, name, tolerations=[{"operator": "Exists"}], nodeSelector={"contract": world.namespace})
    made["spec"]["containers"][0]["resources"] = resources
    made["spec"] |= spec
    return made


async def is_bound(world: World, name: str) -> bool:
    found = await world.api.get(objects.POD, name, world.namespace)
    return bool(found["spec"].get("nodeName"))


async def is_left(world: World, name: str) -> bool:
    """Whether the scheduler has looked at a pod in vain."""
    found = await world.api.get(objects.POD, name, world.namespace)
    assert not found["spec"].get("nodeName")
    reasons = [condition.get("reason") for condition in found["status"].get("conditions") or ()]
    return "Unschedulable" in reasons


async def takes(world: World, made: Object) -> None:
    await create_pod(world, made)
    await eventually(lambda: is_bound(world, made["metadata"]["name"]))


async def leaves(world: World, made: Object) -> None:
    await create_pod(world, made)
    await eventually(lambda: is_left(world, made["metadata"]["name"]))


@pytest.mark.slow
def test_extended_resources_are_counted(play: Play) -> None:
    async def scenario(world: World) -> None:
        async with a_node(world, **ROOM):
            await takes(world, wants(world, "three", {"limits": {GPU: "3"}}))
            await leaves(world, wants(world, "two", {"limits": {GPU: "2"}}))
            await leaves(world, wants(world, "other", {"limits": {"example.com/other": "1"}}))
            await takes(world, wants(world, "one", {"limits": {GPU: "1"}}))
            await world.api.delete(objects.POD, "three", world.namespace, grace_seconds=0)
            await eventually(lambda: is_bound(world, "two"))

    play(scenario)


def test_processors_and_memory_are_counted(play: Play) -> None:
    async def scenario(world: World) -> None:
        async with a_node(world, **ROOM):
            await takes(world, wants(world, "most", {"requests": {"cpu": "3500m", "memory": "6Gi"}}))
            await leaves(world, wants(world, "slow", {"requests": {"cpu": "501m"}}))
            await leaves(world, wants(world, "fat", {"requests": {"memory": "3Gi"}}))
            # A container's limit counts as its request if it requests nothing.
            await leaves(world, wants(world, "limited", {"limits": {"cpu": "1"}}))
            await takes(world, wants(world, "rest", {"limits": {"cpu": "2"}, "requests": {"cpu": "500m"}}))

    play(scenario)


def test_pods_are_counted(play: Play) -> None:
    async def scenario(world: World) -> None:
        async with a_node(world, **ROOM):
            for name in ("a", "b", "c"):
                await takes(world, wants(world, name, {}))
            await leaves(world, wants(world, "d", {}))

    play(scenario)


def test_init_containers_run_before_the_others_and_sidecars_beside_them(play: Play) -> None:
    def gpu_pod(name: str, gpus: int, **more: str) -> Object:
        return {"name": name, "image": "none.invalid/none", "resources": {"limits": {GPU: str(gpus)}}} | more

    async def scenario(world: World) -> None:
        async with a_node(world, **ROOM):
            beside = gpu_pod("beside", 1, restartPolicy="Always")
            await leaves(world, wants(world, "a", {}, initContainers=[beside, gpu_pod("before", 4)]))
            await leaves(world, wants(world, "b", {"limits": {GPU: "4"}}, initContainers=[beside]))
            last = [gpu_pod("before", 4), beside]
            await takes(world, wants(world, "c", {"limits": {GPU: "3"}}, initContainers=last))
            await leaves(world, wants(world, "d", {"limits": {GPU: "1"}}))

    play(scenario)


@pytest.mark.slow
def test_a_gated_pod_takes_no_room_and_one_of_another_scheduler_is_left_to_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        async with a_node(world, **ROOM):
            gates = [{"name": "rackloom.test/hold"}]
            gpus = {"limits": {GPU: "4"}}
            await create_pod(world, wants(world, "gated", gpus, schedulingGates=gates))
            await create_pod(world, wants(world, "foreign", gpus, schedulerName="nobody"))
            await takes(world, wants(world, "free", gpus))
            await world.api.patch(objects.POD, "gated", world.namespace, {"spec": {"schedulingGates": None}})
            await eventually(lambda: is_left(world, "gated"))
            foreign = await world.api.get(objects.POD, "foreign", world.namespace)
            assert not foreign["status"].get("conditions")
            await world.api.delete(objects.POD, "free", world.namespace, grace_seconds=0)
            await eventually(lambda: is_bound(world, "gated"))

    play(scenario)


def test_a_node_that_names_no_room_has_none(play: Play) -> None:
    async def scenario(world: World) -> None:
        async with a_node(world):
            await leaves(world, wants(world, "a", {}))

    play(scenario)
