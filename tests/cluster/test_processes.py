"""A killed test run leaves no process behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.processes import start
from tests.waiting import until_seen

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
    # A child ends with its parent only after it has requested that from the kernel. setpriv does so first.
    until_seen(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep", "the child runs")
    run.send_signal(signal.SIGKILL)
    run.communicate()
    until_seen(lambda: not is_alive(child), "the child ends with its run")


def test_a_log_is_kept_and_its_end_can_be_shown(tmp_path: Path) -> None:
    child = start("echo", ["sh", "-c", "seq 100"], tmp_path)
    child.process.wait()
    assert child.ended()
    title, first, *_, last = child.tail().splitlines()
    assert (str(tmp_path / "echo.log") in title, first, last) == (True, "71", "100")


def is_alive(pid: int) -> bool:
    """Whether it runs. A zombie counts as dead."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
