"""Two real nodes for all tests of this folder, and the software that is installed on them (`installation`).

`make test-node` sets RACKLOOM_TEST_NODE. Without it the tests are collected and skipped, so that `make test`
starts no nodes.
"""

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.cluster.build import MPI_OPERATOR, made
from tests.cluster.processes import start
from tests.node import installation
from tests.node.nodes import NodeCluster
from tests.node.workloads import claiming, pod
from tests.waiting import until_seen

ROOT = Path(__file__).parents[2]
SLICES = 3
"""Each node's GPUs, NICs, and IMEX devices."""
STAGE = os.environ.get("RACKLOOM_TEST_NODE", "")


only_all = pytest.mark.skipif(STAGE != "all", reason="make test-node-all: it takes minutes")
"""Marks the tests that make test-node leaves out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="real nodes are started by make test-node only")
    for item in items:
        if not STAGE and here in item.path.parents:
            item.add_marker(skip)
    if STAGE:
        # All tests share one installation. The first of these removes it, the others start without.
        last = ["test_uninstall.py", "test_chart_reader.py", "test_takeover.py"]
        items.sort(key=lambda item: last.index(item.path.name) if item.path.name in last else -1)


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCluster]:
    """A control plane and two Ready nodes."""
    cluster = NodeCluster(
        tmp_path_factory.mktemp("nodes"),
        Path(os.environ["RACKLOOM_NODE_IMAGES"]),
        Path(os.environ["RACKLOOM_CONTAINERD_ROOT"]),
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def installed(nodes: NodeCluster) -> NodeCluster:
    """The nodes with Rackloom as a user installs it, once every plugin has published its devices."""
    installation.install(nodes)
    wanted = SLICES * len(nodes.nodes)
    until_seen(lambda: len(nodes.get("resourceslices")["items"]) >= wanted, "every plugin has published", 120)
    for workload in (
        "deployment/rackloom-controller",
        *(f"daemonset/{plugin}" for plugin in installation.plugins()),
    ):
        nodes.kubectl("rollout", "status", "-n", "rackloom-system", workload, "--timeout=120s")
    return nodes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the state of the cluster: its pods, events, and the logs of our programs."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("nodes") or getattr(item, "funcargs", {}).get("installed")
    if report.failed and isinstance(cluster, NodeCluster):
        report.sections.append(("the cluster", cluster.situation()))
    return report


@pytest.fixture(scope="session")
def admission(installed: NodeCluster) -> NodeCluster:
    """The nodes with the webhook, which reviews their pods."""
    installation.install_webhook(installed)
    installed.kubectl(
        "rollout", "status", "-n", "rackloom-system", "deployment/rackloom-webhook", "--timeout=120s"
    )
    until_seen(lambda: _asked(installed), "the webhook is asked", 60)
    return installed


@pytest.fixture
def mpi_operator(installed: NodeCluster) -> Iterator[None]:
    """The MPI operator beside the control plane. Its CRD here takes any field."""
    version = {
        "name": "v2beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        "subresources": {"status": {}},
    }
    names = {"kind": "MPIJob", "plural": "mpijobs", "singular": "mpijob"}
    installed.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "mpijobs.kubeflow.org"},
            "spec": {"group": "kubeflow.org", "scope": "Namespaced", "names": names, "versions": [version]},
        }
    )
    installed.kubectl("wait", "--for=condition=Established", "crd/mpijobs.kubeflow.org", "--timeout=30s")
    plane = installed.plane
    program = made(MPI_OPERATOR) / "mpi-operator"
    child = start("mpi-operator", [program, plane.kubeconfig("mpi-operator", "system:masters")], plane.logs)
    yield
    child.stop()
    installed.kubectl("delete", "crd", "mpijobs.kubeflow.org", "--timeout=60s")


def _asked(cluster: NodeCluster) -> bool:
    """The API server hears of webhooks, and of their certificate, a moment after they were written."""
    probe = claiming(pod("probe"), "none-such")
    done = cluster.tried("create", "--dry-run=server", "-o", "json", "-f", "-", given=json.dumps(probe))
    return done.returncode == 0 and "schedulingGates" in done.stdout
