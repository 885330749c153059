"""A cluster goes from NVIDIA's DRA driver to Rackloom under a running job, node by node, and one goes back.

nvidia_driver.py and nvidia_installation.py name the stand-ins for NVIDIA's driver. kubelet, containerd,
the scheduler, the API server and all of Rackloom are real.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.claim.node.takeover.nvidia_files import reader, states_read_by_driver
from tests.cluster.processes import Child
from tests.node import nvidia_installation as nvidia
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster, RealNode
from tests.node.nvidia_driver import NAMESPACE
from tests.node.test_mps import JOB
from tests.node.workloads import (
    claim_template,
    claiming,
    is_ready,
    pod,
    until_gone,
    until_running,
)
from tests.waiting import until_seen

from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, GPU_DRIVER, IMEX_DRIVER

EXAMPLE = ROOT / "examples/migrate-from-nvidia-dra"
DRIVERS = (IMEX_DRIVER, GPU_DRIVER)
SYSTEM = ("-n", "rackloom-system")
pytestmark = only_all


@pytest.fixture
def plugins(nodes: NodeCluster) -> Iterator[dict[str, list[Child]]]:
    """NVIDIA's plugins by node: release 0.4 on the first, 0.5 on the second."""
    assert "rackloom-system" not in nodes.kubectl("get", "namespaces", "-o", "name"), (
        "it is installed already"
    )
    for node in nodes.nodes:
        # The init containers mount it, also on a node that never had a claim.
        assert (node.root / "var/lib/kubelet/dra_manager_state").is_file(), node.name
    nvidia.install(nodes)
    nodes.apply(claim_template("one-gpu", "gpu.nvidia.com"))
    first, second = nodes.nodes
    started = {
        first.name: nvidia.start_plugins(nodes, first, "0.4"),
        second.name: nvidia.start_plugins(nodes, second, "0.5"),
    }
    yield started
    for child in (child for children in started.values() for child in children):
        child.stop()


def test_a_cluster_goes_over_under_a_job(nodes: NodeCluster, plugins: dict[str, list[Child]]) -> None:
    first, second = nodes.nodes
    domain = nvidia.make_domain(nodes, "job", "job-channel")
    job = [worker(f"job-{node.name}", node, "job-channel") for node in nodes.nodes]
    nodes.apply(*job)
    names = [each["metadata"]["name"] for each in job]
    until_running(nodes, *names)
    until_seen(lambda: set(members(nodes, domain)) == {first.name, second.name}, "both are members", 60)
    until_seen(lambda: is_meshed(nodes), "the daemons reach each other", 60)
    sharing = {"strategy": "MPS"}
    config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    shared = claim_template("mps-gpu", "gpu.nvidia.com")
    opaque = {"driver": GPU_DRIVER, "parameters": config}
    shared["spec"]["spec"]["devices"]["config"] = [{"opaque": opaque}]
    nodes.apply(shared, claiming(pod("mps", JOB, node=first.name), "mps-gpu"))
    until_running(nodes, "mps")
    before = processes(nodes), members(nodes, domain)
    theirs = files_of(second), slices_of(nodes, second)

    refused = takeover(first, "apply")
    assert refused.returncode == 1
    assert f"a plugin of {IMEX_DRIVER} runs on this node" in refused.stderr

    # The first node, by the command. Its plan names a channel, a daemon and two GPUs, one with an MPS daemon.
    stop(plugins, first)
    planned = takeover(first, "plan")
    assert (planned.returncode, planned.stdout.count(" moved")) == (0, 4), planned.stdout + planned.stderr
    done = takeover(first, "apply")
    assert done.returncode == 0, done.stdout + done.stderr

    # Rackloom comes to both, but gets no further than its init container while NVIDIA's driver runs.
    nodes.kubectl("apply", "-k", str(EXAMPLE))
    for node in nodes.nodes:
        nodes.kubectl("label", "node", node.name, "rackloom.dev/taken-over=true")
    until_ours(nodes, first)
    until_seen(lambda: waiting(nodes, second) == {"node-imex", "node-gpu"}, "they wait", 60)
    assert (processes(nodes), members(nodes, domain)) == before
    assert (files_of(second), slices_of(nodes, second)) == theirs, "the second node is NVIDIA's"
    gpus = nodes.get("deviceclass", "gpu.nvidia.com")
    assert gpus["spec"]["extendedResourceName"] == "nvidia.com/gpu", "a setting of NVIDIA's chart is gone"
    assert is_meshed(nodes)
    both = [worker(f"more-{node.name}", node) for node in nodes.nodes]
    nodes.apply(*both)
    until_running(nodes, *(each["metadata"]["name"] for each in both))

    # The second node, by the init container. Then the controller.
    stop(plugins, second)
    until_ours(nodes, second)
    nodes.kubectl("scale", *SYSTEM, "deployment/rackloom-controller", "--replicas=2")
    until_seen(lambda: is_ready(nodes, "job"), "the job's domain is Ready", 120)
    assert unchanged(before[0], processes(nodes))
    assert members(nodes, domain) == before[1]
    assert is_meshed(nodes)

    # The first pod of the job ends on Rackloom's node.
    assert len(mps_directories(first)) == 1
    nodes.kubectl("delete", "pod", names[0], "mps", f"more-{first.name}", "--wait=false")
    until_gone(nodes, names[0], "mps", f"more-{first.name}")
    until_seen(lambda: label(nodes, first) is None, "the node has left the domain", 60)
    until_seen(lambda: not claim_specs(first), "the CDI files are gone", 60)
    assert entries(first, GPU_DRIVER) == {}
    assert "mps-control" not in nodes.kubectl("get", "deployments,pods", "-n", NAMESPACE, "-o", "name")
    assert mps_directories(first) == []
    assert "/mps/" not in (first.root / "proc/1/mountinfo").read_text()

    # kubelet reports which pods have NICs: here they are ours, and go to DRANET no sooner than they are back.
    selector = 'device.attributes["dra.net"].ifName == "fab0"'
    template = claim_template("fabric-nic", "dranet.net", selector=selector)
    nodes.apply(template, claiming(pod("nic", node=first.name), "fabric-nic"))
    until_running(nodes, "nic")
    planned = takeover(first, "plan", "--back", "--driver", "dra.net")
    assert planned.returncode == 1, planned.stdout + planned.stderr
    assert "Rackloom moved its NIC into a pod" in planned.stdout
    nodes.kubectl("delete", "pod", "nic", "--wait=false")
    until_gone(nodes, "nic")
    gate = ("plan", "--back", "--driver", "dra.net")
    until_seen(lambda: takeover(first, *gate).returncode == 0, "kubelet holds no claim of it", 60)

    # The second node goes back, and NVIDIA's driver gives back the claims that it had prepared.
    keep_off(nodes, second)
    back = takeover(second, "back", "--release", "0.5")
    assert back.returncode == 0, back.stdout + back.stderr
    for driver in DRIVERS:
        states = states_read_by_driver(reader(), driver, second.root / f"{PLUGINS}/{driver}/checkpoint.json")
        assert set(states.values()) == {"PrepareCompleted"}, driver
    plugins[second.name] = nvidia.start_plugins(nodes, second, "0.5")
    assert unchanged(
        {name: found for name, found in before[0].items() if second.name in name}, processes(nodes)
    )
    nodes.kubectl("delete", "pod", names[1], f"more-{second.name}", "--wait=false")
    until_gone(nodes, names[1], f"more-{second.name}")
    until_seen(lambda: label(nodes, second) is None, "the node has left the domain", 60)
    until_seen(lambda: not claim_specs(second), "the CDI files are gone", 60)
    nodes.kubectl("delete", "computedomain", "job", "--timeout=60s")
    assert "computedomain-daemon" not in nodes.kubectl("get", "daemonsets", "-n", NAMESPACE, "-o", "name")

    # A new job across a node of Rackloom's and a node of NVIDIA's, with NVIDIA's controller.
    nodes.kubectl("scale", *SYSTEM, "deployment/rackloom-controller", "--replicas=0")
    until_seen(
        lambda: "controller" not in nodes.kubectl("get", "pods", *SYSTEM, "-o", "name"), "it is off", 60
    )
    domain = nvidia.make_domain(nodes, "mixed", "mixed-channel")
    job = [worker(f"mixed-{node.name}", node, "mixed-channel") for node in nodes.nodes]
    nodes.apply(*job)
    until_running(nodes, *(each["metadata"]["name"] for each in job), within=120)
    assert set(members(nodes, domain)) == {first.name, second.name}
    until_seen(lambda: is_meshed(nodes), "the daemons reach each other", 60)


PLUGINS = "var/lib/kubelet/plugins"


def worker(name: str, node: RealNode, channel: str = "") -> dict[str, Any]:
    """A pod with one GPU, and a channel if `channel` names a template."""
    value = pod(name, node=node.name)
    templates = ["one-gpu", *([channel] if channel else [])]
    value["spec"]["resourceClaims"] = [
        {"name": template, "resourceClaimTemplateName": template} for template in templates
    ]
    claims = [{"name": template} for template in templates]
    value["spec"]["containers"][0]["resources"] = {"claims": claims}
    return value


def takeover(node: RealNode, *words: str) -> subprocess.CompletedProcess[str]:
    """`rackloom takeover` on the files of a node."""
    places = {
        "plugins": PLUGINS,
        "registry": "var/lib/kubelet/plugins_registry",
        "cdi-root": "run/cdi",
        "kubelet-state": "var/lib/kubelet/dra_manager_state",
        "sysroot": "",
    }
    options = [word for name, path in places.items() for word in (f"--{name}", str(node.root / path))]
    return subprocess.run(
        [sys.executable, "-m", "rackloom.cli.main", "takeover", *words, *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )


def stop(plugins: dict[str, list[Child]], node: RealNode) -> None:
    for child in plugins[node.name]:
        child.stop()


def until_ours(cluster: NodeCluster, node: RealNode) -> None:
    """Both plugins of Rackloom are ready on a node."""
    wanted = {"node-imex", "node-gpu"}
    until_seen(lambda: ready(cluster, node) >= wanted, f"Rackloom serves {node.name}", 180)


def ready(cluster: NodeCluster, node: RealNode) -> set[str]:
    return {
        component
        for component, status in plugin_pods(cluster, node)
        if status.get("containerStatuses", [{}])[0].get("ready")
    }


def waiting(cluster: NodeCluster, node: RealNode) -> set[str]:
    """Plugins of Rackloom that wait for NVIDIA's to end."""
    return {
        component
        for component, status in plugin_pods(cluster, node)
        if "running" in status["initContainerStatuses"][0]["state"]
    }


def plugin_pods(cluster: NodeCluster, node: RealNode) -> list[tuple[str, dict[str, Any]]]:
    chosen = cluster.get("pods", *SYSTEM, "--field-selector", f"spec.nodeName={node.name}")["items"]
    component = "app.kubernetes.io/component"
    return [
        (each["metadata"]["labels"][component], each["status"])
        for each in chosen
        if each["metadata"]["labels"][component] in ("node-imex", "node-gpu")
        and each["status"].get("initContainerStatuses")
    ]


def keep_off(cluster: NodeCluster, node: RealNode) -> None:
    """Keep the plugins of Rackloom off this node, and wait until none runs there."""
    cluster.kubectl("label", "node", node.name, "rackloom.dev/taken-over-")
    until_seen(lambda: not plugin_pods(cluster, node), "the plugins have ended", 60)


def processes(cluster: NodeCluster) -> dict[str, tuple[Any, ...]]:
    """For each container of a job or an IMEX daemon: its id, its start, its process and that one's start."""
    found = {}
    for namespace in ("default", NAMESPACE):
        for each in cluster.get("pods", "-n", namespace)["items"]:
            node = cluster.node(each["spec"]["nodeName"])
            (status,) = each["status"]["containerStatuses"]
            container = status["containerID"].partition("://")[2]
            started = status["state"]["running"]["startedAt"]
            listed = node.run("ctr", "-n", "k8s.io", "tasks", "ls").splitlines()
            pid = next(row.split()[1] for row in listed if row.startswith(container))
            ticks = (node.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            key = f"{each['metadata']['name']} on {node.name}"
            found[key] = (container, started, status["restartCount"], pid, ticks, imex_processes(node))
    return found


def imex_processes(node: RealNode) -> tuple[str, ...]:
    return tuple(
        node.run("pgrep", "-f", r"rackloom\.lab\.imex\.service|nvidia-imex --nogpu", check=False).split()
    )


def unchanged(before: dict[str, tuple[Any, ...]], now: dict[str, tuple[Any, ...]]) -> bool:
    return {name: now.get(name) for name in before} == before


def members(cluster: NodeCluster, domain: str) -> dict[str, Any]:
    """The daemons of a domain as its peers see them: index, address and status of each, by node."""
    labels = f"{COMPUTE_DOMAIN_LABEL}={domain}"
    cliques = cluster.get("computedomaincliques", "-n", NAMESPACE, "-l", labels)["items"]
    return {daemon["nodeName"]: daemon for clique in cliques for daemon in clique.get("daemons", ())}


def is_meshed(cluster: NodeCluster) -> bool:
    """Whether every daemon is connected with every other."""
    found = cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "name").split()
    names = [name for name in found if "computedomain-daemon" in name]
    for name in names:
        command = ("nvidia-imex-ctl", "-c", "/imexd/imexd.cfg", "-N", "-j")
        done = cluster.tried("exec", "-n", NAMESPACE, name, "--", *command)
        if done.returncode != 0 or done.stdout.count('"CONNECTED"') != len(names) ** 2:
            return False
    return len(names) == len(cluster.nodes)


def files_of(node: RealNode) -> dict[str, bytes]:
    """The checkpoints, CDI files and sockets of NVIDIA's plugins. Sockets are given by their inode."""
    home = node.root / "var/lib/kubelet"
    found = {}
    for path in (
        *home.glob("plugins/*nvidia.com/*"),
        *home.glob("plugins_registry/*"),
        *(node.root / "run/cdi").glob("*"),
    ):
        if path.is_file() and path.suffix != ".lock":
            found[str(path.relative_to(node.root))] = path.read_bytes()
        elif path.is_socket() and "nvidia.com" in path.name + path.parent.name:
            found[str(path.relative_to(node.root))] = str(path.stat().st_ino).encode()
    return found


def slices_of(cluster: NodeCluster, node: RealNode) -> set[tuple[str, str]]:
    """Name and resourceVersion of the slices of NVIDIA's drivers on a node."""
    return {
        (each["metadata"]["name"], each["metadata"]["resourceVersion"])
        for each in cluster.get("resourceslices")["items"]
        if each["spec"].get("nodeName") == node.name and each["spec"]["driver"] in DRIVERS
    }


def mps_directories(node: RealNode) -> list[str]:
    """The directories of daemons of either driver."""
    return [path.name for path in (node.root / PLUGINS / GPU_DRIVER / "mps").iterdir() if path.is_dir()]


def claim_specs(node: RealNode) -> list[str]:
    return sorted(path.name for path in (node.root / "run/cdi").glob("*-claim_*"))


def entries(node: RealNode, driver: str) -> dict[str, Any]:
    file = node.root / PLUGINS / driver / "checkpoint.json"
    return dict(json.loads(file.read_bytes())["content"]["claims"])


def label(cluster: NodeCluster, node: RealNode) -> str | None:
    labels = cluster.get("node", node.name)["metadata"]["labels"]
    return labels.get(COMPUTE_DOMAIN_LABEL)
