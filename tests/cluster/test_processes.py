"""A test run that is killed leaves no process behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.processes import start

STARTER = """
import sys, time
from pathlib import Path
from tests.cluster.processes import start
print(start("sleep", ["sleep", "600"], Path(sys.argv[1])).process.pid, flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")


def test_children_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    child = int(run.stdout.readline())
    deadline = time.monotonic() + 60
    # Only a child that has asked the kernel for it ends with its parent: setpriv asks, then runs the program.
    while Path(f"/proc/{child}/comm").read_text().strip() != "sleep":
        assert time.monotonic() < deadline, "the child does not start"
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlived its run"
        time.sleep(0.05)


def test_a_log_is_kept_and_its_end_can_be_shown(tmp_path: Path) -> None:
    child = start("echo", ["sh", "-c", "seq 100"], tmp_path)
    child.process.wait()
    assert child.ended()
    title, first, *_, last = child.tail().splitlines()
    assert (str(tmp_path / "echo.log") in title, first, last) == (True, "71", "100")


def is_alive(pid: int) -> bool:
    """Whether it runs; one that nobody waited for yet is dead all the same."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
