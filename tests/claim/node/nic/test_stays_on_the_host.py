"""Interfaces that the node or its pods need, in the real kernel: not published, and never moved."""

import asyncio
import errno
import tempfile
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroute2 import NetlinkError
from tests.claim.node.conftest import NODE_NAME
from tests.claim.node.nic.nic_kit import held, needs_root, own_host
from tests.claim.node.nic.nic_node import NOTHING_LEFT_OUT, POD, NicNode
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.claim.node.plugin_manager import NotPrepared
from tests.fuzz import tries

from rackloom.app.node.nic import NicOptions, nic_parts
from rackloom.app.node.process import NodeOptions
from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore
from rackloom.claim.node.nic.inventory import NETWORK_SECONDS, HostScanner, NodeNetwork
from rackloom.claim.node.nic.leases import LeaseStore
from rackloom.claim.node.nic.links import attach_link
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.objects import ENDPOINT_SLICE, NODE
from rackloom.core.domains.network_config import LINK_SCOPE
from rackloom.core.nics.attachment import PreparedNic
from rackloom.core.nics.devices import host_nics
from rackloom.errors import Refused, Retry
from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, ClusterNetwork

pytestmark = needs_root
NODE_OBJECT = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": NODE_NAME},
    "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
    "status": {
        "addresses": [
            {"type": "Hostname", "address": NODE_NAME},
            {"type": "InternalIP", "address": "10.0.0.5"},
        ]
    },
}
CLUSTER = ClusterNetwork(
    node_addresses=("10.0.0.5",), api_servers=("10.3.0.10",), pod_cidrs=("10.244.1.0/24",)
)


@pytest.fixture
def node(kit, host):
    return NicNode(kit, host)


def link(host, name, kind, **settings):
    def make(ipr):
        for key in ("link", "vxlan_link", "master"):
            if isinstance(settings.get(key), str):
                settings[key] = ipr.link_lookup(ifname=settings[key])[0]
        ipr.link("add", ifname=name, kind=kind, **settings)
        ipr.link("set", index=ipr.link_lookup(ifname=name)[0], state="up")

    try:
        host.ip(make)
    except NetlinkError as error:
        pytest.skip(f"KERNEL LACKS {kind}: {error}")


def route(host, destination, **settings):
    def add(ipr):
        words = {"family": 2, **settings}
        if "oif" in words:
            words["oif"], words["scope"] = ipr.link_lookup(ifname=words["oif"])[0], LINK_SCOPE
        ipr.route("add", dst=destination, **words)

    host.ip(add)


IFF_RUNNING = 0x40
RT_SCOPE_LINK = 253


def state(host):
    """All links, addresses and routes, as another maker's library reads them, without counters.

    IFF_RUNNING and link-local addresses are left out too: the kernel's link watch changes them a moment after
    a link was set up.
    """

    def ask(ipr):
        links = [
            (
                get_link["index"],
                get_link["flags"] & ~IFF_RUNNING,
                *(get_link.get_attr(f"IFLA_{n}") for n in ("IFNAME", "MTU", "ADDRESS", "MASTER")),
            )
            for get_link in ipr.get_links()
        ]
        addresses = [
            (address["index"], address.get_attr("IFA_ADDRESS"), address["prefixlen"])
            for address in ipr.get_addr()
            if address["scope"] != RT_SCOPE_LINK
        ]
        routes = [
            (
                get_route.get_attr("RTA_DST"),
                get_route["dst_len"],
                get_route.get_attr("RTA_OIF"),
                get_route.get_attr("RTA_GATEWAY"),
            )
            for get_route in ipr.get_routes(family=2)
        ]
        return links, sorted(addresses), sorted(map(str, routes))

    return host.ip(ask)


def into(host, name, master):
    host.ip(
        lambda ipr: ipr.link(
            "set", index=ipr.link_lookup(ifname=name)[0], master=ipr.link_lookup(ifname=master)[0]
        )
    )


def a_node_with_flannel(host):
    """Uplink eth0, cni0 with a pod, flannel.1 over the uplink, and mac0, a NIC for tenants."""
    host.veth("wire0", "switch0")
    link(host, "eth0", "macvlan", link="wire0", macvlan_mode="bridge")
    host.address("eth0", "10.0.0.5/24")
    route(host, "default", gateway="10.0.0.1")
    link(host, "cni0", "bridge")
    host.address("cni0", "10.244.1.1/24")
    host.veth("veth1234", "pod-eth0")
    into(host, "veth1234", "cni0")
    link(host, "flannel.1", "vxlan", vxlan_id=1, vxlan_port=8472, vxlan_link="eth0")
    host.address("flannel.1", "10.244.1.0/32")
    host.veth("rail0", "tor0")
    link(host, "mac0", "macvlan", link="rail0", macvlan_mode="bridge")


def a_plugin(node, **options):
    common = NodeOptions(node=NODE_NAME, directories=node.kit.places, sysroot=node.sysroot)
    return nic_parts(
        common, NicOptions(nri_socket=node.socket, **options), node.kit.api, node.kit.host()
    ).plugin


def test_only_what_a_tenant_may_have_is_published_and_each_reason_is_logged_once(node, host):
    a_node_with_flannel(host)

    async def story():
        await node.kit.api.create(NODE, NODE_OBJECT)
        plugin = a_plugin(node)
        (pool,) = await plugin.pools()
        assert [device.name for device in pool.devices] == ["mac0"]
        assert {health.device: health.message for health in await plugin.health()} == {
            "eth0": "not published: carries the default route",
            "cni0": "not published: carries the pods' network 10.244.1.0/24",
            "net-mzwgc3tomvwc4mi": "not published: carries the pods' network 10.244.1.0/24",
            "mac0": "",
        }
        route(host, "10.244.9.0/24", oif="mac0")
        await plugin.pools()
        route(host, "10.244.1.7/32", oif="mac0")
        await plugin.pools()
        (pool,) = await plugin.pools()
        assert pool.devices == ()
        host.ip(lambda ipr: ipr.route("del", dst="10.244.1.7/32", scope=LINK_SCOPE))
        await plugin.pools()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(story())
    pods = "carries the pods' network 10.244.1.0/24"
    reported = [log for log in logs if log["event"] != "nic.api-servers-not-read"]
    assert [(entry["event"], entry["interface"], entry.get("reason")) for entry in reported] == [
        ("nic.not-published", "cni0", pods),
        ("nic.not-published", "eth0", "carries the default route"),
        ("nic.not-published", "flannel.1", pods),
        ("nic.not-published", "mac0", pods),
        ("nic.published-again", "mac0", None),
    ]


def test_a_claim_for_the_pods_bridge_is_refused_at_once(node, host):
    a_node_with_flannel(host)

    async def story():
        await node.kit.api.create(NODE, NODE_OBJECT)
        async with node.plugin(left_out=DEFAULT_EXCLUSION_POLICY), node.kit.kubelet() as kubelet:
            await kubelet.registered("dra.net")
            with pytest.raises(NotPrepared, match="cni0 is not for claims: carries the pods' network"):
                await kubelet.prepare(await node.claim("c1", "cni0"))

    asyncio.run(story())


@pytest.mark.parametrize(
    ("comes", "why"),
    [
        (lambda host: route(host, "default", oif="nic0"), "interface nic0 carries the default route"),
        (lambda host: host.address("nic0", "10.0.0.5/24"), "interface nic0 has the node's address 10.0.0.5"),
        (
            lambda host: route(host, "10.3.0.0/24", oif="nic0"),
            "interface nic0 carries the route to the API server at 10.3.0.10",
        ),
        (
            lambda host: route(host, "10.244.1.0/25", oif="nic0"),
            "interface nic0 carries the pods' network 10.244.1.0/24",
        ),
        (
            lambda host: (link(host, "br7", "bridge"), into(host, "nic0", "br7")),
            "interface nic0 belongs to bridge br7",
        ),
    ],
)
def test_what_the_node_has_come_to_need_stays_as_it_is(node, host, comes, why):
    """The need arises between its preparation and its pod, also if the operator leaves nothing out."""
    host.veth("nic0", "tor0", mtu=1400)
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.3.0.10"]}],
    }

    async def story():
        await node.kit.api.create(NODE, NODE_OBJECT)
        await node.kit.api.create(ENDPOINT_SLICE, endpoints)
        runtime = NriRuntime(node.socket)
        async with runtime.serving(), node.plugin() as process, node.kit.kubelet() as kubelet:
            await kubelet.registered("dra.net")
            await runtime.ready.wait()
            claim = await node.claim("c1", "nic0", config={"interface": {"mtu": 1300}})
            await kubelet.prepare(claim)
            comes(host)
            before = state(host)
            message = await runtime.run(POD, host.pod().path)
            assert why in message
            assert "claim another NIC" in message
            assert (await node.event("NetworkDeviceAttachFailed"))["message"] == message
            await kubelet.unprepare(claim)
            assert state(host) == before
            assert process.checkpoint.claims == {}

    asyncio.run(story())


REFUSED = {errno.EEXIST, errno.EBUSY, errno.ELOOP, errno.EINVAL}
WIRES = st.sampled_from(["w0", "w1", "w2"])
NICS = st.sampled_from(["w0", "w1", "w2", "m0", "m1", "br0", "vx0"])
FACTS = st.lists(
    st.tuples(st.just("default"), NICS)
    | st.tuples(st.just("address"), NICS, st.sampled_from(["10.0.0.5/24", "10.9.0.1/24", "10.244.1.1/24"]))
    | st.tuples(st.just("route"), NICS, st.sampled_from(["10.3.0.0/24", "10.244.1.0/24", "10.244.2.0/24"]))
    | st.tuples(st.just("port"), NICS),
    max_size=5,
)


def carry_out(host, fact):
    """Apply a fact, unless the kernel refuses it (the same twice, a bridge in a bridge)."""
    work = {
        "default": lambda name: route(host, "default", oif=name),
        "address": lambda name, cidr: host.address(name, cidr),
        "route": lambda name, destination: route(host, destination, oif=name),
        "port": lambda name: into(host, name, "br0"),
    }
    try:
        work[fact[0]](*fact[1:])
    except NetlinkError as error:
        if error.code not in REFUSED:
            raise


@pytest.mark.slow
@settings(max_examples=tries(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(upper=st.tuples(WIRES, WIRES, WIRES), facts=FACTS, leaves_out=st.booleans())
def test_an_excluded_interface_is_never_moved(upper, facts, leaves_out):
    """This holds after any preparation, with any stack of interfaces, routes and addresses."""
    left_out = DEFAULT_EXCLUSION_POLICY if leaves_out else NOTHING_LEFT_OUT
    with own_host() as host, tempfile.TemporaryDirectory(prefix="rl") as root:
        for name in ("w0", "w1", "w2"):
            host.veth(name, f"peer-{name}")
        link(host, "m0", "macvlan", link=upper[0], macvlan_mode="bridge")
        link(host, "m1", "macvlan", link=upper[1], macvlan_mode="bridge")
        link(host, "vx0", "vxlan", vxlan_id=1, vxlan_port=8472, vxlan_link=upper[2])
        link(host, "br0", "bridge")
        for fact in facts:
            carry_out(host, fact)
        look = HostScanner(host.root, left_out=left_out)
        look.cluster = CLUSTER
        seen = host_nics(look())
        manager = AttachmentManager(
            AttachmentStore(Path(root) / "loans", "b"), LeaseStore(Path(root) / "leases", "b"), look.check
        )
        for number, host_nic in enumerate(seen):
            identity, before_host, wanted = held(host, host_nic.on.link.name, interface={"name": "net1"})
            nic = PreparedNic(
                device=host_nic.name,
                published=Device(name=host_nic.name),
                identity=identity,
                host=before_host,
                pod=wanted,
            )
            if host_nic.excluded is None:
                look.check(nic)
                continue
            before, pod = state(host), host.pod(f"pod{number}")
            with pytest.raises(Refused, match="is not for pods now") as refused:
                asyncio.run(manager.attach("claim", "pod", nic, pod.path))
            assert refused.value.nearest_fix
            assert host_nic.excluded in refused.value.reason
            asyncio.run(manager.detach_lost())
            assert state(host) == before
            assert set(pod.links()) == {"lo"}
            assert manager.attachments.all() == ()
        some = {name for name, facts in facts_of(host).items() if facts}
        assert not some & {host_nic.on.link.name for host_nic in seen if host_nic.excluded is None}


def facts_of(host):
    """The interfaces that carry something, by a rule of the test's own: as the kernel would send packets."""

    def ask(ipr):
        names = {get_link["index"]: get_link.get_attr("IFLA_IFNAME") for get_link in ipr.get_links()}
        found = dict.fromkeys(names.values(), False)
        for get_route in ipr.get_routes(family=2):
            if get_route["table"] == 254 and (
                get_route["dst_len"] == 0 or get_route.get_attr("RTA_DST", "").startswith("10.244.1.")
            ):
                found[names[get_route.get_attr("RTA_OIF")]] = True
        for address in ipr.get_addr(family=2):
            if address.get_attr("IFA_LOCAL") in ("10.0.0.5", "10.244.1.1"):
                found[names[address["index"]]] = True
        return found

    return host.ip(ask)


class Api:
    def __init__(self):
        self.asked, self.error = [], None

    async def get(self, kind, name, namespace=None):
        self.asked.append(name)
        if self.error is not None:
            raise self.error
        return (
            NODE_OBJECT if kind is NODE else {"endpoints": [{"addresses": ["10.3.0.10"]}, {"addresses": []}]}
        )


def test_the_nodes_network_is_asked_for_now_and_then_and_kept_while_nobody_answers():
    api, now = Api(), [0.0]
    network = NodeNetwork(api, NODE_NAME, lambda: now[0])

    async def story():
        api.error = KubeError(0, "", "connection refused")
        with pytest.raises(Retry, match="connection refused"):
            await network()
        api.error = None
        assert await network() == CLUSTER
        assert await network() == CLUSTER
        assert api.asked == [NODE_NAME, NODE_NAME, "kubernetes"]
        now[0] += NETWORK_SECONDS + 1
        api.error = KubeError(0, "", "connection refused")
        assert await network() == CLUSTER
        api.error = None
        await network()
        assert len(api.asked) == 6

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["bridge", "bond", "team", "vrf"])
def test_the_kernel_itself_keeps_what_is_said_to_be_immovable(host, kind):
    """The refusal gives this reason, and a claim for such a link would leave its pod waiting for ever."""
    link(host, "it", kind, **({"vrf_table": 9} if kind == "vrf" else {}))
    identity, _, wanted = held(host, "it", interface={"name": "net1"})
    with pytest.raises(OSError, match="moving interface"):
        attach_link(identity, wanted, host.pod().path)
