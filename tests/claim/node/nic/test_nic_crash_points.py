"""The NIC plugin killed at every single point of its work, and started again.

A point is the moment before or after a request to the kernel, a call to the API server, or anything that
reaches the disk. After a death at any point, the NIC is whole where it belongs.
"""

import asyncio
import itertools
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.claim.node.conftest import NODE_NAME, NodeKit
from tests.claim.node.crash_points import Fuse, FusedApi, Killed, fuse_the_disk
from tests.claim.node.nic.dhcp_server import DhcpServer
from tests.claim.node.nic.nic_kit import needs_root, own_host
from tests.claim.node.nic.nic_node import DRIVER, NOTHING_LEFT_OUT, POD, NicNode

from rackloom.app.node.nic import NicOptions, nic_parts
from rackloom.app.node.process import NodeOptions
from rackloom.claim.node.nic.links import read_links, read_settings
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.claim.node.run import PluginProcess

pytestmark = needs_root
CONFIG = {
    "interface": {"name": "net1", "mtu": 1300, "hardwareAddr": "02:00:00:00:00:17", "arpIgnore": 1},
    "ethtool": {"features": {"gro": False}},
    "rules": [{"table": 777, "priority": 400, "source": "10.9.0.2/32"}],
}


class Lives:
    """The plugin's lives on one node."""

    def __init__(self, node, fuse, monkeypatch):
        self.node, self.fuse = node, fuse
        self.netns = node.host.pod()
        execute = Rtnetlink.execute

        def fused_execute(rtnetlink, message):
            fuse.burn()
            execute(rtnetlink, message)
            fuse.burn()

        fuse_the_disk(fuse, monkeypatch)
        monkeypatch.setattr(Rtnetlink, "execute", fused_execute)
        self.sandbox = PodSandbox(id="s", pod=POD, namespace="default", name="p", netns=str(self.netns.path))

    def start(self):
        kit = self.node.kit
        common = NodeOptions(node=NODE_NAME, directories=kit.places, sysroot=self.node.sysroot)
        api = FusedApi(kit.api, self.fuse)
        home = kit.places.home(DRIVER)
        home.mkdir(parents=True, exist_ok=True)
        # Statuses are written beside everything else: how far they got changes nothing.
        parts = nic_parts(common, NicOptions(left_out=NOTHING_LEFT_OUT), kit.api, kit.host())
        return PluginProcess(parts.plugin, api, kit.host()), parts.sandboxes, parts

    async def set_up(self, config):
        await self.node.kit.boot()
        self.claim = await self.node.claim("c1", "nic0", config=config)

    async def prepare(self, process):
        (answer,) = (await process.requests.prepare([self.claim.ref])).values()
        assert not answer.error, answer.error

    async def unprepare(self, process):
        (answer,) = (await process.requests.unprepare([self.claim.ref])).values()
        assert not answer.error, answer.error

    async def work(self):
        """Kubelet prepares, the pod comes and goes, kubelet gives back."""
        process, sandboxes, _ = self.start()
        await self.prepare(process)
        await sandboxes.run(self.sandbox)
        await sandboxes.stop(self.sandbox)
        await self.unprepare(process)


def settings(netns, name):
    def look():
        with Rtnetlink() as rtnetlink:
            link = next((read_link for read_link in read_links(rtnetlink) if read_link.name == name), None)
            return None if link is None else read_settings(rtnetlink, link, features=True)

    return netns.call(look)


@contextmanager
def a_life_until(death, config=CONFIG):
    """A node on which the plugin dies at point `death`."""
    with ExitStack() as stack:
        host = stack.enter_context(own_host())
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        host.veth("nic0", "tor0", mtu=1400)
        host.address("nic0", "10.9.0.2/24")
        host.ip(lambda ipr: ipr.route("add", dst="10.77.0.0/16", gateway="10.9.0.1", table=777))
        fuse = Fuse(None)
        lived = Lives(NicNode(NodeKit(Path(root)), host), fuse, patched)
        asyncio.run(lived.set_up(config))
        fuse.death = death
        yield lived


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["the pod lives", "the pod is gone", "its namespace is gone"])
def test_killed_anywhere_the_nic_ends_whole_where_it_belongs(meanwhile):
    for death in itertools.count(1):
        with a_life_until(death) as lived:
            before = settings(lived.node.host, "nic0")
            try:
                asyncio.run(lived.work())
            except Killed:
                lived.fuse.death = None
            else:
                assert death > 50
                return
            asyncio.run(recover(lived, before, meanwhile))


@pytest.mark.slow
def test_killed_anywhere_no_lease_outlives_its_claim():
    for death in itertools.count(1):
        with a_life_until(None, {"interface": {"dhcp": True}}) as lived:
            server = DhcpServer(lived.node.host, "tor0")
            lived.fuse.death = death
            try:
                asyncio.run(lived.work())
            except Killed:
                lived.fuse.death = None
            else:
                assert death > 30
                return
            finally:
                server.close()
            process, sandboxes, parts = lived.start()
            asyncio.run(sandboxes.synchronize(()))
            asyncio.run(lived.unprepare(process))
            assert parts.manager.leases.all() == ()
            assert not list((lived.node.kit.places.home(DRIVER) / "leases").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["the pod lives", "the pod is gone", "its namespace is gone"])
def test_killed_anywhere_a_child_goes_and_its_nic_stays(meanwhile):
    config = {"interface": {"type": "MACVLAN", "name": "net1", "addresses": ["10.9.0.9/24"]}}
    for death in itertools.count(1):
        with a_life_until(death, config) as lived:
            before = settings(lived.node.host, "nic0")
            try:
                asyncio.run(lived.work())
            except Killed:
                lived.fuse.death = None
            else:
                assert death > 30
                return
            asyncio.run(recover_child(lived, before, meanwhile))


async def recover_child(lived, before, meanwhile):
    host = lived.node.host
    if meanwhile == "its namespace is gone":
        lived.netns.destroy()
    process, sandboxes, parts = lived.start()
    if meanwhile == "the pod lives":
        await sandboxes.synchronize((lived.sandbox,))
        await lived.prepare(process)
        await sandboxes.synchronize((lived.sandbox,))
        assert settings(lived.netns, "net1").addresses == ("10.9.0.9/24",)
        await sandboxes.stop(lived.sandbox)
    else:
        await sandboxes.synchronize(())
    await lived.unprepare(process)
    assert settings(host, "nic0") == before
    if meanwhile != "its namespace is gone":
        assert lived.netns.links().keys() <= {"lo", "sit0", "tunl0", "ip6tnl0"}
    assert parts.manager.attachments.all() == ()
    assert not list((lived.node.kit.places.home(DRIVER) / "loans").iterdir())


def throw_out(lived):
    """As the kernel does with hardware when a namespace ends: to the host, down, under any free name."""

    def links(ipr):
        for name in ("nic0", "net1"):
            for index in ipr.link_lookup(ifname=name):
                ipr.link("set", index=index, state="down")
                ipr.link("set", index=index, ifname="dev7", net_ns_pid=os.getpid())

    lived.netns.ip(links)
    lived.netns.destroy()


async def recover(lived, before, meanwhile):
    host = lived.node.host
    if meanwhile == "its namespace is gone":
        throw_out(lived)
    process, sandboxes, parts = lived.start()
    if meanwhile == "the pod lives":
        await sandboxes.synchronize((lived.sandbox,))
        await lived.prepare(process)
        # kubelet starts a sandbox after it has prepared, and the runtime reports one that it runs already.
        await sandboxes.synchronize((lived.sandbox,))
        assert settings(host, "nic0") is None
        inside = settings(lived.netns, "net1")
        assert (inside.mtu, inside.mac, inside.up) == (1300, "02:00:00:00:00:17", True)
        assert inside.addresses == before.addresses
        assert inside.routes == before.routes
        assert {rule.priority for rule in inside.rules} == {400}
        assert inside.features["rx-gro"] is False
        await sandboxes.stop(lived.sandbox)
    else:
        await sandboxes.synchronize(())
    assert settings(host, "nic0") == before
    await lived.unprepare(process)
    assert settings(host, "nic0") == before
    assert parts.manager.attachments.all() == ()
    assert parts.plugin.prepared == {}
    assert not list((lived.node.kit.places.home(DRIVER) / "loans").iterdir())
