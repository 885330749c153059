"""How long small local commands take, beside `python -c pass` in the same rounds.

    .venv/bin/python benchmarks/start.py [--rounds 15] [--quick]

One JSON object a row. Each round runs every command once, in a process of its own. A round before compiles
what is imported, into a folder of its own. `cpu_ms` is the processor time of the process, `wall_ms` the time
until it ends, both the least of all rounds, which other work on the machine raises least; `ratio` is `cpu_ms`
against that of `python -c pass`. `modules` is how many modules the command imports: it is the same in each
run, while the times of one command vary by a quarter on a machine whose processor does not run at one speed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import goals

EXAMPLES = Path(__file__).parents[1] / "examples"
RACKLOOM = (sys.executable, "-m", "rackloom.cli.main")
CLAIMS, HARDWARE = EXAMPLES / "nixl-kv-transfer", ("--profile", "gb200-nvl72")
NOTHING = "python -c pass"
NO_SITE = str(Path(__file__))
"""No directory, so no site."""
COMMANDS: dict[str, tuple[str, ...]] = {
    NOTHING: (sys.executable, "-c", "pass"),
    "rackloom --version": (*RACKLOOM, "--version"),
    "rackloom --help": (*RACKLOOM, "--help"),
    "rackloom doctor, no site": (*RACKLOOM, "doctor", "--home", NO_SITE),
    "rackloom instance list, no site": (*RACKLOOM, "instance", "list", "--home", NO_SITE),
    "rackloom instance list --help": (*RACKLOOM, "instance", "list", "--help"),
    "rackloom topology list": (*RACKLOOM, "topology", "list"),
    "rackloom place, 2 racks": (
        *RACKLOOM,
        *("place", str(EXAMPLES / "imex-mpijob" / "mpijob.yaml"), "--profile", "gb200-nvl72", "--racks", "2"),
    ),
    "rackloom claim --help": (*RACKLOOM, "claim", "--help"),
    "rackloom claim allocate": (*RACKLOOM, "claim", "allocate", *HARDWARE, "--file", str(CLAIMS)),
    "rackloom claim explain": (*RACKLOOM, "claim", "explain", *HARDWARE, "--file", str(CLAIMS)),
    "rackloom claim check": (*RACKLOOM, "claim", "check", *HARDWARE, str(CLAIMS)),
}


class Took(NamedTuple):
    """One run, in milliseconds."""

    cpu: float
    wall: float


def run(command: Sequence[str], compiled: str) -> Took:
    """Run a command to its end. A command that is refused has started too; one that crashes raises."""
    settings = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    before, start = used_by_children(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    wall, cpu = time.perf_counter() - start, used_by_children() - before
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return Took(cpu * 1e3, wall * 1e3)


def used_by_children() -> float:
    """Processor seconds of all processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def modules_of(command: Sequence[str]) -> int:
    """How many modules a command imports."""
    python, *rest = command
    done = subprocess.run([python, "-X", "importtime", *rest], capture_output=True, text=True)
    return sum(line.startswith("import time:") for line in done.stderr.splitlines()) - 1  # its heading


def measured(rounds: int) -> dict[str, list[Took]]:
    """All runs of each command but the first."""
    took: dict[str, list[Took]] = {name: [] for name in COMMANDS}
    with TemporaryDirectory() as compiled:
        for _ in range(rounds + 1):
            for name, command in COMMANDS.items():
                took[name].append(run(command, compiled))
    return {name: some[1:] for name, some in took.items()}


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """The least of all rounds."""
    took = measured(rounds)
    least = {name: Took(*map(min, zip(*some, strict=True))) for name, some in took.items()}
    for name, times in least.items():
        yield {
            "benchmark": "start",
            "command": name,
            "rounds": rounds,
            "cpu_ms": round(times.cpu),
            "wall_ms": round(times.wall),
            "ratio": round(times.cpu / least[NOTHING].cpu, 1),
            "modules": modules_of(COMMANDS[name]),
            "load": round(os.getloadavg()[0], 1),
            "cpus": os.cpu_count(),
        }


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="4 rounds: shows that it works")
    asked = parser.parse_args()
    for row in rows(4 if asked.quick else asked.rounds):
        print(json.dumps(goals.judged("start", row)), flush=True)


if __name__ == "__main__":
    main()
