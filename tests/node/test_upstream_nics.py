"""The objects of DRANET's end-to-end tests on real nodes: the same kinds, with the same fields.

All links are made first, and all pods start together. Each test then looks at its own. As in theirs, nothing
but the claim leads a pod to the node that has the interface, and no container names the claim.

**A stand-in**: the interfaces are ends of pairs (`veth`), since not every kernel has `dummy` links. As in
their tests, the plugin is started with an empty `--filter`, so that it publishes these.
`tests/docs/upstream_tests.toml` names the upstream test behind each.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]
from tests.claim.node.nic.programs import loaded, put_tc, put_tcx
from tests.node import installation
from tests.node.conftest import only_all
from tests.node.nodes import NodeCluster, RealNode
from tests.node.workloads import IMAGE, Object, inside, phase, pod, until_gone, until_running
from tests.waiting import until_seen

from rackloom.claim.node.nic.datapath import read_ebpf_programs
from rackloom.claim.node.nic.links import read_links
from rackloom.claim.node.nic.netlink import Rtnetlink, in_namespace

CLASS, DRIVER = "dranet.net", "dra.net"
ATTRIBUTES = f'device.attributes["{DRIVER}"]'
AWAY = "example.com/without-nics"
"""The label that keeps the plugin off a node."""
NEAR = {"10.61.6.1": "02:61:00:00:00:01", "fd61:6::1": "02:61:00:00:00:02"}
"""Permanent neighbours on the host."""
SIZES = {"gso_max_size": 40000, "gro_max_size": 50000, "gso_ipv4_max_size": 30000, "gro_ipv4_max_size": 45000}
"""None is the value of a new link."""
FIRST = ["own0", "adv0", "near0", "far0", "six0", "way0", "pbr0", "pbr1", "pbr2", "pbr3", "gone0"]
SECOND = ["ib_p6", "arp0", "host0", "big0", "twin0", "twin1", "again0", "watch0"]
"""Links of the two nodes. `host0` is down, all others are up."""
WIRED = {"pbr0": "pbr1", "pbr3": "pbr2"}
"""Links that are the two ends of one pair. Those of the others lead nowhere."""
UNDERSCORED, DOWN = "ib_p6", "host0"
ON_HOST = {
    "near0": "10.61.6.15/32",
    "far0": "10.61.7.13/24",
    "six0": "fd61:8::/96",
    "host0": "10.61.4.14/32",
    "twin0": "10.61.10.13/32",
    "twin1": "10.61.10.14/32",
    "again0": "10.61.11.14/32",
}
"""Addresses that links have on the host."""
_TSO, _SET_TSO, _GRO, _SET_GRO, _FLAGS, _LRO = 0x1E, 0x1F, 0x2B, 0x2C, 0x25, 1 << 15
"""Of linux/ethtool.h."""
_SIOCETHTOOL = 0x8946


def named(*links: str) -> str:
    """The selector for an interface with one of these names."""
    either = " || ".join(f'{ATTRIBUTES}.ifName == "{link}"' for link in links)
    return f"has({ATTRIBUTES}.ifName) && ({either})"


def typed(link: str) -> str:
    """The selector for an interface by its maker. Only one of them is meant here."""
    return f'has({ATTRIBUTES}.type) && {ATTRIBUTES}.type == "veth" && {named(link)}'


def request(selector: str, name: str = "nic", count: int | None = None) -> Object:
    exactly: Object = {"deviceClassName": CLASS, "selectors": [{"cel": {"expression": selector}}]}
    return {"name": name, "exactly": exactly if count is None else {**exactly, "count": count}}


def config(parameters: Object, *requests: str) -> Object:
    opaque = {"opaque": {"driver": DRIVER, "parameters": parameters}}
    return {"requests": list(requests), **opaque} if requests else opaque


def claim(name: str, requests: list[Object], *configs: Object) -> Object:
    devices = {"requests": requests, **({"config": list(configs)} if configs else {})}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": devices},
    }


def template(name: str, wanted: Object) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [wanted]}}},
    }


def with_claim(name: str, *, privileged: bool = False) -> Object:
    """A pod with the claim of the same name. Its container does not name the claim."""
    value = pod(name)
    value["spec"]["resourceClaims"] = [{"name": "nics", "resourceClaimName": name}]
    if privileged:
        value["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    return value


def deployment(name: str) -> Object:
    """One replica, with a claim from the template of this name."""
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", "sleep 100000"]}
    spec = {
        "terminationGracePeriodSeconds": 0,
        "resourceClaims": [{"name": "nics", "resourceClaimTemplateName": name}],
        "containers": [container],
    }
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def of_interface(**settings: Any) -> Object:
    return config({"interface": settings})


def policy_routed(link: str, own: str, other: str) -> Object:
    """The claim of a pod that reaches the network `other` by rules, through the machine .2 of its network."""
    rules = [{"source": f"{own}.0/24"}, {"destination": f"{other}.0/24"}]
    return claim(
        link,
        [request(named(link))],
        config(
            {
                "interface": {"name": "net1", "addresses": [f"{own}.10/24"]},
                "rules": [{**rule, "table": 100, "priority": 32000} for rule in rules],
                "routes": [{"destination": "0.0.0.0/0", "table": 100, "gateway": f"{own}.2"}],
            }
        ),
    )


def objects() -> list[Object]:
    """All objects that start together."""
    forwards = [
        config({"interface": {"name": name, "addresses": [address], "forwarding": True}}, side)
        for side, name, address in (("a", "net1", "10.61.20.2/24"), ("b", "net2", "10.61.21.2/24"))
    ]
    features = ("tcp-segmentation-offload", "generic-receive-offload", "large-receive-offload")
    advanced = {
        "interface": {
            "name": "data0",
            "addresses": ["10.61.3.14/24"],
            "mtu": 4321,
            "hardwareAddr": "02:61:03:44:55:66",
        },
        "ethtool": {"features": dict.fromkeys(features, False)},
    }
    big = {
        "interface": {
            "name": "data1",
            "addresses": ["10.61.9.1/24"],
            "mtu": 8896,
            "gsoMaxSize": SIZES["gso_max_size"],
            "groMaxSize": SIZES["gro_max_size"],
            "gsoIPv4MaxSize": SIZES["gso_ipv4_max_size"],
            "groIPv4MaxSize": SIZES["gro_ipv4_max_size"],
        },
        "ethtool": {"features": {**dict.fromkeys(features, True), "large-receive-offload": False}},
    }
    routes = [
        {"destination": "10.61.5.0/24", "gateway": "10.61.5.1"},
        {"destination": "10.61.5.1/32", "scope": 253},
    ]
    claims = [
        claim("own0", [request(typed("own0"))], of_interface(name="data9", addresses=["10.61.1.13/24"])),
        claim("ib-p6", [request(typed("ib_p6"))], of_interface(name="data9", addresses=["10.61.2.13/24"])),
        claim("arp0", [request(named("arp0"))], of_interface(name="quiet0", arpIgnore=1, arpAnnounce=2)),
        claim(
            "way0",
            [request(typed("way0"))],
            config({"interface": {"name": "data9", "addresses": ["10.61.5.13/32"]}, "routes": routes}),
        ),
        claim("adv0", [request(named("adv0"))], config(advanced)),
        claim("big0", [request(named("big0"))], config(big)),
        claim("near0", [request(typed("near0"))], of_interface(name="data9", addresses=["10.61.6.13/24"])),
        claim("far0", [request(typed("far0"))], of_interface(name="data9", addresses=["10.61.7.13/24"])),
        policy_routed("pbr0", "10.61.20", "10.61.21"),
        policy_routed("pbr3", "10.61.21", "10.61.20"),
        claim("pbr1", [request(named("pbr1"), "a"), request(named("pbr2"), "b")], *forwards),
    ]
    privileged = [
        claim("six0", [request(named("six0"))]),
        claim("watch0", [request(named("watch0"))], of_interface(disableEbpfPrograms=True)),
    ]
    templates = [
        template("host0", request(named("host0"))),
        template("twins", request(named("twin0", "twin1"), count=2)),
        template("again0", request(named("again0"))),
    ]
    return [
        *claims,
        *privileged,
        *templates,
        *(with_claim(value["metadata"]["name"]) for value in claims),
        *(with_claim(value["metadata"]["name"], privileged=True) for value in privileged),
        *(deployment(value["metadata"]["name"]) for value in templates),
        read_metrics(),
    ]


def late_objects() -> list[Object]:
    """The objects that the last test starts."""
    settings = of_interface(name="data9", addresses=["10.61.12.13/24"])
    return [claim("gone0", [request(typed("gone0"))], settings), with_claim("gone0")]


def read_metrics() -> Object:
    """A pod in the host's network that reads the plugin's metrics there."""
    value = pod("metrics", "wget -qO- http://$LISTEN/metrics | grep ^rackloom_nics_lent")
    value["spec"]["hostNetwork"] = True
    return value


class Upstream:
    """The nodes, with links, pods, and the devices that were published before these started."""

    def __init__(self, cluster: NodeCluster) -> None:
        self.cluster = cluster
        self.plugin = installation.plugins()[-1]
        self.lacking = ""
        """The reason that no interface has programs."""
        self.before: dict[str, Object] = {}
        self._others = self.published().keys()
        daemons = cluster.get("daemonset", self.plugin, "-n", "rackloom-system")["spec"]["template"]["spec"]
        self._words: list[str] = daemons["containers"][0]["args"]

    def publish_pairs(self) -> None:
        """Start the plugin with an empty filter."""
        option = "--filter=" if self.plugin.endswith("-nic") else "--nic.filter="
        self._set_words([*self._words, option])

    def _set_words(self, words: list[str]) -> None:
        patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": words}]
        self.patch("--type=json", patch)
        self.until_rolled_out()

    def patch(self, kind: str, patch: Any) -> None:
        words = ("daemonset", self.plugin, kind, "-p", json.dumps(patch))
        self.cluster.kubectl("patch", "-n", "rackloom-system", *words)

    def until_rolled_out(self) -> None:
        words = (f"daemonset/{self.plugin}", "--timeout=90s")
        self.cluster.kubectl("rollout", "status", "-n", "rackloom-system", *words)

    def make_links(self) -> None:
        for node, links in zip(self.cluster.nodes, (FIRST, SECOND), strict=True):
            lines = ["set -e"]
            for link in links:
                if link not in WIRED.values():
                    end = WIRED.get(link, f"{link}-end")
                    lines.append(f"ip link add {link} type veth peer name {end}")
                    lines.append(f"ip link set {end} up")
                if link in ON_HOST:
                    lines.append(f"ip address add {ON_HOST[link]} dev {link} nodad")
            if "near0" in links:
                lines += [
                    f"ip neigh add {at} lladdr {mac} dev near0 nud permanent" for at, mac in NEAR.items()
                ]
            lines += [f"ip link set {link} up" for link in links if link not in (DOWN, "watch0")]
            if "far0" in links:
                lines.append("ip route add 10.62.10.0/24 via 10.61.7.1 dev far0 table 100")
                lines.append("ip rule add from 10.62.20.0/24 table 100 priority 500")
            node.run("sh", "-c", "\n".join(lines))
        first, second = map(network_of, self.cluster.nodes)
        # Each claim requests the opposite.
        for network, link, on in ((first, "adv0", 1), (second, "big0", 0)):
            for ask, change in ((_TSO, _SET_TSO), (_GRO, _SET_GRO)):
                offload(network, link, change, on)
                assert offload(network, link, ask) == on
        in_namespace(second, self._put_programs)

    def _put_programs(self) -> None:
        try:
            watch, count = loaded(b"watch"), loaded(b"count")
            with IPRoute() as ipr:
                put_tc(ipr, "watch0", watch, "watch")
                put_tcx(ipr, "watch0", count)
        except (OSError, NetlinkError) as error:
            self.lacking = f"KERNEL LACKS programs on interfaces: {error}"
        else:
            os.close(watch)
            os.close(count)
        # The plugin hears of the interface, and not of its programs.
        with IPRoute() as ipr:
            ipr.link("set", index=ipr.link_lookup(ifname="watch0")[0], state="up")

    def published(self) -> dict[str, Object]:
        """Devices of our driver by the name of the interface: attributes, and the device's own name."""
        return {
            device["attributes"]["ifName"]["string"]: {"name": {"string": device["name"]}}
            | device["attributes"]
            for slice_ in self.cluster.get("resourceslices")["items"]
            if slice_["spec"]["driver"] == DRIVER
            for device in slice_["spec"].get("devices", [])
            if "ifName" in device.get("attributes", {})
        }

    def settled(self) -> dict[str, Object]:
        """The published devices once they show all links. Empty before."""
        found = self.published()
        for link in (*FIRST, *SECOND):
            shown = found.get(link, {})
            family = "ipv6" if ":" in ON_HOST.get(link, "") else "ipv4"
            if not shown or (link in ON_HOST and family not in shown):
                return {}
            if shown["state"]["string"] != ("down" if link == DOWN else "up"):
                return {}
        return found if self.lacking or "ebpf" in found["watch0"] else {}

    def apply(self) -> None:
        values = objects()
        listen = self._words[self._words.index("--listen") + 1]
        values[-1]["spec"]["containers"][0]["env"] = [{"name": "LISTEN", "value": listen}]
        self.cluster.apply(*values)
        self.names = [value["metadata"]["name"] for value in values if value["kind"] == "Pod"][:-1]
        self.deployments = [value["metadata"]["name"] for value in values if value["kind"] == "Deployment"]
        until_seen(
            lambda: all(self.of_deployment(name) for name in self.deployments), "Deployments have pods", 30
        )
        until_running(self.cluster, *self.names, *map(self.of_deployment, self.deployments), within=90)

    def of_deployment(self, name: str) -> str:
        """Its pod, or an empty string if it has none."""
        found = self.cluster.get("pods", "-l", f"app={name}")["items"]
        return found[0]["metadata"]["name"] if found else ""

    def network(self, name: str) -> Path:
        """The network namespace of a pod, found by the cgroup of its newest process.

        An older process may be of a sandbox that failed.
        """
        uid, found = self.cluster.get("pod", name)["metadata"]["uid"], []
        for listing in Path("/proc").glob("[0-9]*/cgroup"):
            with suppress(OSError):
                if f"pod{uid}" in listing.read_text():
                    found.append(listing.parent)
        assert found, f"no process of pod {name}"
        return max(found, key=lambda process: int(process.name)) / "ns/net"

    def seen(self, name: str, *words: str) -> list[Object]:
        """The output of the machine's `ip` in the network of a pod. busybox's `ip` prints less."""
        done = subprocess.run(
            ["nsenter", f"--net={self.network(name)}", "ip", "-j", "-d", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        found: list[Object] = json.loads(done.stdout or "[]")
        return found

    def link(self, name: str, link: str) -> Object:
        (found,) = self.seen(name, "link", "show", link)
        return found

    def addresses(self, name: str, link: str) -> set[str]:
        (found,) = self.seen(name, "address", "show", link)
        return {f"{entry['local']}/{entry['prefixlen']}" for entry in found["addr_info"]}

    def reported(self, name: str) -> list[Object]:
        """The devices in the status of the pod's claim."""
        statuses = self.cluster.get("pod", name)["status"].get("resourceClaimStatuses")
        wanted = statuses[0]["resourceClaimName"] if statuses else name
        found: list[Object] = self.cluster.get("resourceclaim", wanted)["status"]["devices"]
        return found

    def remove(self) -> None:
        """Remove all of it, and wait until the slices are as they were."""
        pods = self.cluster.get("pods", "-n", "default")["items"]
        uids = [found["metadata"]["uid"] for found in pods]
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": [*objects(), *late_objects()]})
        words = ("--ignore-not-found", "--timeout=60s", "-f", "-")
        self.cluster.kubectl("delete", *words, given=document)
        # kubelet calls a plugin that was away one more time, a minute later.
        nodes = self.cluster.nodes
        until_seen(lambda: not any(recorded(node, *uids) for node in nodes), "all NICs are back", 60)
        for node in self.cluster.nodes:
            for link in (*FIRST, *SECOND):
                node.run("ip", "link", "delete", link, check=False)
        self.cluster.nodes[0].run("ip", "rule", "delete", "priority", "500", check=False)
        self._set_words(self._words)
        until_seen(lambda: self.published().keys() == self._others, "only the nodes' own NICs are left", 60)


def network_of(node: RealNode) -> Path:
    return node.root.parent / "ns/net"


def recorded(node: RealNode, *uids: str) -> bool:
    """Whether a file of the plugin names one of these pods."""
    words = [word for uid in uids for word in ("-e", uid)]
    folder = f"/var/lib/kubelet/plugins/{DRIVER}"
    return bool(uids and node.run("grep", "-rlF", *words, folder, check=False))


def offload(network: Path, link: str, command: int, value: int = 0) -> int:
    """Read an offload of an interface from the kernel, or set one, as ethtool did before netlink."""

    def ask() -> int:
        asked = ctypes.create_string_buffer(struct.pack("=II", command, value))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            name = struct.pack("16sQ16x", link.encode(), ctypes.addressof(asked))
            fcntl.ioctl(control, _SIOCETHTOOL, name)
        return int(struct.unpack("=II", asked.raw[:8])[1])

    return in_namespace(network, ask)


@pytest.fixture(scope="module")
def upstream(installed: NodeCluster) -> Iterator[Upstream]:
    """All links and pods, once these run. `before` has the devices published before the links were made."""
    made = Upstream(installed)
    try:
        made.make_links()
        made.publish_pairs()
        made.before = until_seen(made.settled, "all links are published as they are", 60)
        made.apply()
        yield made
    finally:
        made.remove()


def test_an_interface_has_the_claims_address_and_name_and_the_status_says_so(upstream: Upstream) -> None:
    assert "10.61.1.13/24" in inside(upstream.cluster, "own0", "ip", "address", "show", "data9")
    (reported,) = upstream.reported("own0")
    assert reported["networkData"]["interfaceName"] == "data9"
    assert reported["networkData"]["ips"] == ["10.61.1.13/24"]


def test_an_interface_whose_name_is_no_device_name_goes_to_its_pod(upstream: Upstream) -> None:
    assert "_" not in upstream.before[UNDERSCORED]["name"]["string"]
    assert "10.61.2.13/24" in inside(upstream.cluster, "ib-p6", "ip", "address", "show", "data9")
    (reported,) = upstream.reported("ib-p6")
    assert reported["networkData"]["ips"] == ["10.61.2.13/24"]


def test_answers_to_arp_are_as_the_claim_says(upstream: Upstream) -> None:
    settings = "/proc/sys/net/ipv4/conf/quiet0"
    files = (f"{settings}/arp_ignore", f"{settings}/arp_announce")
    assert inside(upstream.cluster, "arp0", "cat", *files).split() == ["1", "2"]


def test_the_hosts_address_comes_along_by_a_template(upstream: Upstream) -> None:
    name = upstream.of_deployment("host0")
    assert "10.61.4.14/32" in inside(upstream.cluster, name, "ip", "address", "show", "host0")
    (reported,) = upstream.reported(name)
    assert reported["networkData"]["ips"] == ["10.61.4.14/32"]


def test_a_route_may_need_another_for_its_gateway(upstream: Upstream) -> None:
    assert upstream.addresses("way0", "data9") >= {"10.61.5.13/32"}
    routes = {route["dst"]: route for route in upstream.seen("way0", "route", "show", "dev", "data9")}
    assert routes["10.61.5.0/24"]["gateway"] == "10.61.5.1"
    assert routes["10.61.5.1"]["scope"] == "link"
    (reported,) = upstream.reported("way0")
    assert reported["networkData"]["ips"] == ["10.61.5.13/32"]


def test_metrics_are_served_at_the_hosts_address(upstream: Upstream) -> None:
    until_seen(lambda: phase(upstream.cluster, "metrics") == "Succeeded", "metrics were read", 30)
    assert upstream.cluster.kubectl("logs", "metrics").startswith("rackloom_nics_lent")


def test_mtu_hardware_address_and_offloads_are_the_claims(upstream: Upstream) -> None:
    link = upstream.link("adv0", "data0")
    assert (link["mtu"], link["address"]) == (4321, "02:61:03:44:55:66")
    assert "10.61.3.14/24" in upstream.addresses("adv0", "data0")
    network = upstream.network("adv0")
    assert [offload(network, "data0", asked) for asked in (_TSO, _GRO)] == [0, 0]
    assert not offload(network, "data0", _FLAGS) & _LRO


def test_segmentation_sizes_are_the_claims(upstream: Upstream) -> None:
    link = upstream.link("big0", "data1")
    assert link["mtu"] == 8896
    assert {name: link[name] for name in SIZES if not name.endswith("ipv4_max_size")} == {
        name: size for name, size in SIZES.items() if not name.endswith("ipv4_max_size")
    }
    network = upstream.network("big0")
    (sizes,) = in_namespace(network, lambda: _sizes("data1"))
    # Our own code reads the sizes for IPv4, which iproute2 of Debian 12 does not know.
    assert {name: getattr(sizes, name) for name in SIZES} == SIZES
    assert [offload(network, "data1", asked) for asked in (_TSO, _GRO)] == [1, 1]
    assert not offload(network, "data1", _FLAGS) & _LRO


def test_programs_on_an_interface_are_published(upstream: Upstream) -> None:
    if upstream.lacking:
        pytest.skip(upstream.lacking)
    shown = upstream.before["watch0"]
    assert shown["ebpf"] == {"bool": True}
    assert shown["tcFilterNames"] == {"string": "watch"}
    assert shown["tcxProgramNames"] == {"string": "count"}


def test_programs_are_taken_off_for_the_pod(upstream: Upstream) -> None:
    if upstream.lacking:
        pytest.skip(upstream.lacking)
    network = upstream.network("watch0")
    words = ["nsenter", f"--net={network}", "tc", "filter", "show", "dev", "watch0", "ingress"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == ""
    index = upstream.link("watch0", "watch0")["ifindex"]

    def left() -> Any:
        with Rtnetlink() as rtnetlink:
            return read_ebpf_programs(rtnetlink, index)

    assert not in_namespace(network, left)


def test_two_interfaces_of_one_request_go_to_a_pod(upstream: Upstream) -> None:
    name = upstream.of_deployment("twins")
    assert upstream.addresses(name, "twin0") >= {"10.61.10.13/32"}
    assert upstream.addresses(name, "twin1") >= {"10.61.10.14/32"}
    reported = {tuple(device["networkData"]["ips"]) for device in upstream.reported(name)}
    assert reported == {("10.61.10.13/32",), ("10.61.10.14/32",)}


def test_a_second_deployment_gets_the_interface_of_the_first(upstream: Upstream) -> None:
    first = upstream.of_deployment("again0")
    assert upstream.addresses(first, "again0") >= {"10.61.11.14/32"}
    upstream.cluster.kubectl("delete", "deployment", "again0", "--timeout=30s")
    until_gone(upstream.cluster, first)
    upstream.cluster.apply(deployment("again0"))
    second = until_seen(lambda: upstream.of_deployment("again0"), "the second Deployment has a pod", 30)
    until_running(upstream.cluster, second)
    assert second != first
    # Theirs adds the address to the host's interface again. Here it came back with it.
    assert upstream.addresses(second, "again0") >= {"10.61.11.14/32"}
    (reported,) = upstream.reported(second)
    assert reported["networkData"]["ips"] == ["10.61.11.14/32"]


def test_permanent_neighbours_of_the_host_come_along(upstream: Upstream) -> None:
    words = ("neigh", "show", "dev", "data9")
    entries = [entry for family in ("-4", "-6") for entry in upstream.seen("near0", family, *words)]
    assert {entry["dst"]: entry["lladdr"] for entry in entries if "PERMANENT" in entry["state"]} == NEAR


def test_routes_of_another_table_and_the_rules_for_it_come_along(upstream: Upstream) -> None:
    (route,) = upstream.seen("far0", "route", "show", "table", "100")
    assert (route["dst"], route["gateway"], route["dev"]) == ("10.62.10.0/24", "10.61.7.1", "data9")
    (rule,) = [rule for rule in upstream.seen("far0", "rule", "show") if rule["priority"] == 500]
    assert (rule["src"], rule["srclen"], rule["table"]) == ("10.62.20.0", 24, "100")


def test_the_route_to_an_ipv6_subnet_is_the_kernels_alone(upstream: Upstream) -> None:
    routes = [
        (route["protocol"], route["metric"])
        for route in upstream.seen("six0", "-6", "route", "show", "dev", "six0")
        if route["dst"] == "fd61:8::/96"
    ]
    assert routes == [("kernel", 256)]


def test_rules_lead_through_a_pod_that_forwards(upstream: Upstream) -> None:
    inside(upstream.cluster, "pbr0", "ping", "-c", "1", "-W", "5", "10.61.21.10")


def test_what_is_published_of_an_interface_stays_while_a_pod_has_it(upstream: Upstream) -> None:
    assert upstream.published()["own0"] == upstream.before["own0"]


def _sizes(link: str) -> list[Any]:
    with Rtnetlink() as rtnetlink:
        return [found.sizes for found in read_links(rtnetlink) if found.name == link]


@only_all
def test_what_is_published_of_an_interface_stays_after_a_restart(upstream: Upstream) -> None:
    upstream.cluster.kubectl("rollout", "restart", "-n", "rackloom-system", f"daemonset/{upstream.plugin}")
    upstream.until_rolled_out()
    assert upstream.published()["own0"] == upstream.before["own0"]


@only_all
def test_a_plugin_that_goes_leaves_no_socket_and_forgets_a_pod_that_ended_meanwhile(
    upstream: Upstream,
) -> None:
    cluster, (node, other) = upstream.cluster, upstream.cluster.nodes
    cluster.apply(*late_objects())
    until_running(cluster, "gone0")
    uid = cluster.get("pod", "gone0")["metadata"]["uid"]
    assert _sockets(node) == _sockets(other) != set()
    here = ("-n", "rackloom-system", f"daemonset/{upstream.plugin}")
    before = cluster.get(*here)["spec"]["template"]["spec"]["affinity"]
    terms = before["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    absent = {"key": AWAY, "operator": "DoesNotExist"}
    narrower = [{"matchExpressions": [*term["matchExpressions"], absent]} for term in terms]
    _set_terms(upstream, narrower)
    cluster.kubectl("label", "node", node.name, f"{AWAY}=true")
    try:
        until_seen(lambda: not _plugin_on(upstream, node), "the plugin is gone from its node", 60)
        upstream.until_rolled_out()
        assert _sockets(node) == set()
        assert _sockets(other) != set()
        cluster.kubectl("delete", "pod", "gone0", "--force", "--grace-period=0")
        assert phase(cluster, "gone0") == ""
        assert recorded(node, uid)
    finally:
        cluster.kubectl("label", "node", node.name, f"{AWAY}-")
        _set_terms(upstream, terms)
    until_seen(lambda: _plugin_on(upstream, node), "the plugin is on its node again", 60)
    upstream.until_rolled_out()
    until_seen(lambda: not recorded(node, uid), "nothing is recorded of the pod", 60)


def _set_terms(upstream: Upstream, terms: list[Object]) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    patch = {"spec": {"template": {"spec": {"affinity": {"nodeAffinity": required}}}}}
    upstream.patch("--type=merge", patch)


def _plugin_on(upstream: Upstream, node: RealNode) -> bool:
    found = upstream.cluster.get(
        "pods", "-n", "rackloom-system", "--field-selector", f"spec.nodeName={node.name}"
    )
    return any(entry["metadata"]["name"].startswith(upstream.plugin) for entry in found["items"])


def _sockets(node: RealNode) -> set[str]:
    """The plugin's sockets on a node: for kubelet's requests, and for kubelet to find it."""
    folder = node.root / "var/lib/kubelet"
    found = [
        *(folder / f"plugins/{DRIVER}").glob("*.sock"),
        *(folder / "plugins_registry").glob(f"{DRIVER}*"),
    ]
    return {path.name for path in found if path.is_socket()}
