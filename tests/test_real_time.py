"""Tests in real time run twice in CI, and only they do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
FAILS_ONCE = """
from pathlib import Path
MARK = Path(__file__).with_suffix(".ran")

def test_once():
    ran, _ = MARK.exists(), MARK.touch()
    assert ran
"""
STARTS_PROCESSES = "import subprocess\n" + FAILS_ONCE
WAITS = "from tests.waiting import until_seen\n" + FAILS_ONCE


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.real_time", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", f"--rootdir={folder}", "tests"]
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "browser").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  real_time: test\n")
    return tmp_path


@pytest.mark.slow
def test_a_test_in_real_time_runs_again_in_ci_and_is_named(folder: Path) -> None:
    (folder / "tests/browser/test_page.py").write_text(FAILS_ONCE)
    (folder / "tests/test_processes.py").write_text(STARTS_PROCESSES)
    (folder / "tests/test_waiting.py").write_text(WAITS)
    done = run(folder, CI="true")
    assert done.returncode == 0, done.stdout
    flaky = [line for line in done.stdout.splitlines() if line.startswith("FLAKY ")]
    assert [line.split()[1] for line in flaky] == [
        "tests/browser/test_page.py::test_once:",
        "tests/test_processes.py::test_once:",
        "tests/test_waiting.py::test_once:",
    ]
    assert done.stdout.count("assert False") == 3
    assert all("at load" in line and "not known" not in line for line in flaky)


@pytest.mark.slow
def test_every_other_test_runs_once(folder: Path) -> None:
    (folder / "tests/test_pure.py").write_text(FAILS_ONCE)
    (folder / "tests/browser/test_broken.py").write_text("def test_broken():\n    assert False\n")
    done = run(folder, CI="true")
    assert done.returncode == 1
    assert "2 failed, 1 rerun" in done.stdout
    assert "FLAKY" not in done.stdout


@pytest.mark.slow
def test_outside_of_ci_a_failure_is_a_failure(folder: Path) -> None:
    (folder / "tests/browser/test_page.py").write_text(FAILS_ONCE)
    assert run(folder).returncode == 1
