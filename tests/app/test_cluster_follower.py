"""A follower's report of a cluster: its objects, whether they changed, and since when it is unknown."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import pytest

from rackloom.app.site import cluster
from rackloom.app.site.cluster import ClusterFollower
from rackloom.app.site.rack_map import SiteSource
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.carve.store.database import Store
from rackloom.claim.kube.api import KubeError, NotFound
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, DAEMON_CONTAINER, GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, DEVICE_TAINT_RULES, NAMESPACE, NODE, POD
from rackloom.core.cluster.projection import SNAPSHOT_KINDS, project_object
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.lab.kube import refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

EPOCH = 1_800_000_000.0
LONG = 100.0
"""Seconds in which a bookmark comes, and the longest pause between two attempts is over."""


def wall():
    return EPOCH + asyncio.get_running_loop().time()


@asynccontextmanager
async def followed(api):
    follower = ClusterFollower(api, wall, random.Random(0))
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def layer_of(follower):
    snapshot = await site_snapshot(wall(), cluster=follower, reach=follower.reach)
    return snapshot.layer(Layer.CLUSTER), snapshot


def node(name, heartbeat="2026-01-01T00:00:00Z", ready="True"):
    condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [condition]}}


class Silent(DirectApi):
    """An API server that is away while `silent`: it answers nothing, and its watches end."""

    silent = True

    async def list(self, *what, **how):
        if self.silent:
            raise RequestFault().error()
        return await super().list(*what, **how)

    async def watch(self, kind, *what, **how):
        if self.silent:
            raise RequestFault().error()
        async for event in super().watch(kind, *what, **how):
            if self.silent:
                raise RequestFault().error()
            yield event


def test_each_kind_is_listed_once_however_often_it_is_looked_at():
    async def run():
        kube = FakeKube()
        await DirectApi(kube, "admin").create(NODE, node("a"))
        async with followed(DirectApi(kube, "map")) as follower:
            for _ in range(50):
                await asyncio.sleep(1)
                layer, snapshot = await layer_of(follower)
            assert (layer.unknown_since, [node.name for node in snapshot.nodes]) == (None, ["a"])
        return {(call.verb, call.resource): n for call, n in kube.calls.items() if call.user == "map"}

    counted = event_loop.run_simulation(1, run)
    rules = [counted.pop((verb, DEVICE_TAINT_RULES[0].plural), 0) for verb in ("list", "watch")]
    served = set(SNAPSHOT_KINDS) - set(DEVICE_TAINT_RULES)
    assert counted == {(verb, kind.plural): 1 for verb in ("list", "watch") for kind in served}
    assert len(DEVICE_TAINT_RULES) <= rules[0] <= 10 * len(DEVICE_TAINT_RULES), "asked again now and then"
    assert rules[1] == 0


def test_a_cluster_that_never_answered_is_unknown_and_not_empty():
    async def run():
        async with followed(Silent(FakeKube(), "map")) as follower:
            began = wall()
            first, _ = await layer_of(follower)
            await asyncio.sleep(LONG)
            layer, snapshot = await layer_of(follower)
            assert first.unknown_since == layer.unknown_since == began
            assert (layer.at, snapshot.nodes) == (None, ())
            assert "the cluster cannot be read" in layer.problem

    event_loop.run_simulation(1, run)


def test_what_is_lost_is_unknown_since_it_was_last_heard_of_and_comes_back():
    async def run():
        api = Silent(FakeKube(), "map")
        api.silent = False
        await api.create(NODE, node("a"))
        async with followed(api) as follower:
            await asyncio.sleep(LONG)
            before, _ = await layer_of(follower)
            known = follower.version()
            api.silent = True
            await asyncio.sleep(LONG)
            lost, snapshot = await layer_of(follower)
            assert before.unknown_since is None
            assert before.at <= lost.unknown_since < wall() - LONG / 2
            assert (snapshot.nodes, follower.version() == known) == ((), False)
            await asyncio.sleep(LONG)
            assert (await layer_of(follower))[0].unknown_since == lost.unknown_since
            api.silent = False
            await asyncio.sleep(2 * LONG)
            again, snapshot = await layer_of(follower)
            assert again.unknown_since is None
            assert again.at > lost.unknown_since
            assert [node.name for node in snapshot.nodes] == ["a"]

    event_loop.run_simulation(1, run)


def test_only_what_is_drawn_is_a_change():
    async def run():
        kube = FakeKube()
        api = DirectApi(kube, "admin")
        await api.create(NODE, node("a"))
        async with followed(DirectApi(kube, "map")) as follower:
            versions = [await settled(follower)]

            async def changes(step):
                await step
                versions.append(await settled(follower))
                return versions[-1] != versions[-2]

            beat = {"status": node("a", "2026-01-01T00:05:00Z")["status"]}
            ill = {"status": node("a", ready="False")["status"]}
            label = {"metadata": {"labels": {GPU_CLIQUE_LABEL: "c.1"}}}
            plain = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": []}}
            assert not await changes(api.patch(NODE, "a", None, beat, subresource="status"))
            assert await changes(api.patch(NODE, "a", None, ill, subresource="status"))
            assert await changes(api.patch(NODE, "a", None, label))
            assert not await changes(api.create(POD, plain)), "a pod without devices"
            assert not await changes(api.delete(POD, "p", "default"))
            assert await changes(api.delete(NODE, "a"))

    async def settled(follower):
        await asyncio.sleep(1)
        return follower.version()

    event_loop.run_simulation(1, run)


@pytest.mark.parametrize(
    ("kind", "refusal", "is_known"),
    [
        (COMPUTE_DOMAIN, NotFound(404, "NotFound", "no such type"), True),
        (NAMESPACE, refusals.forbidden(NAMESPACE, "", "not yours"), True),
        (NODE, refusals.forbidden(NODE, "", "not yours"), False),
        (NODE, NotFound(404, "NotFound", "no such type"), False),
        (COMPUTE_DOMAIN, KubeError(500, "InternalError", "etcd is away"), False),
    ],
)
def test_a_kind_that_is_refused(kind, refusal, is_known):
    class Narrow(DirectApi):
        async def list(self, asked, *what, **how):
            if asked == kind:
                raise refusal
            return await super().list(asked, *what, **how)

    async def run():
        async with followed(Narrow(FakeKube(), "map")) as follower:
            await asyncio.sleep(LONG)
            layer, _ = await layer_of(follower)
            assert (layer.unknown_since is None) is is_known
            assert (layer.at is not None) is is_known
            assert is_known or refusal.message in layer.problem

    event_loop.run_simulation(1, run)


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (COMPUTE_DOMAIN, NotFound(404, "NotFound", "no such type")),
        (NAMESPACE, refusals.forbidden(NAMESPACE, "", "not yours")),
    ],
)
def test_what_is_excused_was_heard_of_when_it_was_last_told(kind, refusal):
    """One failure of a kind that is not there hides no more than the time since then."""
    kube = FakeKube()

    class Narrow(DirectApi):
        problem = refusal
        asked = 0

        async def list(self, asked, *what, **how):
            if asked == kind:
                self.asked += 1
                raise self.problem
            return await super().list(asked, *what, **how)

    async def run():
        api = Narrow(kube, "map")
        async with followed(api) as follower:
            await asyncio.sleep(10 * LONG)
            before, _ = await layer_of(follower)
            assert before.unknown_since is None
            assert before.at > wall() - LONG
            assert api.asked < 100, "it is not asked all the time"
            known = follower.version()
            api.problem = KubeError(500, "InternalError", "etcd is away")
            await asyncio.sleep(LONG)
            lost, _ = await layer_of(follower)
            assert "etcd is away" in lost.problem
            assert wall() - 2 * LONG < lost.unknown_since <= wall() - LONG / 2
            api.problem = refusal
            await asyncio.sleep(LONG)
            again, _ = await layer_of(follower)
            assert again.unknown_since is None
            assert follower.version() == known

    event_loop.run_simulation(1, run)


def test_a_defect_makes_the_cluster_unknown_and_ends_nothing(caplog, monkeypatch):
    async def run():
        api = DirectApi(FakeKube(), "map")
        async with followed(api) as follower:
            await asyncio.sleep(1)
            broken = True

            def drawn(kind, obj):
                if broken:
                    raise RecursionError("too deep")
                return project_object(kind, obj)

            monkeypatch.setattr(cluster, "project_object", drawn)
            await api.create(NODE, node("a"))
            await asyncio.sleep(1)
            lost, snapshot = await layer_of(follower)
            assert "too deep" in lost.problem
            assert (lost.unknown_since <= wall(), snapshot.nodes) == (True, ())
            assert "following nodes failed" in caplog.text
            broken = False
            known = follower.version()
            await asyncio.sleep(2 * LONG)
            again, snapshot = await layer_of(follower)
            assert (again.unknown_since, [node.name for node in snapshot.nodes]) == (None, ["a"])
            assert follower.version() != known

    event_loop.run_simulation(1, run)


def test_the_map_looks_for_imex_daemons_where_it_is_told():
    async def run():
        store, kube = Store.inline(), FakeKube()
        meta = {"name": "daemon", "namespace": "imex", "labels": {COMPUTE_DOMAIN_LABEL: "some-domain"}}
        spec = {"containers": [{"name": DAEMON_CONTAINER}], "nodeName": "tray-1"}
        await DirectApi(kube, "admin").create(NAMESPACE, {"metadata": {"name": "imex"}})
        await DirectApi(kube, "admin").create(POD, {"metadata": meta, "spec": spec})
        async with followed(DirectApi(kube, "map")) as follower:
            source = SiteSource(store, wall)
            seen = []
            for namespace in ({}, {"namespace": "imex"}):
                source.follow(follower, **namespace)
                await asyncio.sleep(1)
                seen.append([mesh.node for mesh in (await source.read()).snapshot.meshes])
            assert seen == [[], ["tray-1"]]
        await store.close()

    event_loop.run_simulation(1, run)
