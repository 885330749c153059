"""Speed and size of the site service, one JSON object a row.

    python benchmarks/site.py [--quick] [--only MEASURE] [--domains N [--filled N]] [--folder FOLDER]

The service is whole: REST, store (SQLite on disk, synchronous FULL), reconciler, NMX-C driver. The racks
are simulated, by a process of their own that is reached over sockets. Each measure runs in a fresh process.
FOLDER is where the databases are written; the disk below it decides how long a commit takes.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Coroutine
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import goals
import site_fairness
import site_latency
import site_lists
import site_memory
import site_passes
import site_peer
import site_postgres
import site_rest
import site_sizing
import structlog
import uvloop

Rows = list[dict[str, Any]]
Arguments = dict[str, list[tuple[int, ...]]]
MEASURES: dict[str, Callable[..., Coroutine[Any, Any, Rows]]] = {
    "latency": site_latency.measured,
    "passes": site_passes.measured,
    "rest": site_rest.measured,
    "peer": site_peer.measured,
    "memory": site_memory.measured,
    "fairness": site_fairness.measured,
    "sizing": site_sizing.measured,
    "lists": site_lists.measured,
    "postgres": site_postgres.measured,
}
FULL: Arguments = {
    "latency": [(1, 100), (100, 100), (1000, 200)],
    "passes": [(100, 100), (1000, 1000)],
    "rest": [(2, 7, 200)],
    "peer": [(7, 400)],
    "memory": [(100,), (1000,)],
    "fairness": [(3, 10)],
    "sizing": [(1, 100, 60), (100, 100, 60), (1000, 100, 120), (5000, 30, 120)],
    "lists": [(1_200, 1_000_000, 20)],
    "postgres": [(3, 10)],
}
QUICK: Arguments = {
    "latency": [(2, 3)],
    "passes": [(2, 2)],
    "rest": [(1, 3, 32)],
    "peer": [(3, 300)],
    "memory": [(2,)],
    "fairness": [(1, 2)],
    "sizing": [(2, 3, 1)],
    "lists": [(1_200, 24_000, 3)],
    "postgres": [(1, 2)],
}
"""Measure -> the arguments of each of its runs."""
SIZED = ("latency", "passes", "memory", "sizing")
"""Measures whose first argument is the number of domains."""


def run(measure: str, arguments: tuple[int, ...], folder: Path) -> None:
    """Print the rows of one run."""
    # What the service logs as it works is no row; what goes wrong still is written to stderr.
    level = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    rows: Rows = uvloop.run(MEASURES[measure](*arguments, folder))
    for row in rows:
        print(json.dumps(goals.judged("site", row)), flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few domains and samples: shows that it works")
    parser.add_argument("--only", choices=MEASURES, help="one measure instead of all")
    parser.add_argument("--domains", type=int, help="one run, on a site of so many domains")
    parser.add_argument("--filled", type=int, help="with --only passes: domains that a tenant has")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    if asked.domains is not None and asked.only not in SIZED:
        parser.error(f"--domains goes with --only and one of {', '.join(SIZED)}")
    if asked.filled is not None and (asked.only != "passes" or asked.domains is None):
        parser.error("--filled goes with --domains and --only passes")
    asked.folder.mkdir(parents=True, exist_ok=True)
    for measure in [asked.only] if asked.only else MEASURES:
        for arguments in _runs((QUICK if asked.quick else FULL)[measure], asked.domains, asked.filled):
            process = get_context("spawn").Process(target=run, args=(measure, arguments, asked.folder))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{measure} {arguments}: the measurement ended with {process.exitcode}")


def _runs(known: list[tuple[int, ...]], domains: int | None, filled: int | None) -> list[tuple[int, ...]]:
    """The runs of a measure; on so many domains only, as the largest known run has it where none has them."""
    if domains is None:
        return known
    if filled is not None:
        return [(domains, filled)]
    return [run for run in known if run[0] == domains] or [(domains, *known[-1][1:])]


if __name__ == "__main__":
    main()
