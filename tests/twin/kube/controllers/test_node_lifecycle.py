"""A node whose heartbeat stops becomes unknown and unreachable, and is itself again when it comes back."""

import asyncio
import random

from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import NODE
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kube.controllers import NodeLifecycle
from rackloom.twin.kube.controllers.node_lifecycle import UNREACHABLE
from rackloom.twin.kube.times import loop_time
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.node_objects import LEASE_SECONDS, NodeSpec
from rackloom.twin.virtual import event_loop


def seen(node: Object) -> tuple[str, bool]:
    (ready,) = [one["status"] for one in node["status"]["conditions"] if one["type"] == "Ready"]
    taints = {one["key"] for one in node.get("spec", {}).get("taints", ())}
    return ready, UNREACHABLE in taints


def test_a_lost_node_is_told_apart_and_comes_back() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "test")
        kubelets = Kubelets(api, loop_time, random.Random(1))
        work = [asyncio.create_task(one.run()) for one in (kubelets, NodeLifecycle(kube, loop_time))]
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

    event_loop.run(0, run)
