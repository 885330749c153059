"""The CPU seconds of a process tree, including processes that lost their parent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import cpu_seconds

ROOT = Path(__file__).parents[2]
RUN = "import json, sys; from tools.cpu_seconds import run; print(json.dumps(run(sys.argv[1:])))"
BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")


def measured(script: str, *arguments: object) -> tuple[int, float]:
    """The status and seconds of a shell script. No remaining process may keep its output open."""
    command = [sys.executable, "-c", RUN, "sh", "-c", script, "sh", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return tuple(json.loads(done.stdout))


def test_children_of_children_count_and_the_status_is_passed_on():
    status, seconds = measured(f"{sys.executable} -S -c '{BURN}' & wait; exit 3")
    assert status == 3
    assert 0.25 <= seconds < 1


def test_the_status_of_a_killed_command_is_that_of_a_shell():
    assert measured("kill -9 $$")[0] == 128 + signal.SIGKILL


@linux
def test_an_orphan_counts_when_its_parent_did_not_wait_for_it(tmp_path):
    end = tmp_path / "end"
    os.mkfifo(end)
    # The inner shell ends at once. The pipe closes when the orphan ends.
    script = f"(exec >$1; {sys.executable} -S -c '{BURN}' &) & cat $1"
    assert measured(script, end)[1] >= 0.25


@linux
def test_a_daemon_that_outlives_the_command_counts(tmp_path):
    burnt, stay = tmp_path / "burnt", tmp_path / "stay"
    os.mkfifo(burnt)
    os.mkfifo(stay)
    daemon = f"{BURN}\nimport sys\nopen(sys.argv[1], 'w').close()\nopen(sys.argv[2]).read()"
    script = f'{sys.executable} -S -c "{daemon}" $1 $2 >/dev/null 2>&1 & cat $1'
    try:
        assert measured(script, burnt, stay)[1] >= 0.25
    finally:
        stay.open("w").close()  # the daemon ends


@pytest.mark.parametrize(
    ("factor", "seconds", "status", "result"),
    [
        (None, 10_000, 0, 0),
        ("1.25", 124, 0, 0),
        ("1.25", 126, 0, 1),
        ("1.25", 126, 5, 5),
        ("1.25", 10, 5, 5),
    ],
)
def test_only_a_factor_makes_the_ceiling_a_limit(
    monkeypatch, tmp_path, capsys, factor, seconds, status, result
):
    (tmp_path / "ceilings.toml").write_text("test_cpu_seconds = 100\n")
    monkeypatch.setattr(cpu_seconds, "CEILINGS", tmp_path / "ceilings.toml")
    monkeypatch.setattr(cpu_seconds, "run", lambda _command: (status, seconds))
    monkeypatch.setattr(cpu_seconds, "slowness", lambda: 1.0)
    monkeypatch.setattr(sys, "argv", ["cpu_seconds", "make test", "true"])
    monkeypatch.delenv("RACKLOOM_CPU_FACTOR", raising=False)
    if factor:
        monkeypatch.setenv("RACKLOOM_CPU_FACTOR", factor)
    assert cpu_seconds.main() == result
    printed = capsys.readouterr()
    assert printed.out.startswith(f"make test: {seconds} s of CPU (ceiling 100)\n")
    assert ("more than 125 s" in printed.err) == (factor is not None and seconds > 125)


def test_a_slow_machine_has_as_much_more_time(monkeypatch, capsys):
    monkeypatch.setattr(cpu_seconds, "run", lambda _command: (0, 296.0))
    monkeypatch.setattr(cpu_seconds, "slowness", iter((2.0, 3.0)).__next__)
    monkeypatch.setattr(sys, "argv", ["cpu_seconds", "make test", "true"])
    monkeypatch.setenv("RACKLOOM_CPU_FACTOR", "0.5")
    assert cpu_seconds.main() == 0
    assert "counted as 148 on a machine 2.0 times as slow" in capsys.readouterr().out


def test_this_machine_has_a_speed():
    assert 1.0 <= cpu_seconds.slowness() < 100


def test_the_tests_run_below_it_and_ci_sets_the_factor():
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    assert '-m tools.cpu_seconds "make test" $(BIN)/python -m pytest' in makefile
    assert "export RACKLOOM_CPU_FACTOR=1.25" in ci
