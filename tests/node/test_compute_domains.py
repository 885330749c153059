"""ComputeDomains on real nodes: the examples as they are, in both modes, and through the deaths of what
serves them."""

import pytest
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster, seconds_until
from tests.node.workloads import (
    claiming,
    compute_domain,
    condition,
    inside,
    phase,
    pod,
    until_gone,
    until_running,
)
from tests.waiting import until_seen

MINIMAL = ROOT / "examples/imex-minimal/compute-domain.yaml"
CHANNELS = "/dev/nvidia-caps-imex-channels"


def test_the_minimal_example_runs_and_sees_its_channel(installed: NodeCluster) -> None:
    installed.kubectl("apply", "-f", str(MINIMAL))
    seconds_until(lambda: phase(installed, "imex-minimal") == "Succeeded", "the pod has run", 60)
    assert "509,   0" in installed.kubectl("logs", "imex-minimal")
    installed.kubectl("delete", "-f", str(MINIMAL), "--timeout=60s")


def test_two_pods_on_two_nodes_share_a_domain(installed: NodeCluster) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    assert "509,   0" in inside(installed, pods[0], "ls", "-l", CHANNELS)
    until_seen(lambda: condition(installed, "job", "Ready").get("status") == "True", "it is Ready", 30)
    until_seen(lambda: condition(installed, "job", "Meshed").get("status") == "True", "it is meshed", 30)
    _end(installed, "job", *pods)


@only_all
@pytest.mark.parametrize("program", ["kubelet", "containerd"])
def test_running_pods_outlive_a_service_of_their_node(installed: NodeCluster, program: str) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    began = _started(installed, pods[0])
    node = installed.nodes[0]
    node.kill(program)
    until_seen(lambda: node.run("pgrep", "-x", program, check=False), f"{program} runs again", 30)
    until_seen(lambda: installed.ready_nodes() >= {node.name}, "the node is Ready", 60)
    installed.apply(pod("after", node=node.name))
    until_running(installed, "after")
    assert _started(installed, pods[0]) == began, "the job's container was restarted"
    until_seen(lambda: condition(installed, "job", "Ready").get("status") == "True", "it is Ready", 60)
    installed.kubectl("delete", "pod", "after", "--wait=false")
    _end(installed, "job", *pods)


@only_all
@pytest.mark.parametrize("component", ["node-imex", "controller"])
def test_running_pods_outlive_our_programs(installed: NodeCluster, component: str) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    began = _started(installed, pods[0])
    selector = f"app.kubernetes.io/component={component}"
    installed.kubectl("delete", "pod", "-n", "rackloom-system", "-l", selector, "--grace-period=0", "--force")
    assert _started(installed, pods[0]) == began
    _end(installed, "job", *pods)
    pods = _spread(installed, "next")
    until_running(installed, *pods)
    _end(installed, "next", *pods)


@only_all
def test_a_node_reboots_under_a_job(installed: NodeCluster) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    installed.nodes[1].reboot()
    # A pod that never restarts has failed with its node; its claim is given back when it is deleted.
    until_seen(
        lambda: phase(installed, pods[1]) in {"Failed", "Unknown"}, "kubelet says that the pod failed", 120
    )
    installed.kubectl("delete", "pod", pods[1], "--wait=false")
    until_gone(installed, pods[1], within=90)
    installed.apply(_worker("job", installed.nodes[1].name, 1))
    until_running(installed, pods[1], within=120)
    until_seen(lambda: condition(installed, "job", "Ready").get("status") == "True", "it is Ready again", 60)
    _end(installed, "job", *pods)


def _worker(domain: str, node: str, number: int) -> dict[str, object]:
    return claiming(pod(f"{domain}-{number}", node=node), f"{domain}-channel")


def _spread(cluster: NodeCluster, domain: str) -> list[str]:
    """A ComputeDomain, and a pod of it on each node."""
    workers = [_worker(domain, node.name, number) for number, node in enumerate(cluster.nodes)]
    cluster.apply(compute_domain(domain, f"{domain}-channel"), *workers)
    return [f"{domain}-{number}" for number in range(len(workers))]


def _end(cluster: NodeCluster, domain: str, *pods: str) -> None:
    """Take the job away as its user does; its nodes carry nothing of it afterwards."""
    cluster.kubectl("delete", "pod", *pods, "--wait=false", "--ignore-not-found")
    cluster.kubectl("delete", "computedomain", domain, "--timeout=60s")
    until_gone(cluster, *pods)
    for node in cluster.get("nodes")["items"]:
        left = [label for label in node["metadata"]["labels"] if label == "resource.nvidia.com/computeDomain"]
        assert not left, f"{node['metadata']['name']} still has {left}"


def _started(cluster: NodeCluster, name: str) -> str:
    return cluster.kubectl(
        "get", "pod", name, "-o", "jsonpath={.status.containerStatuses[0].state.running.startedAt}"
    )
