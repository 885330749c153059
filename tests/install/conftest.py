"""The wheel that the tests install."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.install.commands import LIMIT, ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the files that git has, so that nothing of this working tree helps."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder / "clone"], check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, check=True, cwd=folder / "clone", capture_output=True, timeout=LIMIT)
    (made,) = folder.glob("*.whl")
    return made
