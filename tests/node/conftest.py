"""Two real nodes for all tests of this folder, and what deploy/kubernetes installs on them.

`make test-node` sets RACKLOOM_TEST_NODE; without it the tests are collected and skipped, so that `make test` starts no nodes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node.nodes import NodeCluster

STAGE = os.environ.get("RACKLOOM_TEST_NODE", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="real nodes are started by make test-node only")
    for item in items:
        if not STAGE and here in item.path.parents:
            item.add_marker(skip)


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
