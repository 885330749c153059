"""Fixtures that the tests of NICs share."""

from collections.abc import Iterator

import pytest
from tests.claim.node.nic.nic_kit import Host, own_host


@pytest.fixture
def host() -> Iterator[Host]:
    """A namespace that stands for the host."""
    with own_host() as host:
        yield host
