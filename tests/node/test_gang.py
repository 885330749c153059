"""An MPIJob as a gang over both nodes: held by our webhook, placed, let go together, and gone."""

import pytest
from tests.node.nodes import NodeCluster
from tests.node.workloads import (
    IMAGE,
    Object,
    claim_template,
    compute_domain,
    condition,
    phase,
    until_running,
)
from tests.waiting import until_seen

GPUS = 8
"""GPUs of each node: a member takes its whole tray."""
GANG = "rackloom.dev/gang"


@pytest.mark.usefixtures("admission", "mpi_operator")
def test_an_mpi_job_runs_as_a_gang_on_both_nodes(installed: NodeCluster) -> None:
    installed.apply(claim_template("whole-tray", "gpu.nvidia.com", GPUS))
    installed.apply(compute_domain("train", "train-channel"), _mpi_job("train", len(installed.nodes)))
    workers = [f"train-worker-{number}" for number in range(len(installed.nodes))]
    until_running(installed, *workers, within=90)
    hosts = {installed.get("pod", name)["spec"]["nodeName"] for name in workers}
    assert hosts == {node.name for node in installed.nodes}
    until_seen(
        lambda: condition(installed, "train", "Ready").get("status") == "True", "its domain is Ready", 30
    )
    plan = installed.get("gangplan", "train")
    assert {entry["type"]: entry["status"] for entry in plan["status"]["conditions"]}["Bound"] == "True"
    installed.kubectl("delete", "mpijob", "train", "--timeout=60s")
    installed.kubectl("delete", "computedomain", "train", "--timeout=60s")
    until_seen(lambda: not installed.get("gangplans", "-A")["items"], "the plan is gone", 60)
    for node in installed.get("nodes")["items"]:
        taints = [taint["key"] for taint in node["spec"].get("taints", [])]
        assert GANG not in taints, f"{node['metadata']['name']} is still reserved"
    assert not phase(installed, workers[0])


def _mpi_job(name: str, workers: int) -> Object:
    def template(group: str, claims: dict[str, str]) -> Object:
        container: Object = {
            "name": "main",
            "image": IMAGE,
            "command": ["sh", "-c", "sleep 100000"],
            "resources": {"claims": [{"name": claim} for claim in claims]},
        }
        return {
            "metadata": {
                "labels": {GANG: name, "rackloom.dev/gang-group": group},
                "annotations": {"rackloom.dev/gang-size": f"launcher=1,worker={workers}"},
            },
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [container],
                "resourceClaims": [
                    {"name": claim, "resourceClaimTemplateName": source} for claim, source in claims.items()
                ],
            },
        }

    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "slotsPerWorker": GPUS,
            "runPolicy": {"cleanPodPolicy": "All"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": template("launcher", {})},
                "Worker": {
                    "replicas": workers,
                    "template": template("worker", {"gpus": "whole-tray", "channel": f"{name}-channel"}),
                },
            },
        },
    }
