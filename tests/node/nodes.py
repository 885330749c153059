"""Real Kubernetes nodes on one machine, joined to the control plane of tests/cluster.

Each node is a set of namespaces (network, mounts, process ids, hostname) in which boot.sh runs containerd,
kubelet and kube-proxy on hardware that hardware.py lays out. The control plane and CoreDNS run in the network
namespace of the tests, which is the switch between the nodes. `make test-node` (run.py) puts all of it below
one process id namespace and one mount namespace, so that any end of the tests ends all of it. Only cgroups
are left, and run.py removes those.

A node that reboots loses its processes, network, /run and boot id, and keeps its disk, as a machine does.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from tests.cluster.build import CONTROL_PLANE, NODE, Tools, made
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import Child, start
from tests.node.hardware import CLUSTER_UUID, kubelet_configuration, lay_out
from tests.waiting import until_seen

HERE = Path(__file__).parent
BOOT = HERE / "boot.sh"
COREDNS = Tools(HERE / "coredns", {"coredns": "."})
HUB, PREFIX = "172.30.0.1", 24
API_PORT = 6443
DNS = "10.96.0.10"
GPU_LABEL = "nvidia.com/gpu.present=true"
"""A label of Node Feature Discovery and GPU Feature Discovery, which also write the node's clique."""
_BRIDGE, _FABRIC = "nodes", "fabric"
_COREFILE = """.:53 {{
    bind {hub}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
    }}
}}
"""


class RealNode:
    """One node: `boot`, `crash` and `reboot` it, and run programs in it."""

    def __init__(self, cluster: "NodeCluster", index: int, *, driver: bool = True, clique: int = 1) -> None:
        self.name = f"node-{index}"
        self.address = f"172.30.0.{10 + index}"
        self.clique = f"{UUID(CLUSTER_UUID)}.{clique}"
        self.pods = f"10.244.{index}.0/24"
        self.state = cluster.folder / self.name
        self.disk = self.state / "disk"
        self._cluster = cluster
        self._index = index
        (self.state / "logs").mkdir(parents=True)
        self.disk.mkdir()
        # The layers over the machine's files, and the copies of files that nodes write, may not lie among
        # them.
        _run("mount", "-t", "tmpfs", "tmpfs", str(self.disk))
        self._hardware = self.disk / "hardware"
        self._hardware.mkdir()
        lay_out(self._hardware, index, clique=clique, driver=driver)
        self._init: subprocess.Popen[bytes] | None = None
        self.cgroup = f"{cluster.cgroup_prefix}-{self.name}"
        self._write_configuration()

    def boot(self) -> None:
        """Start it, as a machine that is switched on. Returns before it is Ready."""
        namespaces = ("--mount", "--uts", "--ipc", "--pid", "--net", "--fork", "--kill-child")
        with (self.state / "logs/init.log").open("ab") as log:
            self._init = subprocess.Popen(
                ["unshare", *namespaces, BOOT],
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._plug_in(self._init.pid)

    def crash(self) -> None:
        """Cut its power: all its processes end at once, and its network is gone."""
        assert self._init is not None, f"{self.name} does not run"
        self._init.kill()
        self._init.wait()
        self._init = None
        # The kernel takes a network apart some time after its last process. The cables are pulled now,
        # so that the next boot finds their names free.
        for inside in ("eth0", "cable0"):
            subprocess.run(["ip", "link", "delete", f"{inside}-{self._index}"], capture_output=True)

    def reboot(self) -> None:
        """Cut its power and switch it on again."""
        self.crash()
        self.boot()

    def run(self, *command: str | Path, check: bool = True) -> str:
        """The output of a command that runs in the node as its administrator would run it."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._init_pid()), "--all", "env", f"PATH={self._path()}", *command],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def root(self) -> Path:
        """The root of its files, as the tests see it. Files and sockets below it are those of the node."""
        return Path(f"/proc/{self._init_pid()}/root")

    def kill(self, program: str) -> None:
        """SIGKILL every process of this name in the node. Its init starts services again."""
        self.run("pkill", "-KILL", "-x", program)

    def log(self, name: str) -> str:
        """The log of one of its services: kubelet, containerd, kube-proxy, images or init."""
        file = self.state / "logs" / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _init_pid(self) -> int:
        """The node's process 1: the only child of unshare."""
        assert self._init is not None, f"{self.name} does not run"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        return int(until_seen(lambda: children.read_text().split(), f"{self.name} has a process 1")[0])

    def _plug_in(self, pid: int) -> None:
        """Give the node its two cables: eth0 for the cluster, and one to the fabric for NICs that move."""
        own = Path("/proc/self/ns/net").readlink()
        until_seen(lambda: Path(f"/proc/{pid}/ns/net").readlink() != own, f"{self.name} has a network")
        for bridge, inside in ((_BRIDGE, "eth0"), (_FABRIC, "cable0")):
            outside = f"{inside}-{self._index}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", str(pid))
            _ip("link", "set", outside, "master", bridge, "up")

    def _environment(self) -> dict[str, str]:
        others = [node for node in self._cluster.nodes if node is not self]
        return {
            "NAME": self.name,
            "CLUSTER": str(self._cluster.folder),
            "STATE": str(self.state),
            "HARDWARE": str(self._hardware),
            "BINARIES": str(self._cluster.binaries),
            "CONTAINERD": str(self._cluster.containerd),
            "IMAGES": str(self._cluster.images),
            "ADDRESS": self.address,
            "GATEWAY": HUB,
            "POD_NETWORK": self.pods,
            "ROUTES": " ".join(f"{node.pods}@{node.address}" for node in others),
            "CGROUP": self.cgroup,
            "LABELS": f"{GPU_LABEL},nvidia.com/gpu.clique={self.clique}",
        }

    def _path(self) -> str:
        containerd = self._cluster.containerd
        ours = f"{self._cluster.binaries}:{containerd}/usr/bin:{containerd}/usr/sbin"
        return f"{ours}:/usr/sbin:/usr/bin:/sbin:/bin"

    def _write_configuration(self) -> None:
        plane = self._cluster.plane
        (self.state / "imported").touch()
        kubelet = plane.kubeconfig(f"system:node:{self.name}", "system:nodes")
        shutil.copy(kubelet, self.state / "kubelet.kubeconfig")
        configuration = kubelet_configuration(self.cgroup, plane.credentials.authority, DNS)
        (self.state / "kubelet.json").write_bytes(configuration)
        proxy = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": str(plane.kubeconfig("system:kube-proxy"))},
            "hostnameOverride": self.name,
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clusterCIDR": "10.244.0.0/16",
        }
        (self.state / "proxy.json").write_bytes(msgspec.json.encode(proxy))
        # The hardware's extra NIC: a macvlan on the cable to the fabric, which no CNI plugin knows of.
        network = self._hardware / "network.sh"
        network.write_text(
            "#!/bin/sh -e\n"
            "until [ -e /sys/class/net/cable0 ]; do sleep 0.02; done\n"
            "ip link set cable0 up\n"
            "ip link add fab0 link cable0 type macvlan mode bridge\n"
            f"ip addr add 10.99.0.{self._index}/24 dev fab0\n"
            "ip link set fab0 up\n"
        )
        network.chmod(0o755)


class NodeCluster:
    """A control plane and its nodes. `start` it, use `kubectl`, and `stop` it."""

    def __init__(self, folder: Path, images: Path, containerd: Path, *, nodes: int = 2) -> None:
        self.folder = folder
        self.images = images
        self.containerd = containerd
        self.binaries = made(NODE)
        self.cgroup_prefix = os.environ["RACKLOOM_NODE_CGROUP"]
        self.plane = ControlPlane(made(CONTROL_PLANE), folder, address=HUB, port=API_PORT)
        self.nodes: list[RealNode] = []
        self.nodes.extend(RealNode(self, index) for index in range(1, nodes + 1))
        self._dns: Child | None = None

    def start(self) -> None:
        """Start everything and wait until all nodes are Ready."""
        _ip("link", "set", "lo", "up")
        for bridge in (_BRIDGE, _FABRIC):
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
        _ip("addr", "add", f"{HUB}/{PREFIX}", "dev", _BRIDGE)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for node in self.nodes:
            _ip("route", "add", node.pods, "via", node.address)
            node.boot()
        self.plane.start()
        corefile = self.folder / "Corefile"
        kubeconfig = self.plane.kubeconfig("coredns", "system:masters")
        corefile.write_text(_COREFILE.format(hub=HUB, kubeconfig=kubeconfig))
        dns = self._dns = start("coredns", [made(COREDNS) / "coredns", "-conf", corefile], self.plane.logs)
        until_seen(lambda: "CoreDNS-" in dns.tail() or dns.ended(), "CoreDNS has started")
        assert not dns.ended(), dns.tail()
        self.apply(*_dns_service())
        until_seen(
            lambda: self.ready_nodes() == {node.name for node in self.nodes}, "all nodes are Ready", 120
        )
        for node in self.nodes:
            self.kubectl(
                "patch",
                "node",
                node.name,
                "-p",
                f'{{"spec": {{"podCIDR": "{node.pods}", "podCIDRs": ["{node.pods}"]}}}}',
            )

    def stop(self) -> None:
        """End all of it, the nodes first."""
        for node in self.nodes:
            if node._init is not None:
                node.crash()
        if self._dns is not None:
            self._dns.stop()
        self.plane.stop()

    def kubectl(self, *words: str, given: str | None = None, check: bool = True) -> str:
        """The output of kubectl, run as the cluster's administrator."""
        done = self.tried(*words, given=given)
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """The result of kubectl, for tests that expect a refusal."""
        command = [
            str(self.binaries / "kubectl"),
            f"--kubeconfig={self.plane.admin}",
            f"--cache-dir={self.folder / 'kubectl'}",
        ]
        return subprocess.run([*command, *words], input=given, capture_output=True, text=True, timeout=300)

    def get(self, *words: str) -> Any:
        """`kubectl get ... -o json`, read."""
        return msgspec.json.decode(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects given as values."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", given=msgspec.json.encode(document).decode())

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready."""
        return {
            node["metadata"]["name"]
            for node in self.get("nodes")["items"]
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    def situation(self) -> str:
        """The state of the cluster for a reader who looks for a fault."""
        shown = [
            self.tried(
                "get", "pods,resourceclaims,computedomains,computedomaincliques", "-A", "-o", "wide"
            ).stdout,
            self.tried("get", "events", "-A", "--sort-by=.lastTimestamp").stdout[-6000:],
        ]
        for pod in self.get("pods", "-A")["items"]:
            if pod["metadata"]["namespace"] in ("default", "kube-system"):
                continue
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            log = self.tried("logs", "-n", namespace, name, "--tail=25", "--all-containers", "--prefix")
            shown.append(f"{log.stdout}{log.stderr}")
        shown += [f"{node.name}: {node.log('kubelet')[-3000:]}" for node in self.nodes]
        return "\n".join(shown)

    def node(self, name: str) -> RealNode:
        """The node of this name."""
        return next(node for node in self.nodes if node.name == name)


def seconds_until(holds: Callable[[], Any], what: str, within: float) -> float:
    """Seconds until a condition holds. It is checked every 50 ms."""
    began = time.monotonic()
    until_seen(holds, what, within)
    return time.monotonic() - began


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _dns_service() -> list[dict[str, Any]]:
    """The cluster DNS: a service with one endpoint, the CoreDNS beside the API server."""
    named = {"name": "kube-dns", "namespace": "kube-system"}
    port = {"name": "dns", "port": 53, "protocol": "UDP"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": named,
            "spec": {"clusterIP": DNS, "ports": [port]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**named, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [HUB]}],
            "ports": [port],
        },
    ]
