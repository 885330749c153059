"""A state that follows watches equals a fresh reading, also after a watch broke."""

import asyncio
import random
from collections import Counter

import pytest

from rackloom.claim.kube.informer import STATE_KINDS, CacheSet, ClusterFeed, Informer
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, SchedulerLabels
from rackloom.core.cluster.objects import NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.core.cluster.reader import read_state
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

NAMES = [f"n{number}" for number in range(4)]


def _node(name, rng):
    there = {"nvidia.com/gpu": str(rng.choice((0, 4))), "cpu": "144", "pods": "110"}
    ready = {"type": "Ready", "status": rng.choice(("True", "Unknown"))}
    labels = {GPU_CLIQUE_LABEL: f"u.{rng.randrange(2)}"}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": there, "conditions": [ready]},
    }


def _pod(name, rng):
    container = {
        "name": "c",
        "image": "i",
        "resources": {"limits": {"nvidia.com/gpu": str(rng.randrange(3))}},
    }
    spec = {"nodeName": rng.choice(NAMES), "containers": [container]}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def _slice(name, rng):
    pool = {"name": name, "generation": rng.randrange(3), "resourceSliceCount": 1}
    devices = [{"name": f"gpu-{number}"} for number in range(rng.randrange(5))]
    spec = {"driver": "gpu.nvidia.com", "nodeName": name, "pool": pool, "devices": devices}
    return {"metadata": {"name": name}, "spec": spec}


def _claim(name, rng):
    request = {"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    held = {"request": "r", "driver": "gpu.nvidia.com", "pool": rng.choice(NAMES), "device": "gpu-0"}
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [request]}},
        "status": {"allocation": {"devices": {"results": [held]}}},
    }


MAKE = {NODE: _node, POD: _pod, RESOURCE_SLICE: _slice, RESOURCE_CLAIM: _claim}


async def _change_something(user, rng):
    kind, name = rng.choice(STATE_KINDS), rng.choice(NAMES)
    namespace = "default" if kind in (POD, RESOURCE_CLAIM) else None
    there = {obj["metadata"]["name"] for obj in (await user.list(kind)).items}
    if name in there:
        await user.delete(kind, name, namespace, grace_seconds=0)
    # A name that is free again, perhaps while no watch runs, may be taken by another object at once.
    if name not in there or rng.random() < 0.5:
        await user.create(kind, MAKE[kind](name, rng))
    elif kind == POD and there - {name}:
        ended = {"status": {"phase": "Succeeded"}}
        await user.patch(POD, min(there - {name}), "default", ended, subresource="status")


@pytest.mark.parametrize("seed", range(12))
def test_the_state_equals_a_fresh_reading(seed):
    async def story():
        rng, kube = random.Random(seed), FakeKube(seed=seed, window=20)
        user, api = DirectApi(kube, "user"), DirectApi(kube, "feed")
        caches = CacheSet({kind: (Informer(api, kind, rng=rng),) for kind in STATE_KINDS})
        feed = ClusterFeed(caches, SchedulerLabels())
        runs = [asyncio.create_task(informer.run()) for informer in caches.informers]
        await caches.synced()
        for _ in range(10):
            if rng.random() < 0.5:
                # Only a new list shows these changes.
                kube.faults.add(RequestFault(verb="watch"))
                kube.store.hang_up()
                for _ in range(rng.randrange(12)):
                    await _change_something(user, rng)
                kube.store.compact()
                await asyncio.sleep(1)
                kube.faults.clear()
            else:
                for _ in range(rng.randrange(12)):
                    await _change_something(user, rng)
            if rng.random() < 0.5:
                await feed.state()
            await asyncio.sleep(90)
            found = await feed.state()
            lists = [(await user.list(kind)).items for kind in (NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE)]
            fresh = read_state(*lists, SchedulerLabels())
            assert (found.gpus, found.published, found.bound) == (fresh.gpus, fresh.published, fresh.bound)
            for many in ("holds", "holders", "unreadable"):
                assert Counter(getattr(found, many)) == Counter(getattr(fresh, many)), many
            for objects in ("nodes", "pods", "claims"):
                assert sorted(map(repr, getattr(found, objects))) == sorted(
                    map(repr, getattr(fresh, objects))
                )
            assert await feed.state() is found
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    event_loop.run_simulation(seed, story)


def test_a_defect_in_one_object_loses_no_other(monkeypatch):
    async def story():
        caches = CacheSet(dict.fromkeys(STATE_KINDS, ()))
        feed = ClusterFeed(caches, SchedulerLabels())
        rng, take = random.Random(1), feed._reader.take
        for name in NAMES:
            node = _node(name, rng)
            feed.take(NODE, {**node, "metadata": {**node["metadata"], "uid": name, "resourceVersion": "1"}})

        def struck(kind, obj):
            if obj["metadata"]["name"] == "n1":
                raise RuntimeError("a defect")
            take(kind, obj)

        monkeypatch.setattr(feed._reader, "take", struck)
        with pytest.raises(RuntimeError):
            await feed.state()
        assert {node.name for node in (await feed.state()).nodes} == {"n0", "n2", "n3"}

    event_loop.run_simulation(1, story)
