"""Simulates the carve plane from many seeds and ends with one line that says what was run and what broke.

python tests/simulation/run.py --seeds 1000
python tests/simulation/run.py --seed 4711 --trace
"""

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Python puts only this folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
from tests.simulation.carving.run import LoadPlan, RunResult, count_crash_points, run_script, simulate

say = partial(print, flush=True)
YEAR = 365.25 * 86400


def outcome(seed: int) -> RunResult:
    result = simulate(seed)
    return result if result.broken else _without_trace(result)


def death(point: int) -> RunResult | None:
    result = run_script(point)
    if result.broken is None and result.lives == 2:
        return None
    say(f"point {point}: {result.broken or 'nobody died'}")
    return result


def summary(results: Sequence[RunResult], plan: LoadPlan) -> str:
    faults: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
    rack_seconds = sum(result.rack_seconds for result in results)
    hours = rack_seconds / 3600
    rates = ", ".join(f"{kind} {count / hours:.2f}" for kind, count in sorted(faults.items()))
    counts = {
        "seeds": len(results),
        "simulated": f"{rack_seconds / YEAR:.4f} rack-years",
        "faults per rack-hour": f"{faults.total() / hours:.1f} ({rates})",
        "faults": faults.total(),
        "operations": sum(result.operations for result in results),
        "operator steps": sum(result.steps for result in results),
        "requests": sum(result.requests for result in results),
        "seeds with two processes": sum(result.processes > 1 for result in results),
        "process lives": sum(result.lives for result in results),
        "judgements": sum(result.checks for result in results),
        "interval": f"{plan.interval:.0f} s",
        "violations": sum(result.broken is not None for result in results),
    }
    return "; ".join(f"{what}: {value}" for what, value in counts.items())


def _without_trace(result: RunResult) -> RunResult:
    return msgspec.structs.replace(result, trace=())


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, help="how many seeds, from 0 or from --seed (100)")
    parser.add_argument("--seed", type=int, help="only this seed, unless --seeds is given too")
    parser.add_argument("--trace", action="store_true", help="print what happened, line by line")
    parser.add_argument("--deaths", action="store_true", help="also kill a scripted story at every point")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.trace and arguments.seed is not None:
        results = [simulate(arguments.seed)]
        say("\n".join(results[0].trace))
    else:
        first = arguments.seed or 0
        seeds = range(first, first + (arguments.seeds or (1 if arguments.seed is not None else 100)))
        with multiprocessing.Pool(arguments.jobs) as pool:
            results = []
            for result in pool.imap_unordered(outcome, seeds, chunksize=4):
                results.append(result)
                if result.broken:
                    say(f"seed {result.seed}: {result.broken}")
    if arguments.deaths:
        with multiprocessing.Pool(arguments.jobs) as pool:
            deaths = pool.map(death, range(1, count_crash_points() + 1), chunksize=4)
        say(f"points of death: {len(deaths)}; not survived: {sum(result is not None for result in deaths)}")
        results += [result for result in deaths if result is not None]
    say(summary(results, LoadPlan()))
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
