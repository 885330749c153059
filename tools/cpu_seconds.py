"""Runs a command and prints the CPU seconds of its whole process tree. `make test` runs its tests this way.

    python -m tools.cpu_seconds NAME COMMAND [ARGUMENT ...]

`test_cpu_seconds` in `ceilings.toml` is the ceiling. CI sets `RACKLOOM_CPU_FACTOR=1.25`: the command then
fails if it takes more than 1.25 times the ceiling. Without the variable it only prints. CPU seconds grow with
the work of the tests, and little with the load of the machine. Elapsed time grows with both, so it has no
ceiling.

Processors differ, and a virtual one slows down while another machine works on the same core. So a loop of
fixed work runs on all processors before and after the command. If it takes longer than `LOOP_SECONDS` both
times, the seconds of the command count in proportion to the shorter time.

The kernel adds the time of a process to its parent when the parent waits for it. Tests start daemons and kill
programs that have children, so the parent of a process is often gone. On Linux this module therefore adopts
the orphans below it and waits for each. It also adds the time of processes that are still there at the end.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

CEILINGS = Path(__file__).resolve().parents[1] / "ceilings.toml"
FACTOR = "RACKLOOM_CPU_FACTOR"
PR_SET_CHILD_SUBREAPER = 36
LOOP = """
import time
begun, found = time.process_time(), {}
for number in range(3_000_000):
    found[number & 1023] = found.get(number & 511, 0) + number
print(time.process_time() - begun)
"""
LOOP_SECONDS = 0.30
"""CPU seconds of `LOOP` on the machine on which the ceiling was set. It was not measured there: the same
tests took 240 s on that machine, and 600 s on one where the loop took 0.75 s."""


def run(command: Sequence[str]) -> tuple[int, float]:
    """Runs the command. Returns its exit status, and the CPU seconds of all processes that it started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C reaches the command, too, which then ends. It would inherit SIG_IGN, but it inherits no handler.
    signal.signal(signal.SIGINT, lambda *_: None)
    before = _seconds_of_children()
    child = os.posix_spawnp(command[0], [*command], os.environ)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))

    # Every orphan is waited for as soon as it ends: a test that kills a daemon may wait until its id is free.
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    waited = _seconds_of_children() - before
    code = os.waitstatus_to_exitcode(status)
    return (code if code >= 0 else 128 - code), waited + running_descendants()


def _seconds_of_children() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def slowness() -> float:
    """How much longer this machine takes now than the one on which the ceiling was set; at least 1."""
    command = [sys.executable, "-c", LOOP]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    taken = [float(loop.communicate()[0]) for loop in loops]
    return max(sum(taken) / len(taken) / LOOP_SECONDS, 1.0)


def running_descendants() -> float:
    """The CPU seconds of the processes below this one that have not ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain spaces.
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        parents[int(file.parent.name)] = int(fields[1])
        # Its own time, and that of the children that it has waited for.
        ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))

    below, found = {os.getpid()}, 0
    while len(below) > found:
        found = len(below)
        below |= {process for process, parent in parents.items() if parent in below}
    return sum(ticks[process] for process in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """The command line."""
    name, *command = sys.argv[1:]
    ceiling = tomllib.loads(CEILINGS.read_text())["test_cpu_seconds"]
    before = slowness()
    status, spent = run(command)
    factor = min(before, slowness())
    seconds = spent / factor
    note = f", counted as {seconds:.0f} on a machine {factor:.1f} times as slow" if factor > 1 else ""
    print(f"{name}: {spent:.0f} s of CPU{note} (ceiling {ceiling})", flush=True)
    limit = float(os.environ.get(FACTOR, "inf")) * ceiling
    if seconds > limit:
        print(f"{name}: more than {limit:.0f} s: make tests cheaper, or mark them slow", file=sys.stderr)
        return status or 1
    if status == 0 and seconds < 0.8 * ceiling:
        print(f"{name}: lower test_cpu_seconds in ceilings.toml if other runs are as cheap")
    return status


if __name__ == "__main__":
    sys.exit(main())
