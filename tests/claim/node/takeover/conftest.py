"""A node where NVIDIA's driver has been."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.claim.node.takeover import nvidia_files
from tests.claim.node.takeover.nvidia_files import Node


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        yield Node(Path(root))


@pytest.fixture(scope="session")
def read_by_driver() -> Any:
    """Reads a checkpoint the way NVIDIA's driver does."""
    return partial(nvidia_files.states_read_by_driver, nvidia_files.reader())
