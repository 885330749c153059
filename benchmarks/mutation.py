"""Reports the results of `make mutate`: the score of each module, and the mutants that survive.

    make mutate                                    all modules, from the point at which the last run stopped
    make mutate MODULE=core.partitions.planner     one module
    make mutate JOBS=1                             one test run at a time instead of two
    python benchmarks/mutation.py                  only the report
    .venv/bin/python -m mutmut show NAME           the change of a mutant

mutmut changes one expression of a function at a time, and runs the tests that call the function.
`pyproject.toml` configures it, and results stay in `mutants/`. A later run repeats the functions that
changed. After a change of tests, `make clean` makes it find out again which tests call which function.
Statements outside of functions have no mutants: leave out their clauses by hand.

A mutant counts as killed if a test fails with it or does not end in time. A mutant that no test calls
counts as survived. For a survivor, there are three remedies, in this order: a test of the behaviour that
the mutant changes, simpler code if nothing needs the changed part, or a block in
`tests/surviving_mutants.diff` with the reason if no behaviour differs. A test that repeats the expression
is no remedy.

The report ends with status 1 if nothing was run, or if a mutant survives that the file does not have. It
prints such a mutant in the form of the file. The function and the change identify a mutant, because its
number moves with each edit of the function.
"""

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

EXPLAINED = Path(__file__).parents[1] / "tests" / "surviving_mutants.diff"
PACKAGE = "rackloom."
KILLED = ("killed", "timeout")
SURVIVED = ("survived", "no tests", "suspicious", "segfault")
NOT_RUN = "not checked"


class Mutant(NamedTuple):
    """One change of one function; the lines without their indentation."""

    function: str
    """With its module, as in `core.domains.membership.abandoned_nodes`."""
    before: tuple[str, ...]
    after: tuple[str, ...]

    def text(self) -> str:
        """As the file has it."""
        return "\n".join(
            [f"@@ {self.function}", *map("-{}".format, self.before), *map("+{}".format, self.after)]
        )


def outcomes_by_module(listing: str) -> dict[str, dict[str, str]]:
    """Module -> mutant -> outcome, from `mutmut results`."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in listing.splitlines():
        name, _, outcome = line.strip().partition(": ")
        if outcome:
            found[name.rpartition(".")[0].removeprefix(PACKAGE)][name] = outcome
    return dict(sorted(found.items()))


def function_of(name: str) -> str:
    """The function of a mutant, from the name that mutmut gives it: `MODULE.x_FUNCTION__mutmut_NUMBER`."""
    module, _, mangled = name.removeprefix(PACKAGE).rpartition(".")
    mangled = mangled.rpartition("__mutmut_")[0]
    in_class = mangled.startswith("xǁ")
    return f"{module}.{mangled[2:].replace('ǁ', '.') if in_class else mangled.removeprefix('x_')}"


def mutant_of(name: str, diff: str) -> Mutant:
    """The mutant, from the diff that `mutmut show` prints."""
    _, _, hunks = diff.partition("\n@@")
    return Mutant(function_of(name), *_changed_lines(hunks.splitlines()))


def explained_mutants(text: str) -> set[Mutant]:
    """The mutants of the file. Lines that start with `#` are reasons."""
    found = set()
    function = ""
    lines: list[str] = []
    changes = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in [*changes, "@@ "]:
        starts_another = line.startswith("-") and any(earlier.startswith("+") for earlier in lines)
        if lines and (starts_another or line.startswith("@@ ")):
            found.add(Mutant(function, *_changed_lines(lines)))
            lines = []
        if line.startswith("@@ "):
            function = line.removeprefix("@@ ")
        else:
            lines.append(line)
    return found


def _changed_lines(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _marked("-", lines), _marked("+", lines)


def _marked(mark: str, lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line[1:].strip() for line in lines if line.startswith(mark))


def _counted(outcomes: Mapping[str, str]) -> tuple[int, int]:
    """How many were killed, and how many survived."""
    counted = Counter(outcomes.values())
    return sum(counted[outcome] for outcome in KILLED), sum(counted[outcome] for outcome in SURVIVED)


def _table(found: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"{'module':45} {'mutants':>7} {'killed':>6} {'survived':>8} {'not run':>7} {'score':>6}"]
    for module, outcomes in found.items():
        killed, survived = _counted(outcomes)
        run = killed + survived
        score = f"{killed / run:6.1%}" if run else f"{'-':>6}"
        lines.append(f"{module:45} {len(outcomes):7} {killed:6} {survived:8} {len(outcomes) - run:7} {score}")
    return "\n".join(lines)


def _mutmut(*words: str) -> str:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Print the report. Returns the exit status."""
    found = outcomes_by_module(_mutmut("results", "--all", "true"))
    print(_table(found))
    if all(outcome == NOT_RUN for outcomes in found.values() for outcome in outcomes.values()):
        print("No mutant was run.", file=sys.stderr)
        return 1
    names = [name for outcomes in found.values() for name, outcome in outcomes.items() if outcome in SURVIVED]
    survivors = {mutant_of(name, _mutmut("show", name)): name for name in names}
    explained = explained_mutants(EXPLAINED.read_text())
    unexplained = [(name, mutant) for mutant, name in survivors.items() if mutant not in explained]
    print(f"{len(survivors) - len(unexplained)} survivors that {EXPLAINED.name} explains")
    for name, mutant in unexplained:
        print(f"\n{name} survives, and {EXPLAINED.name} has no reason:\n{mutant.text()}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
