"""Skips, with the reason in words, what this machine cannot run."""

import pytest

from rackloom.prove.transfer.emulate import can_emulate
from rackloom.prove.transfer.memory import missing


@pytest.fixture(scope="session")
def no_emulation() -> str | None:
    return can_emulate()


@pytest.fixture(autouse=True)
def _skip_what_cannot_run(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("nixl") and (reason := missing()):
        pytest.skip(reason)
    if request.node.get_closest_marker("root") and (reason := request.getfixturevalue("no_emulation")):
        pytest.skip(f"no emulated pods: {reason}")
