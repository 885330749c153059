"""The examples in channel mode: jobs share nodes, but no channel.

The cluster is set to it as the pages say: deploy/kubernetes/channel-isolation for the controller and the
node plugins, and the same variable for the webhook, which gives the pods of a job their one claim. The
examples for domain mode are in test_compute_domains.py and test_gang.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster, seconds_until
from tests.node.workloads import (
    IMAGE,
    channels_in,
    claiming,
    compute_domain,
    condition,
    inside,
    is_ready,
    phase,
    pod,
    until_gone,
    until_running,
)
from tests.waiting import until_seen

from rackloom.core.cluster.names import CHANNELS_PER_CLIQUE, CHANNELS_READY_LABEL, COMPUTE_DOMAIN_LABEL

pytestmark = only_all
MINIMAL = ROOT / "examples/imex-minimal/compute-domain.yaml"
MPI_JOB = ROOT / "examples/imex-mpijob/mpijob.yaml"
CHANNELS = "/dev/nvidia-caps-imex-channels"
SYSTEM = ("-n", "rackloom-system")
WEBHOOK = "deployment/rackloom-webhook"


@pytest.fixture(scope="module")
def channel_mode(admission: NodeCluster) -> Iterator[NodeCluster]:
    """The cluster in channel mode, its cliques warm. Afterwards it is in domain mode again."""
    _set(admission, "channel-isolation", "IMEX_ISOLATION=channel")
    until_seen(lambda: len(_warm(admission)) == len(admission.nodes), "all nodes offer channels", 120)
    yield admission
    _set(admission, "base", "IMEX_ISOLATION-")
    until_seen(lambda: not _warm(admission), "no node offers channels", 120)
    until_seen(lambda: not admission.get("computedomains", "-A")["items"], "no warm domain is left", 60)


def test_the_minimal_example_gets_a_channel_of_its_own(channel_mode: NodeCluster) -> None:
    channel_mode.kubectl("apply", "-f", str(MINIMAL))
    seconds_until(lambda: phase(channel_mode, "imex-minimal") == "Succeeded", "the pod has run", 60)
    (number,) = channels_in(channel_mode.kubectl("logs", "imex-minimal"))
    assert 1 <= number <= CHANNELS_PER_CLIQUE
    channel_mode.kubectl("delete", "-f", str(MINIMAL), "--timeout=60s")


def test_two_jobs_share_both_nodes_and_no_channel(channel_mode: NodeCluster) -> None:
    seen: dict[str, set[int]] = {}
    for job in ("left", "right"):
        pods = [f"{job}-{node.name}" for node in channel_mode.nodes]
        channel_mode.apply(
            compute_domain(job, f"{job}-channel"),
            *(
                claiming(pod(name, node=node.name), f"{job}-channel")
                for name, node in zip(pods, channel_mode.nodes, strict=True)
            ),
        )
        until_running(channel_mode, *pods)
        seen[job] = {
            number
            for name in pods
            for number in channels_in(inside(channel_mode, name, "ls", "-l", CHANNELS))
        }
    assert all(len(channels) == 1 for channels in seen.values()), f"a job has one channel: {seen}"
    assert seen["left"] != seen["right"]
    for job in seen:
        until_seen(lambda job=job: is_ready(channel_mode, job), f"{job} is Ready", 30)
        pods = [f"{job}-{node.name}" for node in channel_mode.nodes]
        channel_mode.kubectl("delete", "pod", *pods, "--wait=false")
        channel_mode.kubectl("delete", "computedomain", job, "--timeout=60s")
        until_gone(channel_mode, *pods)
    assert len(_warm(channel_mode)) == len(channel_mode.nodes), "the cliques stay warm for the next job"


def test_a_job_that_asks_for_all_channels_waits_and_learns_why(channel_mode: NodeCluster) -> None:
    channel_mode.apply(compute_domain("all", "all-channel", "All"), claiming(pod("all-0"), "all-channel"))
    until_seen(
        lambda: condition(channel_mode, "all", "Degraded").get("status") == "True", "it is refused", 30
    )
    degraded = condition(channel_mode, "all", "Degraded")
    assert degraded["reason"] == "AllChannelsRefused"
    assert "imex-isolation=domain" in degraded["message"]
    waiting = channel_mode.get("pod", "all-0")
    assert "nodeName" not in waiting["spec"], "it is bound to no node"
    assert not channel_mode.get("resourceclaims")["items"], "nothing is allocated for it"
    channel_mode.kubectl("delete", "pod", "all-0", "--wait=false")
    channel_mode.kubectl("delete", "computedomain", "all", "--timeout=60s")
    until_gone(channel_mode, "all-0")


@pytest.mark.usefixtures("mpi_operator")
def test_the_mpi_example_runs_in_channel_mode(channel_mode: NodeCluster) -> None:
    run_mpi_example(channel_mode)


@pytest.mark.usefixtures("mpi_operator")
def test_the_mpi_example_runs_in_domain_mode(installed: NodeCluster) -> None:
    """It runs after the tests of channel mode: their module's fixture has ended when another one begins."""
    run_mpi_example(installed)


def run_mpi_example(cluster: NodeCluster) -> None:
    """Apply the example, and take it away when its workers have run beside each other with a channel."""
    domain, job = _mpi_example(len(cluster.nodes))
    name = job["metadata"]["name"]
    workers = [f"{name}-worker-{number}" for number in range(len(cluster.nodes))]
    cluster.apply(domain, job)
    until_running(cluster, *workers, within=90)
    hosts = {cluster.get("pod", worker)["spec"]["nodeName"] for worker in workers}
    assert hosts == {node.name for node in cluster.nodes}
    listings = [inside(cluster, worker, "ls", "-l", CHANNELS) for worker in workers]
    assert len({*channels_in("".join(listings))}) == 1
    until_seen(lambda: is_ready(cluster, name), "its domain is Ready", 30)
    cluster.kubectl("delete", "mpijob", name, "--timeout=60s")
    cluster.kubectl("delete", "computedomain", name, "--timeout=60s")
    until_gone(cluster, *workers)


def _mpi_example(workers: int) -> tuple[Any, Any]:
    """examples/imex-mpijob for as many nodes as are here, with an image that is here.

    Its GPUs are those of a device plugin (`nvidia.com/gpu`), which the nodes do not run. In their place its
    workers keep off each other's nodes.
    """
    domain, job = (
        {**document, "metadata": {**document["metadata"], "namespace": "default"}}
        for document in yaml.safe_load_all(MPI_JOB.read_text())
    )
    replicas = job["spec"]["mpiReplicaSpecs"]
    replicas["Worker"]["replicas"] = workers
    for group in replicas.values():
        spec = group["template"]["spec"]
        spec["terminationGracePeriodSeconds"] = 0
        (container,) = spec["containers"]
        container |= {"image": IMAGE, "command": ["sh", "-c", "sleep 100000"], "args": []}
        container.get("resources", {}).pop("limits", None)
    worker = replicas["Worker"]["template"]
    worker["spec"]["affinity"]["podAntiAffinity"] = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": worker["metadata"]["labels"]},
            }
        ]
    }
    return domain, job


def _set(cluster: NodeCluster, overlay: str, variable: str) -> None:
    cluster.kubectl("apply", "-k", str(ROOT / "deploy/kubernetes" / overlay))
    cluster.kubectl("set", "env", *SYSTEM, WEBHOOK, variable)
    for workload in ("deployment/rackloom-controller", "daemonset/rackloom-node-imex", WEBHOOK):
        cluster.kubectl("rollout", "status", *SYSTEM, workload, "--timeout=120s")
    # The API server keeps its connections to a webhook that is ending, which answers in the previous mode.
    until_seen(lambda: not _ending(cluster), "the old pods are gone", 60)


def _ending(cluster: NodeCluster) -> list[str]:
    """The pods of the system that are being deleted. A rollout does not wait for them."""
    found = cluster.get("pods", *SYSTEM)["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" in pod["metadata"]]


def _warm(cluster: NodeCluster) -> list[str]:
    """The nodes that offer channels of their clique."""
    found = cluster.get("nodes", "-l", CHANNELS_READY_LABEL)["items"]
    assert all(COMPUTE_DOMAIN_LABEL not in node["metadata"]["labels"] for node in found)
    return [node["metadata"]["name"] for node in found]
