"""A clean checkout, and the wheels that pip makes of it. Tests install these."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.install.commands import ROOT, output_of


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has, so that nothing of this working tree helps."""
    folder = tmp_path_factory.mktemp("checkout") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels of `pip wheel .` in an empty environment: of the program and of its dependencies.

    pip builds ours in isolation, in an environment that has the build backend alone. A build step that
    imported the program would fail there. The workers of pytest-xdist share one build.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "wheels"
    with (shared / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = tmp_path_factory.mktemp("pip-wheel")
            (scratch / "home").mkdir()
            output_of(sys.executable, "-m", "venv", scratch / "venv")
            made = scratch / "wheels"
            output_of(
                *(scratch / "venv/bin/pip", "wheel", "--quiet", "-w", made, "."),
                home=scratch / "home",
                cwd=checkout,
            )
            made.rename(folder)
    return folder


@pytest.fixture(scope="session")
def wheel(wheels: Path) -> Path:
    """The program's own wheel."""
    (made,) = wheels.glob("rackloom-*.whl")
    return made
