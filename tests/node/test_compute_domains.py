"""ComputeDomains on real nodes: the examples as they are, in both modes, and through the deaths of the
programs that serve them."""

import re

import pytest
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster, seconds_until
from tests.node.workloads import (
    Object,
    channels_in,
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

from rackloom.core.cluster.names import CHANNELS_PER_NODE, COMPUTE_DOMAIN_LABEL

MINIMAL = ROOT / "examples/imex-minimal/compute-domain.yaml"
CHANNELS = "/dev/nvidia-caps-imex-channels"
IMEX_PLUGIN = "app.kubernetes.io/component in (node-imex, node-all)"
CONTROLLER = ("-n", "rackloom-system", "deployment/rackloom-controller")


def test_the_minimal_example_runs_and_sees_its_channel(installed: NodeCluster) -> None:
    installed.kubectl("apply", "-f", str(MINIMAL))
    seconds_until(lambda: phase(installed, "imex-minimal") == "Succeeded", "the pod has run", 60)
    assert "509,   0" in installed.kubectl("logs", "imex-minimal")
    installed.kubectl("delete", "-f", str(MINIMAL), "--timeout=60s")


def test_a_domain_with_all_channels_shows_its_pod_every_one(installed: NodeCluster) -> None:
    worker = _worker("all", installed.nodes[0].name, 0)
    installed.apply(compute_domain("all", "all-channel", "All"), worker)
    until_running(installed, "all-0")
    channels = channels_in(inside(installed, "all-0", "ls", "-l", CHANNELS))
    assert sorted(channels) == list(range(CHANNELS_PER_NODE))
    _end(installed, "all", "all-0")


def test_two_pods_on_two_nodes_share_a_domain(installed: NodeCluster) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    assert "509,   0" in inside(installed, pods[0], "ls", "-l", CHANNELS)
    until_seen(lambda: condition(installed, "job", "Ready").get("status") == "True", "it is Ready", 30)
    until_seen(lambda: condition(installed, "job", "Meshed").get("status") == "True", "it is meshed", 30)
    _end(installed, "job", *pods)


def test_a_domain_of_one_node_is_ready_with_its_pod_and_lists_no_node_after_it(
    installed: NodeCluster,
) -> None:
    domain = compute_domain("global", "global-channel")
    domain["spec"]["numNodes"] = 1
    installed.apply(domain, claiming(pod("global-0"), "global-channel"))
    until_running(installed, "global-0")
    assert channels_in(inside(installed, "global-0", "ls", "-l", CHANNELS)) == [0]
    until_seen(lambda: _status(installed, "global")["status"] == "Ready", "it is Ready", 30)
    node = installed.get("pod", "global-0")["spec"]["nodeName"]
    assert [entry["name"] for entry in _status(installed, "global")["nodes"]] == [node]
    installed.kubectl("delete", "pod", "global-0", "--wait=false")
    until_gone(installed, "global-0")
    until_seen(lambda: not _status(installed, "global").get("nodes"), "it lists no node", 30)
    until_seen(lambda: _status(installed, "global")["status"] == "NotReady", "it is NotReady", 30)
    _end(installed, "global")


def test_a_field_that_a_channels_config_does_not_have_is_named_on_the_pod(installed: NodeCluster) -> None:
    """No ComputeDomain is needed for it: the config is read before anything else."""
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomainChannelConfig",
        "domainID": "of-none",
        "surplusField": "any",
    }
    config = {
        "requests": ["chan"],
        "opaque": {"driver": "compute-domain.nvidia.com", "parameters": parameters},
    }
    exactly = {"deviceClassName": "compute-domain-default-channel.nvidia.com"}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "surplus", "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "chan", "exactly": exactly}], "config": [config]}},
    }
    refused = pod("surplus")
    refused["spec"]["resourceClaims"] = [{"name": "channel", "resourceClaimName": "surplus"}]
    refused["spec"]["containers"][0]["resources"] = {"claims": [{"name": "channel"}]}
    installed.apply(claim, refused)
    about = "involvedObject.name=surplus,reason=FailedPrepareDynamicResources"
    words = ("get", "events", "--field-selector", about, "-o", "jsonpath={.items[*].message}")
    reported = until_seen(lambda: installed.kubectl(*words), "kubelet says why", 60)
    assert 'strict decoding error: unknown field "surplusField"' in reported
    (status,) = installed.get("pod", "surplus")["status"]["containerStatuses"]
    assert status["state"]["waiting"]["reason"] == "ContainerCreating"
    log = installed.kubectl("logs", "-n", "rackloom-system", "-l", IMEX_PLUGIN, "--tail=-1")
    assert 'strict decoding error: unknown field "surplusField"' in log
    installed.kubectl("delete", "pod", "surplus", "--wait=false")
    until_gone(installed, "surplus")
    installed.kubectl("delete", "resourceclaim", "surplus", "--timeout=60s")


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
def test_settings_of_nvidia_imex_are_those_of_the_next_daemons(installed: NodeCluster) -> None:
    """Running daemons keep theirs, and a controller that refuses its settings replaces no other."""
    nodes = installed.nodes
    _job_on(installed, "before", nodes[0].name)
    daemon = _daemon(installed, "before")
    _set_imex(installed, "IMEX_NODE_DISCONNECTED_GRACE_TIME=600")
    installed.kubectl("rollout", "status", *CONTROLLER, "--timeout=120s")
    _set_imex(installed, "SERVER_PORT=1")
    until_seen(lambda: "SERVER_PORT is Rackloom's" in _controller_logs(installed), "it is refused", 60)
    _job_on(installed, "after", nodes[1].name)
    chosen = re.compile(r"IMEX_NODE_DISCONNECTED_GRACE_TIME\s*=\s*600")
    assert chosen.search(_log_of(installed, _daemon(installed, "after")))
    assert _daemon(installed, "before") == daemon, "the running daemon was replaced"
    assert not chosen.search(_log_of(installed, daemon))
    _set_imex(installed, None)
    installed.kubectl("rollout", "status", *CONTROLLER, "--timeout=120s")
    installed.kubectl("delete", "pod", "before-0", "--wait=false")
    installed.kubectl("delete", "computedomain", "before", "--timeout=60s")
    _end(installed, "after", "before-0", "after-0")


@only_all
def test_a_node_reboots_under_a_job(installed: NodeCluster) -> None:
    pods = _spread(installed, "job")
    until_running(installed, *pods)
    installed.nodes[1].reboot()
    # A pod that never restarts has failed with its node. Its claim is given back when it is deleted.
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


def _job_on(cluster: NodeCluster, domain: str, node: str) -> None:
    """A ComputeDomain with one pod, `DOMAIN-0`, which runs on that node."""
    cluster.apply(compute_domain(domain, f"{domain}-channel"), _worker(domain, node, 0))
    until_running(cluster, f"{domain}-0")


def _daemon(cluster: NodeCluster, domain: str) -> str:
    """The name of the pod of a ComputeDomain's only IMEX daemon. Another daemon has another name."""
    uid = cluster.get("computedomain", domain)["metadata"]["uid"]
    found = cluster.get("pods", "-n", "rackloom-imex", "-l", f"{COMPUTE_DOMAIN_LABEL}={uid}")["items"]
    (name,) = (pod["metadata"]["name"] for pod in found)
    return str(name)


def _log_of(cluster: NodeCluster, daemon: str) -> str:
    return cluster.kubectl("logs", "-n", "rackloom-imex", daemon)


def _set_imex(cluster: NodeCluster, settings: str | None) -> None:
    """Give the controller settings of nvidia-imex, or none."""
    change = "-" if settings is None else f"={settings}"
    cluster.kubectl("set", "env", *CONTROLLER, f"CD_DAEMON_IMEX_SETTINGS{change}")


def _controller_logs(cluster: NodeCluster) -> str:
    selector = "app.kubernetes.io/component=controller"
    pods = cluster.get("pods", "-n", "rackloom-system", "-l", selector)["items"]
    names = [pod["metadata"]["name"] for pod in pods]
    return "".join(cluster.tried("logs", "-n", "rackloom-system", name).stdout for name in names)


def _spread(cluster: NodeCluster, domain: str) -> list[str]:
    """A ComputeDomain, and a pod of it on each node."""
    workers = [_worker(domain, node.name, number) for number, node in enumerate(cluster.nodes)]
    cluster.apply(compute_domain(domain, f"{domain}-channel"), *workers)
    return [f"{domain}-{number}" for number in range(len(workers))]


def _status(cluster: NodeCluster, domain: str) -> Object:
    """The status of the ComputeDomain."""
    status: Object = cluster.get("computedomain", domain).get("status", {"status": ""})
    return status


def _end(cluster: NodeCluster, domain: str, *pods: str) -> None:
    """Delete the job as its user does. Afterwards its nodes carry nothing of it."""
    if pods:
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
