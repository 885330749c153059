"""A node becomes unknown and unreachable when its heartbeat stops, and recovers when it comes back."""

import asyncio
import random

from rackloom.core.cluster.objects import NODE, Object
from rackloom.lab.kube.controllers.workloads import UNREACHABLE_TAINT, NodeLifecycleController
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.kubelets import LEASE_SECONDS, NodeSpec, SimulatedKubelets
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time


def seen(node: Object) -> tuple[str, bool]:
    (ready,) = [
        condition["status"] for condition in node["status"]["conditions"] if condition["type"] == "Ready"
    ]
    taints = {taint["key"] for taint in node.get("spec", {}).get("taints", ())}
    return ready, UNREACHABLE_TAINT in taints


def test_a_lost_node_is_told_apart_and_comes_back() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "test")
        kubelets = SimulatedKubelets(api, loop_wall_time, random.Random(1))
        work = [
            asyncio.create_task(controller.run())
            for controller in (kubelets, NodeLifecycleController(kube, loop_wall_time))
        ]
        for name in ("a", "b"):
            await kubelets.register(NodeSpec(name))
        await asyncio.sleep(3 * LEASE_SECONDS)
        assert seen(await api.get(NODE, "a")) == seen(await api.get(NODE, "b")) == ("True", False)
        other = {"key": "mine", "effect": "NoSchedule"}
        await api.patch(NODE, "a", None, {"spec": {"taints": [other]}})
        await kubelets.lose("a")
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert seen(await api.get(NODE, "a")) == ("Unknown", True)
        assert seen(await api.get(NODE, "b")) == ("True", False)
        await kubelets.register(NodeSpec("a", boot_id="2"))
        await asyncio.sleep(LEASE_SECONDS)
        assert seen(await api.get(NODE, "a")) == ("True", False)
        assert (await api.get(NODE, "a"))["spec"]["taints"] == [other]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    event_loop.run_simulation(0, run)
