"""A cluster in one process: DaemonSets, claims, scheduling, and pods that live on simulated nodes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube.controllers.claims import ResourceClaimController
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.controllers.workloads import DaemonSetController
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

DRIVER = "channels.test"


class Cluster:
    def __init__(self, kube: FakeKube) -> None:
        self.kube = kube
        self.api = DirectApi(kube, "test")
        self.kubelets = SimulatedKubelets(DirectApi(kube, "kubelet"), loop_wall_time, random.Random(1))

    async def make(self, kind: ResourceKind, name: str, **more: Any) -> Object:
        metadata = {"name": name} | ({"namespace": "default"} if kind.namespaced else {})
        return await self.api.create(kind, {"metadata": metadata | more.pop("metadata", {})} | more)

    def all(self, kind: ResourceKind) -> list[Object]:
        return self.kube.store.all(kind)

    def pod(self, name: str) -> Object:
        return self.kube.store.read(objects.POD, ("default", name))

    async def wait(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not holds():
                await asyncio.sleep(0.1)


@asynccontextmanager
async def cluster(nodes: int = 2, seed: int = 0, **labels: str) -> AsyncGenerator[Cluster, None]:
    found = Cluster(FakeKube(seed=seed))
    controllers = [
        cls(found.kube, random.Random(seed))
        for cls in (DaemonSetController, ResourceClaimController, SimulatedScheduler)
    ]
    tasks = [asyncio.create_task(controller.run()) for controller in (*controllers, found.kubelets)]
    for number in range(nodes):
        await found.kubelets.register(NodeSpec(f"n{number}", labels))
    try:
        yield found
    finally:
        for task in tasks:
            assert not task.done() or task.exception() is None
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def devices(found: Cluster, *nodes: str, each: int = 1) -> None:
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    await found.make(objects.DEVICE_CLASS, DRIVER, spec={"selectors": [selector]})
    for node in nodes:
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"channel-{number}"} for number in range(each)],
        }
        await found.make(objects.RESOURCE_SLICE, f"slice-{node}", spec=spec)


CLAIM = {"devices": {"requests": [{"name": "channel", "exactly": {"deviceClassName": DRIVER}}]}}


def with_template(name: str) -> Object:
    container = {"name": "main", "image": "x", "resources": {"claims": [{"name": "channel"}]}}
    claims = [{"name": "channel", "resourceClaimTemplateName": name}]
    return {"containers": [container], "resourceClaims": claims}


def is_running(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def test_a_daemon_set_has_a_pod_on_every_node_of_its_label() -> None:
    async def run() -> None:
        async with cluster(nodes=3) as found:
            labels = {"app": "d"}
            template = {
                "metadata": {"labels": labels},
                "spec": {"nodeSelector": {"domain": "1"}, "containers": [{"name": "main", "image": "x"}]},
            }
            spec = {"selector": {"matchLabels": labels}, "template": template}
            await found.make(objects.DAEMON_SET, "d", spec=spec)
            await asyncio.sleep(10)
            assert not found.all(objects.POD)
            for node in ("n0", "n2"):
                await found.api.patch(objects.NODE, node, None, {"metadata": {"labels": {"domain": "1"}}})

            def ready() -> int:
                (daemon_set,) = found.all(objects.DAEMON_SET)
                return int(daemon_set.get("status", {}).get("numberReady", 0))

            await found.wait(lambda: ready() == 2)
            assert sorted(pod["spec"]["nodeName"] for pod in found.all(objects.POD)) == ["n0", "n2"]
            await found.api.patch(objects.NODE, "n0", None, {"metadata": {"labels": {"domain": None}}})
            await found.wait(lambda: [pod["spec"]["nodeName"] for pod in found.all(objects.POD)] == ["n2"])
            (survivor,) = found.all(objects.POD)
            await found.api.delete(objects.POD, survivor["metadata"]["name"], "default")
            old = survivor["metadata"]["uid"]
            await found.wait(
                lambda: (
                    ready() == 1 and [p["metadata"]["uid"] != old for p in found.all(objects.POD)] == [True]
                )
            )
            await found.api.delete(objects.DAEMON_SET, "d", "default")
            await found.wait(lambda: not found.all(objects.POD))

    event_loop.run_simulation(0, run)


def test_a_claim_follows_its_pod() -> None:
    async def run() -> None:
        async with cluster(nodes=2) as found:
            await devices(found, "n1")
            await found.make(objects.POD, "a", spec=with_template("t"))
            await asyncio.sleep(10)
            assert not found.pod("a")["spec"].get("nodeName")
            await found.make(objects.RESOURCE_CLAIM_TEMPLATE, "t", spec={"spec": CLAIM})
            await found.wait(lambda: is_running(found.pod("a")))
            assert found.pod("a")["spec"]["nodeName"] == "n1"
            (claim,) = found.all(objects.RESOURCE_CLAIM)
            (result,) = claim["status"]["allocation"]["devices"]["results"]
            assert (result["driver"], result["pool"], result["device"]) == (DRIVER, "n1", "channel-0")
            assert [user["name"] for user in claim["status"]["reservedFor"]] == ["a"]
            await found.make(objects.POD, "b", spec=with_template("t"))
            await asyncio.sleep(20)
            condition = found.pod("b")["status"]["conditions"][0]
            assert (condition["reason"], condition["status"]) == ("Unschedulable", "False")
            await found.api.delete(objects.POD, "a", "default")
            await found.wait(lambda: is_running(found.pod("b")))
            await found.api.delete(objects.POD, "b", "default")
            await found.wait(lambda: not found.all(objects.POD) and not found.all(objects.RESOURCE_CLAIM))

    event_loop.run_simulation(0, run)


def test_pods_share_a_claim_and_hold_it_until_the_last_has_gone() -> None:
    async def run() -> None:
        async with cluster(nodes=2) as found:
            await devices(found, "n0")
            await found.make(objects.RESOURCE_CLAIM, "shared", spec=CLAIM)
            spec = with_template("") | {
                "resourceClaims": [{"name": "channel", "resourceClaimName": "shared"}]
            }
            for name in "abc":
                await found.make(objects.POD, name, spec=spec)
            await found.wait(lambda: all(is_running(found.pod(name)) for name in "abc"))
            assert {found.pod(name)["spec"]["nodeName"] for name in "abc"} == {"n0"}
            await found.api.delete(objects.RESOURCE_CLAIM, "shared", "default")
            for name in "abc":
                (claim,) = found.all(objects.RESOURCE_CLAIM)
                assert "allocation" in claim["status"]
                await found.api.delete(objects.POD, name, "default")
                await asyncio.sleep(60)
            assert not found.all(objects.RESOURCE_CLAIM)

    event_loop.run_simulation(0, run)


def test_pods_with_affinity_stay_where_the_first_of_them_went() -> None:
    async def run() -> None:
        async with cluster(nodes=0) as found:
            for number in range(4):
                clique = {"nvidia.com/gpu.clique": f"q{number // 2}"}
                await found.kubelets.register(NodeSpec(f"n{number}", clique))
            labels = {"job": "j"}
            term = {"topologyKey": "nvidia.com/gpu.clique", "labelSelector": {"matchLabels": labels}}
            rule = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
            spec = {"containers": [{"name": "main", "image": "x"}], "affinity": rule}
            for name in "abcd":
                await found.make(objects.POD, name, metadata={"labels": labels}, spec=spec)
            await found.wait(lambda: all(is_running(found.pod(name)) for name in "abcd"))
            where = {found.pod(name)["spec"]["nodeName"] for name in "abcd"}
            assert where in ({"n0", "n1"}, {"n2", "n3"})

    event_loop.run_simulation(0, run)


def test_a_slice_that_cannot_be_read_stops_nothing() -> None:
    async def run() -> None:
        async with cluster(nodes=1) as found:
            pool = {"name": "n0", "generation": 1, "resourceSliceCount": 1}
            spec = {"driver": DRIVER, "nodeName": "n0", "pool": pool}
            await found.make(
                objects.RESOURCE_SLICE, "odd", spec=spec | {"devices": [{"name": "d", "newField": 1}]}
            )
            await found.make(objects.POD, "a", spec={"containers": [{"name": "main", "image": "x"}]})
            await found.wait(lambda: is_running(found.pod("a")))

    event_loop.run_simulation(0, run)


def test_a_gated_pod_waits() -> None:
    async def run() -> None:
        async with cluster() as found:
            spec = {
                "containers": [{"name": "main", "image": "x"}],
                "schedulingGates": [{"name": "rackloom/hold"}],
            }
            await found.make(objects.POD, "a", spec=spec)
            await asyncio.sleep(30)
            assert not found.pod("a")["spec"].get("nodeName")
            await found.api.patch(objects.POD, "a", "default", {"spec": {"schedulingGates": None}})
            await found.wait(lambda: is_running(found.pod("a")))

    event_loop.run_simulation(0, run)


def test_faults_delay_and_do_not_break() -> None:
    async def run() -> None:
        for seed in range(5):
            async with cluster(nodes=3, seed=seed) as found:
                found.kube.faults.delay(0.0, 0.05)
                await devices(found, "n0", "n1", "n2", each=2)
                await found.make(objects.RESOURCE_CLAIM_TEMPLATE, "t", spec={"spec": CLAIM})
                for user in ("kube-scheduler", "kube-controller-manager"):
                    found.kube.faults.add(RequestFault(rate=0.2, user=user, code=500))
                    found.kube.faults.add(RequestFault(rate=0.2, user=user, lost="reply"))
                for number in range(6):
                    await found.make(objects.POD, f"p{number}", spec=with_template("t"))
                await found.wait(lambda: all(is_running(pod) for pod in found.all(objects.POD)))
                held = [
                    (result["pool"], result["device"])
                    for claim in found.all(objects.RESOURCE_CLAIM)
                    for result in claim["status"]["allocation"]["devices"]["results"]
                ]
                assert len(held) == len(set(held)) == 6
                for number in range(6):
                    await found.api.delete(objects.POD, f"p{number}", "default")
                await found.wait(lambda: not found.all(objects.POD) and not found.all(objects.RESOURCE_CLAIM))

    event_loop.run_simulation(0, run)
