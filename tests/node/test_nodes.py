"""The nodes themselves, before Rackloom runs on them."""

from tests.node.nodes import NodeCluster
from tests.node.workloads import pod, until_gone
from tests.waiting import until_seen

NAME = "kubernetes.default.svc.cluster.local"


def test_a_pod_reaches_the_api_server_by_its_name(nodes: NodeCluster) -> None:
    nodes.apply(
        pod(
            "plain",
            f"until nslookup {NAME}; do sleep 0.2; done; nc -w 5 {NAME} 443 </dev/null && echo reached",
        )
    )
    until_seen(lambda: "reached" in nodes.tried("logs", "plain").stdout, "the pod reaches the API server", 60)
    assert "10.96.0.1" in nodes.kubectl("logs", "plain")
    nodes.kubectl("delete", "pod", "plain", "--wait=false")
    until_gone(nodes, "plain")
