"""The nodes themselves, before anything of ours runs on them."""

from tests.node.nodes import NodeCluster, seconds_until


def test_a_plain_pod_runs(nodes: NodeCluster) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "plain"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "main", "image": "busybox:1", "command": ["sh", "-c", "nslookup kubernetes.default.svc.cluster.local && sleep 1000"]}
            ],
        },
    }
    nodes.apply(pod)
    phase = "{.status.phase}"
    seconds_until(
        lambda: nodes.kubectl("get", "pod", "plain", "-o", f"jsonpath={phase}") == "Running", "the pod runs", 60
    )
    assert "10.96.0.1" in nodes.kubectl("logs", "plain")
