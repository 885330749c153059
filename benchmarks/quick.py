"""Runs every benchmark with `--quick`, and compares ratios with those of goals.toml. `make bench-quick`.

    python benchmarks/quick.py [BENCHMARK ...]      all of them, or those named, such as `claims`

It ends with 1 if a benchmark does not run, prints no row, or takes more than 15 minutes, or if a ratio
falls below 90 % of the documented one. goals.toml has these ratios, this module computes each from the rows
of a benchmark, and a test compares the two lists. A ratio is of CPU times of two sides that took turns in
the same run, so that other work on the machine affects both, or of counts. A benchmark whose ratio is too
low runs once more, and the better ratio counts, because code that became slower is slow twice.

`build/bench-quick.md` gets a table of all ratios and of all goals with their verdicts. A goal fails nothing,
because the short form is small. The table also names the goals that the last full run missed.

`BENCHMARKS` and `ELSEWHERE` name every program of this folder; a test compares them with its files.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goals import Goal, Ratio, read, verdicts

HERE = Path(__file__).parent
TABLE = HERE.parent / "build" / "bench-quick.md"
ENOUGH = 0.9
"""A ratio is too low below this share of the documented one."""
SECONDS = 900
"""The first run of `upstream` builds it."""
Rows = list[dict[str, Any]]
Seen = dict[str, tuple[Rows, dict[str, float]]]
"""Rows and ratios by benchmark."""

BENCHMARKS = (
    *(
        "cel",
        "claim_scenarios",
        "claim_traps",
        "claims",
        "commands",
        "compute_domains",
        "doctor",
        "files_read",
    ),
    *(
        "gangs",
        "node_footprint",
        "placement",
        "rack_map",
        "rack_map_browser",
        "site",
        "start",
        "transfer",
        "twin",
        "upstream",
    ),
)
ENDS = {"transfer": (0, 1)}
"""Exit statuses other than 0: one attempt of `transfer` is too few for a ratio, which it says by 1."""
ELSEWHERE = {
    "bare_site": "a process of site.py",
    "mutation": "reads what `make mutate` left, which is not in CI",
    "node": "tests/benchmarks/test_node_benchmark.py, in `make test-all`; its NICs need root",
    "nodes": "needs real kubelets: `tests/node/run.py --benchmark`, a step of its own in CI",
    "quick": "this program",
    "site_server": "a process of site.py",
    "site_tenants": "a process of site.py",
}


PROMISED: dict[str, dict[str, tuple[int, str]]] = {
    "site": {
        "API call to Ready": (1, "domains samples p50_ms p99_ms"),
        "full pass": (2, "to_do domains gpus cpu_s wall_s passes"),
        "REST reads": (4, "of against ratio rounds per_s cpu_ms"),
        "peer": (15, "of ratio cpu_ratio cpu_us request_us sql_us token_us"),
        "memory": (1, "domains resident_mib kib_per_domain"),
        "two tenants": (2, "writers write_p99_factor read_p99_factor busy_per_s"),
        "sizing": (1, "domains start_s idle_cpus resident_mib database_mib ready_p99_ms"),
        "lists of a small tenant": (1, "own_rows foreign_rows lists worst_ms added_ms"),
        "writes on PostgreSQL": (4, "writers"),
    },
    "twin": {
        "start": (1, "racks gpus slices answers_s nodes_s resident_mib busy_at_rest"),
        "REST": (1, "calls p50_ms p99_ms goal_p99_ms met"),
        "map": (1, "changes never_shown p50_ms max_ms goal_max_ms met"),
        "loop": (1, "late_p50_ms late_p99_ms late_max_ms"),
    },
}
"""Of benchmarks with several measures: how many rows each has, and fields of every such row beside `load` and
`cpus`. No figure is negative."""


class Failed(Exception):
    """A benchmark did not do what it should; the text says what."""


def claims_growth(rows: Rows) -> float:
    """What a claim costs on 40 nodes through what it costs on 160."""
    costs = {
        nodes: [row["cpu_s"] / row["claims"] for row in rows if row.get("nodes") == nodes]
        for nodes in (40, 160)
    }
    return statistics.median(costs[40]) / statistics.median(costs[160])


def start_of(command: str) -> Callable[[Rows], float]:
    """What `python -c pass` costs through what the command costs."""
    return lambda rows: next(1 / row["ratio"] for row in rows if row["command"] == command)


def modules_of(command: str) -> Callable[[Rows], float]:
    """How many modules `python -c pass` imports through how many the command does."""

    def compute(rows: Rows) -> float:
        modules = {row["command"]: row["modules"] for row in rows}
        return float(modules["python -c pass"] / modules[command])

    return compute


def bare_peer(rows: Rows) -> float:
    """The median over all requests of what each costs the bare application, through what it costs ours."""
    return statistics.median(row["cpu_ratio"] for row in rows if row["measure"] == "peer")


def upstream_first(scenario: str) -> Callable[[Rows], float]:
    """What a pod costs upstream's allocator, through what it costs ours."""
    return lambda rows: next(
        row["cpu_ratio"] for row in rows if (row.get("scenario"), row.get("mode")) == (scenario, "first")
    )


def cel_go(kind: str) -> Callable[[Rows], float]:
    """The median over all expressions."""
    return lambda rows: statistics.median(row[f"{kind}_ratio"] for row in rows if row["measure"] == "cel")


RATIOS: dict[str, tuple[str, Callable[[Rows], float]]] = {
    "claims-growth": ("claims", claims_growth),
    "start-place": ("start", start_of("rackloom place, 2 racks")),
    "start-allocate": ("start", start_of("rackloom claim allocate")),
    "modules-place": ("start", modules_of("rackloom place, 2 racks")),
    "modules-allocate": ("start", modules_of("rackloom claim allocate")),
    "site-bare-peer": ("site", bare_peer),
    "upstream-selectors": ("upstream", upstream_first("selectors")),
    "upstream-uuid": ("upstream", upstream_first("uuid")),
    "upstream-memory": ("upstream", upstream_first("memory")),
    "cel-with-view": ("upstream", cel_go("with_view")),
    "cel-without-view": ("upstream", cel_go("without_view")),
    "cel-compile": ("upstream", cel_go("compile")),
}
"""Name -> the benchmark that it is of, and how it is computed of its rows. Higher is better."""


def run(name: str) -> Rows:
    """The rows of one benchmark, which print as they are on its standard output.

    Raises:
        Failed: it ended as it should not, says nothing, or not what it promises.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{name}: not finished after {SECONDS} s") from error
    if done.returncode not in ENDS.get(name, (0,)):
        raise Failed(f"{name}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    lines = done.stdout.splitlines()
    if not lines:
        raise Failed(f"{name}: printed nothing\n{done.stderr[-3000:]}")
    say(f"{name}: {len(lines)} lines in {time.monotonic() - began:.0f} s")
    rows: Rows = [json.loads(line) for line in lines if line.startswith("{")]
    for row in rows:
        if row.get("measure") == "skipped":
            say(f"{name}: SKIPPED: {row['reason']}")
    if wrong := broken_promises(name, rows):
        raise Failed(f"{name}: {'; '.join(wrong)}")
    return rows


def broken_promises(name: str, rows: Rows) -> list[str]:
    """What `PROMISED` says of a benchmark and its rows do not show."""
    wrong = []
    for measure, (count, fields) in PROMISED.get(name, {}).items():
        of_measure = [row for row in rows if row["measure"] == measure]
        if len(of_measure) != count:
            wrong.append(f"{measure}: {len(of_measure)} rows, not {count}")
        for row in of_measure:
            missing = {*fields.split(), "load", "cpus"} - row.keys()
            wrong += [f"{measure}: no {field}" for field in sorted(missing)]
            figures = {field: value for field, value in row.items() if isinstance(value, int | float)}
            wrong += [f"{measure}: {field} is {value}" for field, value in figures.items() if value < 0]
            wrong += [f"{measure}: no {field}" for field in ("calls", "changes") if row.get(field) == 0]
            if row.get("never_shown"):
                wrong.append(f"{measure}: {row['never_shown']} changes were never shown")
    return wrong


def ratios_of(name: str, rows: Rows) -> dict[str, float]:
    """The ratios of one benchmark; none where the peer is missing, which it has said."""
    if any(row.get("measure") == "skipped" for row in rows):
        return {}
    return {ratio: compute(rows) for ratio, (of, compute) in RATIOS.items() if of == name}


def too_low(found: dict[str, float], documented: dict[str, float]) -> list[str]:
    """The ratios that are too low."""
    return [name for name, ratio in found.items() if ratio < ENOUGH * documented[name]]


def checked(name: str, documented: dict[str, float], seen: Seen) -> None:
    """Run one benchmark, twice if its ratios are too low, and add its rows and ratios to `seen`.

    Raises:
        Failed: it does not run, or its ratios are too low twice.
    """
    rows = run(name)
    found = ratios_of(name, rows)
    if too_low(found, documented):
        say(f"{name}: once more, for {', '.join(too_low(found, documented))}")
        rows = run(name)
        found = {ratio: max(found[ratio], again) for ratio, again in ratios_of(name, rows).items()}
    seen[name] = rows, found
    for ratio, figure in found.items():
        say(f"{name}: {ratio} {figure:.3g} (documented {documented[ratio]:.3g})")
    if low := too_low(found, documented):
        raise Failed(f"{name}: below {ENOUGH:.0%} of goals.toml: {', '.join(low)}")


def table(ratios: dict[str, Ratio], goals: list[Goal], seen: Seen) -> str:
    """All ratios and goals with their verdicts, as Markdown."""
    found = {name: figure for _, of in seen.values() for name, figure in of.items()}
    lines = [
        "# Benchmarks in their short form",
        "",
        f"Load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs at the end.",
        "",
        "| ratio, which CI checks | figure | documented | verdict |",
        "|---|---|---|---|",
    ]
    for name, ratio in ratios.items():
        figure = f"{found[name]:.3g}" if name in found else "-"
        low = name in found and too_low({name: found[name]}, {name: ratio.figure})
        verdict = "**too low**" if low else "enough" if name in found else "not measured"
        lines.append(f"| `{name}`: {ratio.of} | {figure} | {ratio.figure:.3g} | {verdict} |")
    lines += [
        "",
        "| goal | short form | verdict | full form | missed by the last full run |",
        "|---|---|---|---|---|",
    ]
    for goal in goals:
        judged = list(verdicts(goal, seen[goal.benchmark][0])) if goal.benchmark in seen else []
        unseen = "only in the full form" if goal.benchmark in seen else "not run"
        # The rows of a goal may differ in their limits.
        worst = worst_first(goal, judged)[:1]
        figures = ", ".join(f"{figure:g} of {limit:g}" for figure, limit, _ in worst)
        verdict = ("met" if all(met for *_, met in judged) else "**missed**") if judged else unseen
        limit = f"{goal.limit:g}" if isinstance(goal.limit, int | float) else "its limit"
        lines.append(
            f"| {goal.name}: at {goal.at} {limit} | {figures or '-'} | {verdict} | `{goal.command}` | "
            f"{goal.missed and f'**{goal.missed}**'} |"
        )
    return "\n".join(lines) + "\n"


def worst_first(goal: Goal, judged: list[tuple[float, float, bool]]) -> list[tuple[float, float, bool]]:
    """The rows of a goal by their distance to the limit, the worst first."""
    sign = -1 if goal.at == "most" else 1
    return sorted(judged, key=lambda row: sign * (row[0] / row[1] if row[1] else row[0]))


def say(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def main(names: list[str]) -> None:
    """Run those named, or all, to the end and write the table. Then fail for those that failed."""
    goals, failures = read(), []
    documented = {name: ratio.figure for name, ratio in goals.ratios.items()}
    seen: Seen = {}
    for name in names or BENCHMARKS:
        try:
            checked(name, documented, seen)
        except Failed as error:
            say(f"FAILED: {error}")
            failures.append(name)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(goals.ratios, goals.goal, seen))
    say(f"bench-quick: {TABLE.relative_to(HERE.parent)} has every ratio and goal")
    if failures:
        sys.exit(f"bench-quick: {', '.join(failures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
