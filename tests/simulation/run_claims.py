"""Plays the life of ComputeDomains with every kind of death at every step, and ends with one line.

    python tests/simulation/run_claims.py [--only domain|channel|gang] [--death KIND] [--every N]

Runs the real controller, and the real IMEX plugins and daemons of three trays, in virtual time. The first
telling counts the steps (before and after each write to the API server, each call of kubelet, each file that
is made durable); then each step gets each kind of death, and each kind of process that is stopped there.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# Python puts only this folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

import structlog
import yaml
from tests.simulation.compute_domains.cluster import STOP_DISRUPTIONS, Disruption, StoryKind
from tests.simulation.compute_domains.story import StoryResult, play_story

say = partial(print, flush=True)
CLASSES = Path(__file__).parents[2] / "deploy/kubernetes/base/device-classes.yaml"
Case = tuple[StoryKind, Disruption | None, int]


def classes() -> list[dict[str, object]]:
    return list(yaml.safe_load_all(CLASSES.read_text()))


def outcome(case: Case) -> StoryResult:
    return play_story(classes(), *case)


def summary(results: Sequence[StoryResult], steps: dict[StoryKind, int], seconds: float) -> str:
    facts = {
        "steps": ", ".join(f"{plot.value} {count}" for plot, count in steps.items()),
        "kinds of death": len({result.death for result in results if result.death}),
        "stories": len(results),
        "deaths": sum(result.died for result in results),
        "longest teardown": f"{max((result.gone_after for result in results), default=0.0):.0f} s",
        "judgements of S8": sum(result.checks for result in results),
        "wall": f"{seconds:.0f} s",
        "violations": sum(bool(result.broken) for result in results),
    }
    return "; ".join(f"{what}: {value}" for what, value in facts.items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[kind.value for kind in StoryKind], help="one plot instead of all")
    parser.add_argument(
        "--death", choices=[death.value for death in Disruption], help="one kind instead of all"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="take only every so manieth step (half as many of gangs and stopped processes)",
    )
    parser.add_argument("--at", type=int, help="only this step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def steps_of(plot: StoryKind, death: Disruption, count: int, every: int) -> range:
    """Of a sample, gangs and processes that are stopped get half as many: their stories are longer."""
    thinner = every > 1 and (plot is StoryKind.GANG or death in STOP_DISRUPTIONS)
    return range(1, count + 1, 2 * every if thinner else every)


def quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    arguments = _arguments()
    began = time.perf_counter()
    plots = [StoryKind(arguments.only)] if arguments.only else list(StoryKind)
    kinds = [Disruption(arguments.death)] if arguments.death else list(Disruption)
    with multiprocessing.Pool(arguments.jobs, initializer=quiet) as pool:
        results = pool.map(outcome, [(plot, None, 0) for plot in plots])
        steps = {result.kind: result.steps for result in results}
        cases: list[Case] = [
            (plot, kind, at)
            for plot in plots
            for kind in kinds
            for at in ([arguments.at] if arguments.at else steps_of(plot, kind, steps[plot], arguments.every))
        ]
        for result in pool.imap_unordered(outcome, cases, chunksize=2):
            results.append(result)
            if result.broken:
                say(f"{result.kind.value} {result.death} at {result.at}: {'; '.join(result.broken)}")
    say(summary(results, steps, time.perf_counter() - began))
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
