"""MPS daemons on a real node: they outlive the GPU plugin, however it ends, and end with their claim.

The stand-in for the daemon (driver/mps.c) is a process with a socket, as NVIDIA's is. A job holds a
connection to it, as a program with a CUDA context does, and fails when the daemon ends.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.node.conftest import only_all
from tests.node.installation import gpu_plugin
from tests.node.nodes import NodeCluster, RealNode
from tests.node.workloads import Object, claim_template, claiming, phase, pod, until_gone, until_running
from tests.waiting import until_seen

from rackloom.claim.node.gpu.mps_launcher import daemons_home, launcher_socket

pytestmark = only_all
SYSTEM = ("-n", "rackloom-system")
TEMPLATE = "mps-gpu"
CLIENT = "/usr/bin/nvidia-cuda-mps-control"
JOB = f"busybox mkfifo /tmp/lines; sleep 100000 >/tmp/lines & exec {CLIENT} </tmp/lines"
DAEMON = "nvidia-cuda-mps-control -d"
HOME = daemons_home(Path("/var/lib/kubelet/plugins"))


SETTLED_SECONDS = 2.0
"""The most seconds that a job needs to end if it cannot use its daemon."""


class Process(NamedTuple):
    """A process of a node: its number there, and its start in ticks of the kernel's clock."""

    pid: str
    started: str


@pytest.fixture
def node(installed: NodeCluster) -> Iterator[RealNode]:
    """A node, with a job on it that uses its GPU through MPS."""
    template = claim_template(TEMPLATE, "gpu.nvidia.com")
    sharing = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}
    config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    opaque = {"driver": "gpu.nvidia.com", "parameters": config}
    template["spec"]["spec"]["devices"]["config"] = [{"opaque": opaque}]
    installed.apply(template)
    node = installed.nodes[0]
    yield node
    installed.kubectl("delete", "resourceclaimtemplate", TEMPLATE)


def daemons(node: RealNode) -> list[Process]:
    """The MPS daemons that run on a node."""
    found = node.run("pgrep", "-x", "-f", DAEMON, check=False).split()
    return [
        Process(pid, node.run("cat", f"/proc/{pid}/stat").rpartition(")")[2].split()[19]) for pid in found
    ]


def pod_on(cluster: NodeCluster, node: RealNode, daemon_set: str) -> str:
    """UID of a DaemonSet's pod on a node, once it is Ready and no other is left."""

    def uid() -> str:
        component = f"app.kubernetes.io/component={daemon_set.removeprefix('rackloom-')}"
        chosen = ("-l", component, "--field-selector", f"spec.nodeName={node.name}")
        items = cluster.get("pods", *SYSTEM, *chosen)["items"]
        conditions = [each for item in items for each in item.get("status", {}).get("conditions", ())]
        ready = [each["status"] for each in conditions if each["type"] == "Ready"]
        return str(items[0]["metadata"]["uid"]) if len(items) == 1 and ready == ["True"] else ""

    return until_seen(uid, f"{daemon_set} is Ready on {node.name}", 120)


def delete_pod(cluster: NodeCluster, node: RealNode, daemon_set: str) -> None:
    component = f"app.kubernetes.io/component={daemon_set.removeprefix('rackloom-')}"
    chosen = ("-l", component, "--field-selector", f"spec.nodeName={node.name}")
    cluster.kubectl("delete", "pod", *SYSTEM, *chosen, "--timeout=60s")


def test_a_daemon_outlives_the_plugin_and_ends_with_its_claim(installed: NodeCluster, node: RealNode) -> None:
    plugin = gpu_plugin()
    launcher = pod_on(installed, node, "rackloom-node-mps")
    first = pod_on(installed, node, plugin)
    installed.apply(claiming(pod("mps", JOB, node=node.name), TEMPLATE))
    until_running(installed, "mps")
    running = daemons(node)
    assert len(running) == 1
    time.sleep(SETTLED_SECONDS)
    assert phase(installed, "mps") == "Running", installed.kubectl("logs", "mps")

    delete_pod(installed, node, plugin)
    second = pod_on(installed, node, plugin)
    assert second != first
    assert daemons(node) == running, "deleting the plugin's pod ended the daemon"

    installed.kubectl("rollout", "restart", *SYSTEM, f"daemonset/{plugin}", "daemonset/rackloom-node-mps")
    installed.kubectl("rollout", "status", *SYSTEM, f"daemonset/{plugin}", "--timeout=120s")
    third = pod_on(installed, node, plugin)
    assert third != second
    assert daemons(node) == running, "a rollout ended the daemon"
    assert pod_on(installed, node, "rackloom-node-mps") == launcher, "a rollout replaced the daemons' pod"

    node.run("pkill", "-KILL", "-f", f"rackloom node {plugin.rpartition('-')[2]} ")
    until_seen(lambda: restarts(installed, third) > 0, "the plugin is started again", 60)
    assert pod_on(installed, node, plugin) == third
    assert daemons(node) == running, "a crash of the plugin ended the daemon"

    assert phase(installed, "mps") == "Running"
    installed.kubectl("delete", "pod", "mps", "--wait=false")
    until_gone(installed, "mps")
    until_seen(lambda: not daemons(node), "the daemon has ended", 60)
    left_behind(node)


def test_a_daemon_that_ends_with_its_pod_is_started_again(installed: NodeCluster, node: RealNode) -> None:
    """The drawback of one pod for all daemons of a node: all of them end with it."""
    job = claiming(pod("mps-lost", JOB, node=node.name), TEMPLATE)
    job["spec"]["restartPolicy"] = "Always"
    installed.apply(job)
    until_running(installed, "mps-lost")
    uid = installed.get("pod", "mps-lost")["metadata"]["uid"]
    before = daemons(node)
    delete_pod(installed, node, "rackloom-node-mps")
    again = until_seen(lambda: daemons(node), "the daemon runs again", 60)
    assert len(again) == 1
    assert again != before
    until_seen(lambda: restarts(installed, uid, "default"), "the job has lost its daemon", 60)
    until_seen(lambda: is_running(installed, uid), "the job runs again", 60)
    installed.kubectl("delete", "pod", "mps-lost", "--wait=false")
    until_gone(installed, "mps-lost")
    until_seen(lambda: not daemons(node), "the daemon has ended", 60)
    left_behind(node)


def container(cluster: NodeCluster, uid: str, namespace: str) -> Object:
    """The status of the one container of a pod."""
    items = cluster.get("pods", "-n", namespace)["items"]
    (found,) = (item for item in items if item["metadata"]["uid"] == uid)
    status: Object = found["status"]["containerStatuses"][0]
    return status


def restarts(cluster: NodeCluster, uid: str, namespace: str = "rackloom-system") -> int:
    """How often the container of a pod was started again."""
    return int(container(cluster, uid, namespace)["restartCount"])


def is_running(cluster: NodeCluster, uid: str) -> bool:
    """Whether the container of a job runs."""
    return "running" in container(cluster, uid, "default")["state"]


def left_behind(node: RealNode) -> None:
    """Only the launcher's socket is left, and no unreaped process."""
    assert node.run("ls", HOME).split() == [launcher_socket(HOME).name]
    assert "rackloom-mps" not in node.run("ls", "/dev/shm")
    assert "nvidia-cuda-mps" not in node.run("ps", "-e", "-o", "comm")
