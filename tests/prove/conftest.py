"""Skips tests that this machine cannot run, with the reason in words."""

import pytest

from rackloom.prove.transfer.emulation import can_emulate
from rackloom.prove.transfer.installation import nixl_missing_reason


@pytest.fixture(scope="session")
def no_emulation() -> str | None:
    return can_emulate()


@pytest.fixture(autouse=True)
def _skip_what_cannot_run(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("nixl") and (reason := nixl_missing_reason()):
        pytest.skip(reason)
    if request.node.get_closest_marker("root") and (reason := request.getfixturevalue("no_emulation")):
        pytest.skip(f"no emulated pods: {reason}")
