"""How long `rackloom doctor` takes on a large site, and its memory: all well, and findings in each rack.

    .venv/bin/python benchmarks/doctor.py [--racks 1000] [--rounds 5] [--quick]

One JSON object a row. The site is that of `rack_map.py --served`: a home on disk with 100 tenants, of which
this process is the service. Each round runs the doctor as a process, from its start to its end, and reads its
page. `wall_s` is the median of all rounds, `cpu_s` the least, which other work on the machine raises least.
One more process gives `peak_mib`, the most memory that it took, and splits the CPU seconds: `start_s` until
the command begins, with all that it imports, `read_s` for the records, `check_s` for the checks, `fixes_s`
for the commands of the findings and `print_s` for the page.

With findings, each rack has a degraded GPU and a degraded partition. In every second rack one GPU of the
tenant is outside its partition too.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from rack_map_served import Controller, planted, read_all
from site_figures import load

from rackloom.core.partitions.domain import DomainObservation, GpuHealth, PartitionHealth

TENANTS = 100
COMMAND = ("-m", "rackloom.cli.main")
SPLIT = """
import asyncio, json, pathlib, sys, time
import rackloom.cli.doctor, rackloom.app.snapshot.fabric, rackloom.app.snapshot.readers
import rackloom.app.snapshot.records
from rackloom.app import doctor
from rackloom.cli.main import main
from rackloom.core.diagnosis import examination, report
spent = {"start_s": time.process_time()}

def split(module, name, phase):
    work = getattr(module, name)
    def run(*given, **named):
        begun = time.process_time()
        done = work(*given, **named)
        spent[phase] = time.process_time() - begun
        return done
    setattr(module, name, run)

split(asyncio, "run", "read_s")
split(examination, "examine", "check_s")
split(doctor, "with_site_commands", "fixes_s")
split(report, "render_findings", "print_s")
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak_mib": peak // 1024, **spent}), file=sys.stderr)
"""
"""The command, which prints the MiB that it took and the CPU seconds of its phases to standard error."""


class FaultyController(Controller):
    """A controller whose rack has findings."""

    def observed(self) -> DomainObservation:
        """What is listed now."""
        well = super().observed()
        (held,) = well.partitions
        sick, *others = well.gpus
        lost = {sick.guid} if self.number % 2 else set()
        gpu = msgspec.structs.replace(sick, health=GpuHealth.DEGRADED)
        degraded = msgspec.structs.replace(held, health=PartitionHealth.DEGRADED, members=held.members - lost)
        return msgspec.structs.replace(well, gpus=(gpu, *others), partitions=(degraded,))


class Took(NamedTuple):
    """Seconds of one run."""

    wall: float
    cpu: float


def run(options: Sequence[str], home: Path) -> tuple[Took, str, str]:
    """Run the doctor to its end. The figures, its page, and its standard error."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *options, "doctor", "--home", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    # The page is read to its end first: standard error has a line at most, which fits into the pipe.
    page, errors = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1) or "examined:" not in page:
        raise RuntimeError(errors)
    return Took(wall, used.ru_utime + used.ru_stime), page, errors


def figures(site: str, home: Path, rounds: int, racks: int) -> dict[str, Any]:
    """The row of a site."""
    runs = [run(COMMAND, home) for _ in range(rounds)]
    took = [figure for figure, _, _ in runs]
    last = runs[-1][1].strip().splitlines()[-1]
    _, _, errors = run(("-c", SPLIT), home)
    split = {figure: round(value, 2) for figure, value in json.loads(errors.splitlines()[-1]).items()}
    return {
        "benchmark": "doctor",
        "measure": site,
        "racks": racks,
        "rounds": rounds,
        "wall_s": round(statistics.median(figure.wall for figure in took), 2),
        "cpu_s": round(min(figure.cpu for figure in took), 2),
        **split,
        "last_line": last,
    }


def with_faults(well: Controller) -> Controller:
    """The controller of the same domain, whose rack has findings."""
    faulty = FaultyController(well.number, well.domain, well.tenant)
    faulty.endpoint = well.endpoint
    return faulty


async def rows(racks: int, rounds: int) -> AsyncIterator[dict[str, Any]]:
    """A row for the site if all is well, and one with findings in each rack."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        async with planted(racks, min(racks, TENANTS), home) as (store, well):
            for site, controllers in (
                ("all well", well),
                ("findings in each rack", [*map(with_faults, well)]),
            ):
                await store.run(read_all, controllers)
                yield figures(site, home, rounds, racks) | load()


async def print_rows(racks: int, rounds: int) -> None:
    """A line for each row."""
    async for row in rows(racks, rounds):
        print(json.dumps(row), flush=True)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 racks, one round: shows that it works")
    asked = parser.parse_args()
    asyncio.run(print_rows(2, 1) if asked.quick else print_rows(asked.racks, asked.rounds))


if __name__ == "__main__":
    main()
