"""Rackloom's allocator and CEL beside upstream's own, on the same inputs; one JSON object a row.

    python benchmarks/upstream.py allocate [SCENARIO_FILE ...] [--only SCENARIO ...] [--traps]
                                           [--nodes N ...] [--pods P] [--modes MODE ...]
    python benchmarks/upstream.py cel
    python benchmarks/upstream.py --quick         small ones: shows that they work, that answers agree
    python benchmarks/upstream.py --download      only asks the Go module proxy for what the build needs

Upstream is `peers/`, a Go program over k8s.io/dynamic-resource-allocation. It is built once and cached, as
the control plane of tests/cluster is; where it cannot be built, one row says why, and nothing is compared.
Both programs read the same scenario, each in a process of its own, and take turns. Reading is in no figure;
making the fleet, and upstream's allocator for each pod, is.

Three ways in which Go searches the nodes, in this order:

- `first`: one after another until the first fits, which is Rackloom's answer as well. Places are compared:
  `differences` counts the pods that went to other devices, and must be 0. Goal: ratio of at least 1.
- `sched`: as kube-scheduler does it, in parallel, until enough feasible nodes are found. Goal: at least 10.
- `rotating`: first fit from where the last pod went. This is another answer, and has no goal.

A ratio is what a pod costs upstream divided by what it costs Rackloom, above 1 where Rackloom is faster: in
CPU time (`cpu_ratio`, which judges the goal) and in wall time, each the median of the rounds with `_min` and
`_max` beside it. The first turn of upstream ends after `--limit` seconds; all turns of both sides then place
as many pods as it had placed by then. Where that is none, `upstream_stopped` says so, and a pod's ratio is at
least the one shown.

The scenarios are files, or those of `claim_scenarios.py`; with `--traps` those of `claim_traps.py`. With
several numbers of nodes, a row says how CPU time grows from the smallest to the largest (`growth`: 0 if it
does not, 1 if it grows as the nodes do; goal: 1.1), where both placed as many pods.
For CEL the ratios are of one evaluation with the variables made for it (`with_view`), with variables made
before (`without_view`), and of one compilation.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cel
import claim_scenarios
import claim_traps
import msgspec
from site_figures import load

from rackloom.core.allocate.objects import Device

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.cluster.build import NotBuilt, Tools, download, made  # noqa: E402

PEER = Tools(HERE / "peers", {"upstream": "."})
GOALS = {"first": 1.0, "sched": 10.0, "rotating": None}
GROWTH = claim_traps.GOAL
CEL_GOALS = {"with_view": 1.0, "without_view": None, "compile": 0.5}
Row = dict[str, Any]


def allocate_rows(scenario: Row, program: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """One scenario beside each mode of upstream."""
    text = json.dumps(scenario)
    for mode in asked.modes:
        pods, stopped = 0, False
        costs: list[tuple[Row, Row]] = []
        rounds = 1 if asked.quick and mode != "first" else asked.rounds
        for turn in range(rounds):
            # The first turn of upstream shows for how many pods there is time; all later ones place as many.
            ours = _ours(text, pods) if turn % 2 else None
            theirs = _theirs(program, mode, text, f"-limit={asked.limit}s" if turn == 0 else f"-pods={pods}")
            pods, stopped = max(1, len(theirs["places"])), not theirs["places"]
            ours = ours or _ours(text, pods)
            costs.append((_per_pod(theirs), _per_pod(ours)))
            if stopped:
                break
        row = {
            "measure": "allocate",
            "scenario": scenario["name"],
            "nodes": len(scenario.get("nodes", ["the only"])),
            "pods": pods,
        }
        row |= {"mode": mode, "rounds": len(costs)}
        if stopped:
            row["upstream_stopped"] = True
        elif mode == "first":
            row["differences"] = sum(
                here != there for here, there in zip(ours["places"], theirs["places"], strict=True)
            )
        for kind in ("cpu", "wall"):
            row |= _ratios(f"{kind}_ratio", [theirs[kind] / ours[kind] for theirs, ours in costs])
        row["ours_pods_per_cpu_s"] = round(1 / statistics.median(ours["cpu"] for _, ours in costs), 1)
        row["upstream_pods_per_cpu_s"] = round(1 / statistics.median(theirs["cpu"] for theirs, _ in costs), 1)
        yield {**row, **_goal(row["cpu_ratio"], GOALS[mode]), **load()}


def _per_pod(answer: Row) -> Row:
    return {kind: answer[f"{kind}_s"] / max(1, len(answer["places"])) for kind in ("cpu", "wall")}


def _ratios(name: str, ratios: list[float]) -> Row:
    found = {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
    return {key: float(f"{value:.3g}") for key, value in found.items()}


def _goal(ratio: float, goal: float | None) -> Row:
    return {} if goal is None else {"goal": goal, "met": ratio >= goal}


def _theirs(program: Path, mode: str, scenario: str, bound: str) -> Row:
    answer: Row = _run([str(program), "allocate", f"-mode={mode}", bound], scenario)
    return answer


def _ours(scenario: str, pods: int) -> Row:
    answer: Row = _run([sys.executable, __file__, "ours", "--pods", str(pods)], scenario)
    return answer


def _run(command: list[str], text: str) -> Any:
    """What a program makes of a scenario; both are this process's children, in its process group."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:2])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def answer_here(pods: int) -> None:
    """Rackloom's side: a scenario from standard input, its places and its cost to standard output."""
    places, cpu, wall = claim_scenarios.placed(msgspec.json.decode(sys.stdin.buffer.read()), pods)
    json.dump({"places": places, "cpu_s": cpu, "wall_s": wall}, sys.stdout)


def cel_rows(program: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Each expression of `cel.py` beside cel-go."""
    devices = cel.devices(cel.DEVICES)
    items = msgspec.convert(devices, list[Device])
    for expression in cel.EXPRESSIONS:
        question = {"driver": cel.DRIVER, "devices": devices, "expressions": [expression]}
        words = [str(program), "cel", f"-seconds={asked.seconds}s"]
        ratios: dict[str, list[float]] = {kind: [] for kind in CEL_GOALS}
        for _ in range(asked.rounds):
            (theirs,) = _run(words, json.dumps(question))
            ours = cel.row(expression, items, asked.seconds)
            if ours["matches"] != theirs["matches"]:
                sys.exit(f"{expression}: {ours['matches']} matches here, {theirs['matches']} in cel-go")
            for kind, found in ratios.items():
                found.append(theirs[f"{kind}_ns"] / ours[f"{kind}_ns"])
        row = {"measure": "cel", "expression": expression, "matches": ours["matches"], "rounds": asked.rounds}
        for kind, goal in CEL_GOALS.items():
            row |= _ratios(f"{kind}_ratio", ratios[kind])
            if goal is not None:
                row[f"{kind}_met"] = row[f"{kind}_ratio"] >= goal
            row[f"{kind}_ns"] = ours[f"{kind}_ns"]
        yield {**row, **load()}


def scenarios(asked: argparse.Namespace) -> Iterator[Row]:
    """Those of the files, or else the generated ones, each with its sizes in a row."""
    if asked.files:
        for file in asked.files:
            yield json.loads(file.read_text())
        return
    for name in asked.only or (claim_traps.SCENARIOS if asked.traps else claim_scenarios.SCENARIOS):
        made_by = claim_scenarios if name in claim_scenarios.SCENARIOS else claim_traps
        for nodes in asked.nodes:
            yield msgspec.to_builtins(made_by.written(name, nodes, asked.pods))


def growth(rows: list[Row]) -> Row | None:
    """How what a pod costs Rackloom grows with the number of nodes; None where pods are not as many."""
    first, last = rows[0], rows[-1]
    if first["nodes"] >= last["nodes"] or first["pods"] != last["pods"]:
        return None
    slower = first["ours_pods_per_cpu_s"] / last["ours_pods_per_cpu_s"]
    exponent = round(math.log(slower) / math.log(last["nodes"] / first["nodes"]), 2)
    row = {"measure": "growth", "scenario": last["scenario"], "mode": last["mode"], "pods": last["pods"]}
    return {**row, "growth": exponent, "goal": GROWTH, "met": exponent <= GROWTH}


def allocations(program: Path, asked: argparse.Namespace) -> int:
    """Print the rows of all scenarios; returns how many places differ."""
    differences = 0
    sizes: dict[tuple[str, str], list[Row]] = {}
    for scenario in scenarios(asked):
        for row in allocate_rows(scenario, program, asked):
            print(json.dumps(row), flush=True)
            differences += row.get("differences", 0)
            sizes.setdefault((row["scenario"], row["mode"]), []).append(row)
    for rows in sizes.values():
        if grown := growth(rows):
            print(json.dumps(grown), flush=True)
    return differences


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", choices=("allocate", "cel", "ours"), help="one of them; default: both"
    )
    parser.add_argument("files", nargs="*", type=Path, help="scenario files, in place of generated ones")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000])
    parser.add_argument("--pods", type=int, default=500)
    generated = [*claim_scenarios.SCENARIOS, *claim_traps.SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=generated, help="scenarios")
    parser.add_argument("--traps", action="store_true", help="the scenarios of claim_traps.py")
    parser.add_argument("--modes", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for a turn of upstream")
    parser.add_argument("--seconds", type=float, default=0.2, help="of CPU for each figure of an expression")
    parser.add_argument("--quick", action="store_true", help="200 nodes, 200 pods, one round but for `first`")
    parser.add_argument("--download", action="store_true", help="only what the build needs")
    asked = parser.parse_args()
    if asked.what == "ours":
        answer_here(asked.pods)
        return
    if asked.quick:
        asked.nodes, asked.pods, asked.seconds = [200], 200, 0.02
    try:
        if asked.download:
            download(PEER)
            return
        program = made(PEER) / "upstream"
    except NotBuilt as error:
        if asked.download:
            sys.exit(f"upstream: {error}")
        print(json.dumps({"measure": "skipped", "reason": f"upstream is not compared: {error}"}), flush=True)
        return
    differences = allocations(program, asked) if asked.what in (None, "allocate") else 0
    for row in cel_rows(program, asked) if asked.what in (None, "cel") else ():
        print(json.dumps(row), flush=True)
    if differences:
        sys.exit(f"{differences} pods went to other devices than upstream gives them")


if __name__ == "__main__":
    main()
