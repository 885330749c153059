"""After a failed prepare on a real kubelet: no pod waits more than ten seconds once the cause has cleared.

kubelet alone waits for the pod's next resync, 60 to 90 s after the failure. A wait is the time that a pod
takes beyond a plain pod on the same node.
"""

import msgspec
from tests.node.conftest import only_all
from tests.node.nodes import NodeCluster
from tests.node.workloads import (
    claim_template,
    claiming,
    compute_domain,
    phase,
    pod,
    until_gone,
    until_running,
)
from tests.waiting import until_seen

from rackloom.claim.node.requests import RETRY_ANNOTATION

MOST_WAIT = 10.0
"""Seconds that a pod may wait after a failure that has cleared."""
IMEX = r"rackloom\.lab\.imex\.service|nvidia-imex --nogpu"
"""The stand-in for nvidia-imex, or the real program if the nodes have it."""
GPU_PLUGIN = "rackloom-node-gpu"
SYSTEM = ("-n", "rackloom-system")
pytestmark = only_all
"""It keeps pods waiting for minutes."""


def test_a_daemon_that_is_ready_only_after_kubelets_call_has_failed(installed: NodeCluster) -> None:
    node = installed.nodes[0]
    installed.apply(
        compute_domain("late", "late-channel"), claiming(pod("late", node=node.name), "late-channel")
    )
    held = until_seen(lambda: node.run("pgrep", "-f", IMEX, check=False).split(), "nvidia-imex starts", 60)
    node.run("kill", "-STOP", *held)
    until_seen(lambda: "is not ready on this node" in failures(installed, "late"), "the call has failed", 90)
    assert phase(installed, "late") == "Pending"

    node.run("kill", "-CONT", *held)
    until_seen(lambda: "Ready" in daemons(installed).split(), "the daemon is READY", 60)
    assert until_running(installed, "late") - plain_pod(installed, node.name) < MOST_WAIT
    assert annotation(installed, "late").endswith(" compute-domain.nvidia.com")
    installed.kubectl("delete", "pod", "late", "--wait=false")
    installed.kubectl("delete", "computedomain", "late", "--timeout=60s")
    until_gone(installed, "late")


def test_a_pod_that_came_while_its_plugin_was_away(installed: NodeCluster) -> None:
    node = installed.nodes[0]
    installed.apply(claim_template("any-gpu", "gpu.nvidia.com"))
    hold(installed, "true")
    until_seen(lambda: not plugins(installed, node.name), "the plugin has gone", 60)
    try:
        # Its slices stay for 30 s, so the pod is scheduled.
        installed.apply(claiming(pod("early", node=node.name), "any-gpu"))
        missing = "DRA driver gpu.nvidia.com is not registered"
        until_seen(lambda: missing in failures(installed, "early"), "kubelet lacks the plugin", 30)
    finally:
        hold(installed, None)
    until_seen(lambda: "node.registered" in plugin_log(installed, node.name), "it is registered again", 60)
    assert until_running(installed, "early") - plain_pod(installed, node.name) < MOST_WAIT
    assert annotation(installed, "early").endswith(" gpu.nvidia.com")
    installed.kubectl("delete", "pod", "early", "--wait=false")
    until_gone(installed, "early")


def test_a_right_that_is_given_after_the_claim_was_refused(installed: NodeCluster) -> None:
    node = installed.nodes[0]
    installed.apply(claim_template("any-gpu", "gpu.nvidia.com"))
    binding = installed.get("clusterrolebinding", GPU_PLUGIN)
    installed.kubectl("delete", "clusterrolebinding", GPU_PLUGIN)
    try:
        installed.apply(claiming(pod("refused", node=node.name), "any-gpu"))
        until_seen(lambda: "Permanent error" in failures(installed, "refused"), "the claim is refused", 60)
    finally:
        kept = {part: binding[part] for part in ("apiVersion", "kind", "roleRef", "subjects")}
        installed.apply(
            {**kept, "metadata": {"name": GPU_PLUGIN, "labels": binding["metadata"].get("labels", {})}}
        )
    assert until_running(installed, "refused") - plain_pod(installed, node.name) < MOST_WAIT
    assert annotation(installed, "refused").endswith(" gpu.nvidia.com")
    installed.kubectl("delete", "pod", "refused", "--wait=false")
    until_gone(installed, "refused")


def plain_pod(cluster: NodeCluster, node: str) -> float:
    """Seconds that a pod without claims takes now."""
    cluster.apply(pod("plain", node=node))
    seconds = until_running(cluster, "plain")
    cluster.kubectl("delete", "pod", "plain", "--wait=false")
    until_gone(cluster, "plain")
    return seconds


def daemons(cluster: NodeCluster) -> str:
    """The state of the IMEX daemons in the clique objects."""
    return cluster.kubectl(
        "get", "computedomaincliques", "-A", "-o", "jsonpath={.items[*].daemons[*].status}"
    )


def failures(cluster: NodeCluster, name: str) -> str:
    """kubelet's messages about the claims of a pod that it could not prepare."""
    about = f"involvedObject.name={name},reason=FailedPrepareDynamicResources"
    return cluster.kubectl("get", "events", "--field-selector", about, "-o", "jsonpath={.items[*].message}")


def annotation(cluster: NodeCluster, name: str) -> str:
    """The annotation of the plugin that made kubelet try a pod again, with its time."""
    return str(cluster.get("pod", name)["metadata"].get("annotations", {}).get(RETRY_ANNOTATION, ""))


def hold(cluster: NodeCluster, value: str | None) -> None:
    """Keep the GPU plugin off all nodes, or let it go there again."""
    selector = {"spec": {"template": {"spec": {"nodeSelector": {"rackloom.dev/held": value}}}}}
    cluster.kubectl("patch", "daemonset", GPU_PLUGIN, *SYSTEM, "-p", msgspec.json.encode(selector).decode())


def plugins(cluster: NodeCluster, node: str) -> str:
    """The GPU plugin's pods on a node."""
    chosen = ("-l", "app.kubernetes.io/component=node-gpu", "--field-selector", f"spec.nodeName={node}")
    return cluster.kubectl("get", "pods", *SYSTEM, *chosen, "-o", "name")


def plugin_log(cluster: NodeCluster, node: str) -> str:
    """The log of the GPU plugin on a node. Empty while it starts."""
    return cluster.tried("logs", *SYSTEM, *plugins(cluster, node).split()).stdout
