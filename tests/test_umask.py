"""The umask of a module's fixture does not reach the tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def private_files() -> None:
    """As in a site's own process, whose files are private."""
    os.umask(0o077)


def test_a_test_begins_with_the_umask_of_the_session(private_files: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (tmp_path / "file").stat().st_mode & 0o044 == 0o044
