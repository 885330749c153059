"""One node with the NIC plugin. The test has its own API server, kubelet and runtime."""

from contextlib import AsyncExitStack, asynccontextmanager

from tests.claim.node.conftest import NODE_NAME, allocation
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.waiting import until, until_so

from rackloom.app.node.nic import NicOptions, nic_node
from rackloom.app.node.process import NodeOptions
from rackloom.core.cluster.objects import EVENT, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.lab.nodes.dra_manager import pod_claim
from rackloom.topology.nics import ExclusionPolicy

DRIVER = "dra.net"
POD = "p-uid"
NOTHING_LEFT_OUT = ExclusionPolicy(kinds=frozenset(), names=())
"""The tests' NICs are virtual."""


class NicNode:
    """One node: API server, kubelet, runtime. The plugin is started by the test."""

    def __init__(self, kit, host):
        self.kit, self.host = kit, host
        self.socket = host.root / "nri.sock"
        # Links are those of the namespace. Files of the machine below it must stay hidden.
        self.sysroot = host.root / "machine"
        boot_id = self.sysroot / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True)
        boot_id.write_text("boot-1")

    async def claim(self, name, *devices, config=None, pod=POD):
        status = allocation(*devices, driver=DRIVER, configs=(config,) if config else ())
        status["reservedFor"] = [{"resource": "pods", "name": "p", "uid": pod}]
        return pod_claim(await self.kit.allocated(name, status))

    @asynccontextmanager
    async def plugin(self, left_out=NOTHING_LEFT_OUT, **more):
        common = NodeOptions(node=NODE_NAME, directories=self.kit.places, sysroot=self.sysroot)
        options = NicOptions(nri_socket=self.socket, left_out=left_out, **more)
        async with nic_node(common, options, self.kit.api) as process:
            self.process = process
            yield process

    async def connected(self, *, is_so=True):
        """Wait until the runtime calls the plugin, or does not any more."""
        reported = f"rackloom_nri_connected {is_so:d}.0"
        await until_so(lambda: reported in self.process.metrics_page().decode(), reported)

    @asynccontextmanager
    async def all(self, **options):
        await self.kit.boot()
        async with AsyncExitStack() as stack:
            runtime = await stack.enter_async_context(NriRuntime(self.socket).serving())
            process = await stack.enter_async_context(self.plugin(**options))
            kubelet = await stack.enter_async_context(self.kit.kubelet())
            await kubelet.registered(DRIVER)
            await runtime.ready.wait()
            yield process, kubelet, runtime

    async def published(self, *names):
        async def look():
            slices = (await self.kit.api.list(RESOURCE_SLICE)).items
            found = {d["name"]: d.get("attributes", {}) for s in slices for d in s["spec"]["devices"]}
            return found if set(names) <= found.keys() else None

        return await until(look, f"{names} are published")

    async def event(self, reason):
        async def look():
            events = (await self.kit.api.list(EVENT)).items
            return next((event for event in events if event["reason"] == reason), None)

        return await until(look, f"an event {reason}")

    async def status(self, name, devices=1):
        """The devices in its claim's status, once there are as many as `devices`."""

        async def look():
            found = (await self.kit.api.get(RESOURCE_CLAIM, name, "default"))["status"].get("devices", [])
            return found if len(found) >= devices else None

        return await until(look, f"the claim reports {devices}")
