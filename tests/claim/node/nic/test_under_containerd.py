"""NICs attached to sandboxes of a real containerd, through its NRI and CRI."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from tests.claim.node.nic.containerd_kit import containerd, needs_containerd
from tests.claim.node.nic.nic_node import DRIVER, NicNode
from tests.waiting import until_so

pytestmark = needs_containerd
POD = "p-uid"


@pytest.fixture
def runtime(host):
    with containerd(host.root) as runtime:
        yield runtime


def test_a_pod_gets_its_nic_and_keeps_it_when_its_container_restarts(kit, host, runtime):
    node = NicNode(kit, host)
    host.veth("nic0", "tor0", mtu=1400)
    host.address("nic0", "10.9.0.2/24")

    async def story():
        await kit.boot()
        await runtime.ready()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(node.plugin())
            kubelet = await stack.enter_async_context(kit.kubelet())
            await kubelet.registered(DRIVER)
            await node.connected()
            claim = await node.claim("c1", "nic0", config={"interface": {"name": "net1"}})
            await kubelet.prepare(claim)
            sandbox = await runtime.run_pod(POD, "p")
            assert "nic0" not in host.links()
            first = await runtime.run_container(sandbox, POD, "p", 0)
            assert "net1" in runtime.interfaces(first)
            await runtime.call("StopContainer", {1: first})
            second = await runtime.run_container(sandbox, POD, "p", 1)
            assert "net1" in runtime.interfaces(second)

            await runtime.call("StopPodSandbox", {1: sandbox})
            assert host.addresses("nic0") == {"10.9.0.2/24"}
            await kubelet.unprepare(claim)
            await runtime.call("RemovePodSandbox", {1: sandbox})

    asyncio.run(story())


def test_a_restart_of_containerd_leaves_the_nic_in_its_pod(kit, host, runtime):
    """containerd forgets that the sandbox runs and reports no end, but the end of the namespace shows."""
    node = NicNode(kit, host)
    host.veth("nic0", "tor0")

    async def story():
        await kit.boot()
        await runtime.ready()
        async with node.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(DRIVER)
            await node.connected()
            claim = await node.claim("c1", "nic0")
            await kubelet.prepare(claim)
            sandbox = await runtime.run_pod(POD, "p")
            inside = await runtime.run_container(sandbox, POD, "p", 0)
            runtime.kill()
            await node.connected(is_so=False)
            runtime.start()
            await runtime.ready()
            await node.connected()
            assert "nic0" in runtime.interfaces(inside)
            await runtime.call("StopPodSandbox", {1: sandbox})
            await until_so(
                lambda: "rackloom_nics_lent 0.0" in node.process.metrics_page().decode(), "no NIC is lent"
            )
            await kubelet.unprepare(claim)

    asyncio.run(story())


def test_what_happened_while_the_plugin_was_down_is_made_up_for(kit, host, runtime):
    node = NicNode(kit, host)
    host.veth("nic0", "tor0")
    host.veth("nic1", "tor1")

    async def story():
        await kit.boot()
        await runtime.ready()
        async with node.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(DRIVER)
            await node.connected()
            await kubelet.prepare(await node.claim("c1", "nic0", pod="one"))
            await kubelet.prepare(await node.claim("c2", "nic1", pod="two"))
            sandbox = await runtime.run_pod("one", "one")
        two = await runtime.run_pod("two", "two")
        assert "nic0" not in host.links()
        inside = await runtime.run_container(two, "two", "two", 0)
        assert "nic1" not in runtime.interfaces(inside)
        async with node.plugin():
            await node.connected()
            assert "nic1" in runtime.interfaces(inside)
            assert "nic0" not in host.links()
            await runtime.call("StopPodSandbox", {1: sandbox})
            assert "nic0" in host.links()
            await runtime.call("StopPodSandbox", {1: two})
            assert "nic1" in host.links()

    asyncio.run(story())
